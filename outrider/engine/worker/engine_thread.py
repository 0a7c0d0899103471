"""The engine thread: the one thread of a worker that uses torch, the weights and the KV cache. It also measures its
steps.

The times of the steps show how busy a worker is, and how long a worker may be silent before it must be hanging.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from outrider.engine.worker.jobs import JobError, JobFault
from outrider.wire.errors import OutriderError
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

Result = TypeVar("Result")

MAX_CONSECUTIVE_FAULTS = 3
"""Number of failed steps and jobs in a row, without a successful step, after which the worker ends and Ray restarts
it."""
LOADING_GRACE_S = 5.0
"""Seconds that `EngineThread.start` still waits for a load to end after another thread has called `fail`, since the
load's own error is more precise."""
PERIOD_S = 300.0
"""Seconds of a period; `StepTimes` remembers the longest step of the current period and of the one before."""


class StepTimes:
    """Durations of the steps of one engine thread. Only that thread writes; any thread may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num_steps = 0
        """Number of steps, since the thread's start, that did some work. It grows while the worker is healthy and
        busy."""
        self.busy_s = 0.0
        """Total seconds, since the thread's start, that the engine thread spent in steps that did some work."""
        self._longest_s = 0.0
        self._longest_before_s = 0.0
        self._since_s = clock()
        self._began_s: float | None = None

    def begin(self) -> None:
        """Record that the engine thread begins a step or a job."""
        self._began_s = self._clock()

    def begin_wait(self) -> None:
        """Record that the engine thread begins to wait for work."""
        self._began_s = None

    def add(self, seconds: float) -> None:
        """Record a step that did some work and took `seconds`."""
        now = self._clock()
        elapsed_s = now - self._since_s
        if elapsed_s >= PERIOD_S:
            longest_before_s = self._longest_s
            if elapsed_s >= 2 * PERIOD_S:
                longest_before_s = 0.0
            self._longest_before_s = longest_before_s
            self._longest_s = 0.0
            self._since_s = now
        self.num_steps += 1
        self.busy_s += seconds
        self._longest_s = max(self._longest_s, seconds)

    @property
    def longest_s(self) -> float:
        """Seconds of the longest step in the 5 to 10 minutes up to the latest step; 0 before the first step."""
        return max(self._longest_s, self._longest_before_s)

    @property
    def current_s(self) -> float:
        """Seconds since the current step or job began; 0 while the engine thread waits for work."""
        began_s = self._began_s
        if began_s is None:
            return 0.0
        return self._clock() - began_s


class EngineWorker(Protocol):
    """Object that does the work of an engine thread: in a draft worker it grows draft trees, in a target it verifies
    them. All methods run on the engine thread.
    """

    def handle(self, job: Any) -> None:
        """Handle one job. It may be answered now or in a later step."""

    def step(self, now: float) -> bool:
        """Run one batch of the work that is ready; return False if there was none. `now`: time.monotonic(), in
        seconds.
        """

    def next_wake(self) -> float | None:
        """Return the monotonic time, in seconds, at which waiting work becomes ready; None if only a job can make work
        ready.
        """

    def fail_step(self, error: Exception) -> None:
        """Answer every job of the step that raised `error` with the fault INTERNAL."""


