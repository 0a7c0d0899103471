"""Admits requests and runs their choices. Implements `gateway.generation.Generator` with the workers of `Pools`."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence

from gateway.generation import GenerationRequest, RoundOutput, ServedFacts
from gateway.rounds.beam_session import BeamSession
from gateway.rounds.decode_loop import Decoder
from gateway.rounds.session import Session
from gateway.rounds.verification import timed_out
from gateway.telemetry.request_record import current_record
from gateway.telemetry.vllm_names import ABORTED, FAILED, ChoiceTimes
from gateway.tokenizer import Tokenizer
from gateway.workers.served import ServedModel
from gateway.workers.worker_pools import Pools
from outrider.wire.errors import ENDINGS, OutriderError, Overloaded, Unavailable
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)


class Coordinator:
    """The gateway's entry for generation, behind the interface `Generator`. It admits choices to their models' queues
    and runs them.
    """

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._metrics = pools.metrics
        self._num_admitted = 0
        self._idle = asyncio.Event()
        self._idle.set()
        models = pools.models
        self._metrics.running.set_function(lambda: sum(model.places.num_running for model in models.values()))
        self._metrics.queue_depth.set_function(lambda: sum(model.places.num_queued for model in models.values()))
        self._answers: weakref.WeakSet[RunningChoices] = weakref.WeakSet()
        self.draining = False

    def models(self) -> tuple[ServedFacts, ...]:
        return tuple(model.facts() for model in self._referenced_models())

    def tokenizer(self, model_id: str) -> Tokenizer:
        return self._model(model_id).reference.tokenizer

    def ready(self) -> str | None:
        if self.draining:
            return "the gateway is stopping"
        if not self._pools.models:
            return "no pool of targets"
        if self._pools.can_serve:
            return None  # requests to models that cannot be served are refused one by one
        return "; ".join(model.reason() or "" for model in self._pools.models.values())

    def refusals(self) -> Sequence[str]:
        return self._pools.refusals()

    @property
    def num_admitted(self) -> int:
        """Number of choices that run or wait, of all models together."""
        return self._num_admitted

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no choice runs or waits, for at most `timeout_s` seconds. Returns in both cases."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    def admit(self, model_id: str, num_choices: int, caller: bytes = b"", weight: float = 1.0) -> RunningChoices:
        """Let the `num_choices` choices of a request into a model's queue, and return them, not yet started.

        caller, weight: digest and weight of the caller's API key; a caller's share of the places is proportional to its
        weight. Raises Overloaded if the queue is full or the wait would be too long, Unavailable if the model is not
        served or has no usable target, or the gateway is stopping. Both hold the seconds after which to retry.
        """
        model = self._model(model_id)
        reason = model.reason()
        if self.draining:
            reason = "the gateway is stopping"
        if reason is not None:
            raise Unavailable(reason, retry_after_s=1.0)
        try:
            model.places.admit(num_choices, caller, weight)
        except Overloaded:
            self._metrics.requests.labels(outcome="refused").inc(num_choices)
            raise
        self._count(num_choices)

        def change(by: int) -> None:
            model.places.change(by, caller, weight)
            self._count(by)

        answers = RunningChoices(model, num_choices, change)
        self._answers.add(answers)
        return answers

    def end_all(self, error: OutriderError) -> None:
        """End every unfinished choice with this error."""
        for answers in list(self._answers):
            answers.end(error)

    def _referenced_models(self) -> list[ServedModel]:
        return [model for model in self._pools.models.values() if model.referenced.is_set()]

    def _model(self, model_id: str) -> ServedModel:
        for model in self._referenced_models():
            if model.id == model_id:
                return model
        raise Unavailable(f"the model {model_id!r} is no longer served here", retry_after_s=1.0)

    def _count(self, by: int) -> None:
        self._num_admitted += by
        if self._num_admitted:
            self._idle.clear()
        else:
            self._idle.set()


class RunningChoices:
    """The choices of one request, behind the interface `AdmittedGenerations`: a task each, and one queue of outputs."""

    def __init__(
        self,
        model: ServedModel,
        num_choices: int,
        change: Callable[[int], None],
    ) -> None:
        """Create the choices for `num_choices` places that are already taken in the queue.

        change: called with -1 to free one of these places.
        """
        self.requests: tuple[GenerationRequest, ...] = ()
        self._model = model
        self._num_choices = num_choices
        self._change = change
        # Bounded by the requests' max_tokens: a slow reader must not hold a slot, so the queue takes all.
        self._outputs: asyncio.Queue[tuple[int, RoundOutput | BaseException | None]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.num_output_tokens = 0
        self._started_s = self._deadline_s = 0.0
        self._opened = asyncio.Event()
        """Event that is set when a target has opened the first slot, or when a choice ends before."""
        self._early_failure: BaseException | None = None
        """Error that ended a choice before a slot was opened; None without one."""

    async def __aenter__(self) -> RunningChoices:
        return self

    def start(self, requests: tuple[GenerationRequest, ...]) -> None:
        self.requests = requests
        self._started_s = time.monotonic()
        self._deadline_s = self._started_s + self._model.config.request_timeout_s
        for index, request in enumerate(requests):
            if request.params.beams is not None and request.params.choice:
                self._change(-1)  # the search of choice 0 makes its output, too
                continue
            task = asyncio.create_task(self._run(index, request))
            task.add_done_callback(lambda _: self._change(-1))  # its place is free, though outputs may be unread
            self._tasks.append(task)

    async def __aexit__(self, *exc: object) -> None:
        if not self._tasks:
            self._change(-self._num_choices)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def end(self, error: OutriderError) -> None:
        """Make `stream` raise this error after the outputs that it has not yielded yet.

        The running choices are cancelled when the reader of `stream` leaves the `async with` block.
        """
        self._fail(0, error)

    async def wait_opened(self) -> None:
        await self._opened.wait()
        if self._early_failure is not None:
            raise self._early_failure

    async def stream(self) -> AsyncIterator[tuple[int, RoundOutput]]:
        """Yield (index of the choice from 0, output) for each round. Raises the first error of any choice.

        If the request times out first, DeadlineExceeded is raised, and outputs that were not yielded are dropped.
        """
        num_running = len(self._tasks)
        while num_running:
            index, output = await self._outputs.get()
            if time.monotonic() > self._deadline_s:
                raise timed_out(self._model.config.request_timeout_s)
            if isinstance(output, BaseException):
                raise output
            if output is None:
                num_running -= 1
            else:
                yield index, output

    async def _run(self, index: int, request: GenerationRequest) -> None:
        outcome = "cancelled"
        failure = ABORTED
        try:
            async with self._place(request.scheduling):
                await self._decode(index, request, time.monotonic())
            outcome = "ok"
            self._outputs.put_nowait((index, None))
        except OutriderError as error:
            outcome = type(error).__name__
            failure = FAILED
            self._fail(index, error)
        except ENDINGS:
            raise
        except BaseException as error:
            outcome = "internal"
            failure = FAILED
            log.exception("request %s failed", request.request_id)
            self._fail(index, error)
        finally:
            self._opened.set()
            self._model.metrics.requests.labels(outcome=outcome).inc()
            if outcome != "ok":
                self._model.ended.note_failure(request.model, failure)

    def _fail(self, index: int, error: BaseException) -> None:
        if not self._opened.is_set():
            self._early_failure = error
            self._opened.set()
        self._outputs.put_nowait((index, error))

    @contextlib.asynccontextmanager
    async def _place(self, scheduling: Scheduling) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._deadline_s - time.monotonic()):
                await self._model.places.acquire(scheduling)
        except TimeoutError:
            raise timed_out(self._model.config.request_timeout_s) from None
        try:
            with self._model.places.estimate.served():
                yield
        finally:
            self._model.places.release(scheduling)

    async def _decode(self, index: int, request: GenerationRequest, placed_s: float) -> None:
        metrics = self._model.metrics.answers(request.model)
        ended = self._model.ended
        metrics.prompt_tokens.inc(len(request.caller_prompt_ids))
        self._model.retries.note_choice()
        session_type = Session
        if request.params.beams is not None:
            session_type = BeamSession
        session = session_type(request, self._model.reference.tokenizer, next(self._model.slot_ids))
        decoder = Decoder(self._model, session, self._deadline_s, self._opened.set)
        first_s: float | None = None
        last_s = 0.0
        async with contextlib.aclosing(decoder.run()) as outputs:
            async for output in outputs:
                now = time.monotonic()
                if first_s is None:
                    first_s = now
                    metrics.time_to_first_token.observe(now - self._started_s)
                    metrics.cached_prompt_tokens.inc(session.usage.num_cached_prompt_tokens)
                elif output.tokens and not output.beam:
                    metrics.inter_token.observe((now - last_s) / len(output.tokens))
                    ended.note_pause(request.model, now - last_s)
                last_s = now
                if output.finish_reason is not None and output.usage is not None:
                    times = ChoiceTimes(self._started_s, placed_s, first_s, now, output.usage.num_completion_tokens)
                    ended.note(request.model, output.finish_reason, output.usage, times)
                    current_record().note_answer(times.first_token_s, times.per_token_s)
                self.num_output_tokens += len(output.tokens)
                self._outputs.put_nowait((index + output.beam, output))
