"""The one thread of a worker that owns torch, the weights and the KV cache."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from outrider.engine.step_times import StepTimes
from outrider.wire.errors import OutriderError
from outrider.wire.log import get_logger

log = get_logger(__name__)

MAX_CONSECUTIVE_FAULTS = 3
"""Steps that may fail in a row before the worker gives up, so that Ray can start a fresh one."""
LOADING_GRACE_S = 5.0
"""A load that was failed from outside may still come to an error of its own, which says more."""


class EngineWorker(Protocol):
    """A proposer or a verifier. All methods run on the engine thread."""

    def handle(self, job: Any) -> None:
        """Take one job in; answer it now or in a later step."""

    def step(self, now: float) -> bool:
        """Do one batch of what is ready; False when nothing was. `now` is time.monotonic() in seconds."""

    def next_wake(self) -> float | None:
        """Monotonic time at which waiting work becomes ready by itself; None = only a job can make it so."""

    def fail_step(self, error: Exception) -> None:
        """Answer everything the failed step was about with INTERNAL."""


class EngineThread:
    """Runs an EngineWorker: jobs in by `submit`, answers out through `post`, in one batch a step."""

    def __init__(self, make: Callable[[EngineThread], EngineWorker], post: Callable[[list[Callable[[], None]]], None]):
        """`make` runs on the thread (it loads the model); `post` takes a step's answers, from the thread."""
        self._make = make
        self._post = post
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: list[Callable[[], None]] = []
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._stopping = False
        self._error: BaseException | None = None
        self._failure: OutriderError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.worker: Any = None
        self.times = StepTimes()

    def start(self) -> None:
        """Blocks until the worker is made. Raises what making it raised, or what it was failed with meanwhile: then the
        thread may still be at it, and goes with the process.
        """
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join(None if self._failure is None else LOADING_GRACE_S)
            raise self._error

    def submit(self, job: Any) -> None:
        """From any thread. None only wakes the engine."""
        self._inbox.put(job)

    def answer(self, send: Callable[[], None]) -> None:
        """On the engine thread: queue an answer for the end of the step."""
        self._answers.append(send)

    def stop(self, timeout_s: float) -> None:
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def fail(self, error: OutriderError) -> None:
        """From any thread: end with this error, now or after the step or load that is running, if that ever ends."""
        self._failure = self._error = error
        self._inbox.put(None)
        self._ready.set()
        self._ended.set()

    def wait_ended(self, timeout_s: float | None = None) -> BaseException | None:
        """Blocks until the thread ends; returns what ended it (None: `stop`, or the time ran out)."""
        self._ended.wait(timeout_s)
        return self._error

    @property
    def alive(self) -> bool:
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
        faults, worked = 0, False
        while not self._stopping:
            self.times.begin()
            self._drain(block=not worked)
            self._flush()  # what needed no step does not wait for one
            if self._failure is not None:
                raise self._failure
            try:
                started_s = time.monotonic()
                worked = self.worker.step(started_s)
                if worked:
                    self.times.add(time.monotonic() - started_s)
                faults = 0 if worked else faults
            except Exception as error:
                faults, worked = faults + 1, True
                if not isinstance(error, OutriderError):
                    log.exception("a step failed")
                self.worker.fail_step(error)
                if faults >= MAX_CONSECUTIVE_FAULTS:
                    self._flush()
                    raise
            self._flush()

    def _drain(self, block: bool) -> None:
        """Handle every job that is there; with `block`, wait for the first one or for `next_wake`."""
        if block:
            wake = self.worker.next_wake()
            self.times.rest()
            try:
                timeout = None if wake is None else max(0.0, wake - time.monotonic())
                job = self._inbox.get(timeout=timeout)
            except queue.Empty:
                return
            finally:
                self.times.begin()
            self._handle(job)
        while not self._inbox.empty():
            self._handle(self._inbox.get())

    def _handle(self, job: Any) -> None:
        if job is not None:
            self.worker.handle(job)

    def _flush(self) -> None:
        if self._answers:
            answers, self._answers = self._answers, []
            self._post(answers)