class EngineThread:
    """Thread that runs an `EngineWorker`. `submit` queues jobs for it. Answers are sent in batches, at each `flush`."""

    def __init__(self, make: Callable[[EngineThread], EngineWorker], post: Callable[[list[Callable[[], None]]], None]):
        """Create the thread without starting it.

        `make`: function that loads the model and returns the worker; runs on the thread. `post`: function that receives
        the answers of a step, as a list of functions to call on the sending thread.
        """
        self._make = make
        self._post = post
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: list[Callable[[], None]] = []
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._stopping = False
        self._error: BaseException | None = None
        self._failure: OutriderError | None = None
        self._num_faults = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.worker: Any = None
        self.times = StepTimes()

    def start(self) -> None:
        """Start the thread, and block until `make` has loaded the model and created the `EngineWorker` on it.

        Raises the error of the load, or the error passed to `fail` during it. After `fail` the thread may still be
        loading; it ends with the process.
        """
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join(None if self._failure is None else LOADING_GRACE_S)
            raise self._error

    def submit(self, job: Any) -> None:
        """Queue a job; any thread may call it. None only wakes the engine thread."""
        self._inbox.put(job)

    async def call(self, job_of: Callable[[Callable[..., None]], Any], call: Callable[..., Result]) -> Result:
        """Run `call` on the engine thread; return its result or raise its error. `job_of`: wraps a function in a job
        that the worker handles by calling the function.
        """
        future = concurrent.futures.Future[Result]()

        def run(*owners: Any) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*owners))
                except Exception as error:
                    future.set_exception(error)

        self.submit(job_of(run))
        return await asyncio.wrap_future(future)

    def answer(self, send: Callable[[], None]) -> None:
        """Queue an answer to a job until the next `flush` sends it. `send`: function that sends the answer. Call it on
        the engine thread only.
        """
        self._answers.append(send)

    def stop(self, timeout_s: float) -> None:
        """End the thread after the running step, and wait for it at most `timeout_s` seconds."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def fail(self, error: OutriderError) -> None:
        """End the engine thread with `error` after the running step or load. Any thread may call it."""
        self._failure = self._error = error
        self._inbox.put(None)
        self._ready.set()
        self._ended.set()

    def wait_ended(self, timeout_s: float | None = None) -> BaseException | None:
        """Block until the thread ends; return the error that ended it, or None after `stop` or after `timeout_s`
        seconds.
        """
        self._ended.wait(timeout_s)
        return self._error

    @property
    def is_alive(self) -> bool:
        """Whether the thread is alive: it loads, works or waits for jobs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.worker = self._make(self)
            self._ready.set()
            with torch.inference_mode():
                self._loop()
        except BaseException as error:
            self._error = error
            if self.worker is None:
                return  # `start` raises it
            if isinstance(error, OutriderError):
                log.error("the engine ended: %s", error.message)
            else:
                log.exception("the engine ended")
        finally:
            self._ready.set()
            self._ended.set()

    def _loop(self) -> None:
        worked = False
        while not self._stopping:
            self.times.begin()
            self._drain(block=not worked)
            if self._failure is not None:
                raise self._failure
            worked = self._step()
            if not worked:
                self.flush()
        self.flush()

    def _step(self) -> bool:
        started_s = time.monotonic()
        try:
            worked = bool(self.worker.step(started_s))
        except Exception as error:
            self.worker.fail_step(error)
            self._note_fault(error, "a step failed")
            return True
        if worked:
            self.times.add(time.monotonic() - started_s)
            self._num_faults = 0
        return worked

    def _drain(self, block: bool) -> None:
        if block:
            wake = self.worker.next_wake()
            self.times.begin_wait()
            try:
                timeout_s = None
                if wake is not None:
                    timeout_s = max(0.0, wake - time.monotonic())
                job = self._inbox.get(timeout=timeout_s)
            except queue.Empty:
                return
            finally:
                self.times.begin()
            self._handle(job)
        while not self._inbox.empty():
            self._handle(self._inbox.get())

    def _handle(self, job: Any) -> None:
        if job is None:
            return
        try:
            self.worker.handle(job)
        except Exception as error:
            message = f"the worker failed to take the message in: {error}"
            respond = getattr(job, "respond", None)  # one-way jobs have none
            if respond is not None:
                self.answer(lambda: respond(JobError(JobFault.INTERNAL, message)))
            self._note_fault(error, "a job failed")

    def _note_fault(self, error: Exception, what: str) -> None:
        if not isinstance(error, OutriderError):
            log.error(what, exc_info=error)
        self._num_faults += 1
        if self._num_faults >= MAX_CONSECUTIVE_FAULTS:
            self.flush()
            raise error

    def flush(self) -> None:
        """Send the queued answers. A step calls it just before the device computes: the engine thread then waits
        without the GIL, so that the thread that sends the answers can run.
        """
        if self._answers:
            answers, self._answers = self._answers, []
            self._post(answers)
