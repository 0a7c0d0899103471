"""The part of the Control stream that both workers share, on the gRPC loop's thread: opens, truncates, closes, epochs.

It translates protobuf to jobs, and results to protobuf. The servicers of draft and target call it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from outrider.engine.sampling.grammar_state import Grammars
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.grammar_compiler import GrammarCompiler
from outrider.engine.worker.jobs import (
    CloseJob,
    CloseOwnerJob,
    JobError,
    JobFault,
    OpenJob,
    SlotKey,
    SlotOpened,
    SlotVocabulary,
    TruncateJob,
)
from outrider.engine.worker.slot_spans import SlotSpans
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import TRUNCATE_REASONS
from outrider.wire.protocol import other_protocol
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import MAX_CORPUS_ID_BYTES, MAX_LOGPROBS, Range, SamplingParams, check_token_ids
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import Speculation
from outrider.wire.telemetry.log import get_logger
from outrider.wire.telemetry.trace import Spans
from outrider.wire.transport.streams import ControlStreams

log = get_logger(__name__)

MAX_WAITING = 64
"""Maximum number of messages of one slot that wait until its grammar is compiled; further ones are refused."""

MAX_COMPILING = 256
"""Maximum number of a worker's slots whose grammars wait to be compiled; further slots are refused."""

Respond = Callable[[Any], None]
"""Function that is called with a job's result: a `JobError` or a reply."""


@dataclass(eq=False)
class _Opening:
    """Slot that is being opened, whose grammar is being compiled."""

    job: OpenJob
    task: asyncio.Task[None] | None = None
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Functions that handle the messages for the slot that arrived while its grammar is compiled."""


def error_to_proto(error: JobError) -> pb.WorkerError:
    """Return the error of a failed job as a protobuf message."""
    code = pb.WorkerErrorCode.Value(f"WORKER_ERROR_CODE_{error.fault.name}")
    return pb.WorkerError(code=code, message=error.message, committed_len=error.committed_len)


def open_job(owner: int, message: pb.OpenSlot, vocabulary: SlotVocabulary, respond: Callable[[Any], None]) -> OpenJob:
    """Return the job of an OpenSlot message. Raises `InvalidRequest` if a field of the message is wrong.

    `owner`: number of the gateway's stream. `vocabulary`: vocabulary of the message's token ids. `respond`: called with
    the result.
    """
    vocab_size = vocabulary.size
    refusal = other_protocol("the gateway", message.protocol, "this worker")
    if refusal is not None:
        raise InvalidRequest(refusal, param="protocol")
    check_token_ids("prediction_ids", message.prediction_ids, vocab_size)
    check_token_ids("source_ids", message.source_ids, vocab_size)
    Range(0, MAX_CORPUS_ID_BYTES).check("bytes of corpus_id", len(message.corpus_id))
    Range(0, min(MAX_LOGPROBS, vocab_size)).check("num_prompt_logprobs", message.num_prompt_logprobs)
    num_prompt_logprobs = None
    if message.HasField("num_prompt_logprobs"):
        num_prompt_logprobs = message.num_prompt_logprobs
    return OpenJob(
        owner=owner,
        slot_id=message.slot,
        committed_ids=tuple(message.committed_ids),
        num_prompt=message.num_prompt_tokens,
        params=SamplingParams.from_proto(message.params),
        respond=respond,
        cache_salt=message.cache_salt,
        corpus_id=message.corpus_id,
        target_address=message.target_address,
        target_epoch=message.target_epoch,
        drafter=Drafter.parse(message.drafter) if message.drafter else None,
        num_prompt_logprobs=num_prompt_logprobs,
        prediction_ids=tuple(message.prediction_ids),
        source_ids=tuple(message.source_ids),
        speculation=Speculation.from_proto(message.speculation, vocab_size),
        scheduling=Scheduling.from_proto(message.scheduling),
        vocabulary=vocabulary,
    )


class WorkerFacts:
    """Base class of the servicers of draft worker and target, with the RPCs that describe a worker."""

    def __init__(self, service: WorkerService) -> None:
        self._service = service

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.WorkerInfo:  # noqa: N802
        """Return the worker's present description."""
        return self._service.info()

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.TokenizerFiles:  # noqa: N802
        """Return the files of the worker's tokenizer."""
        return self._service.tokenizer


class WorkerService:
    """Service that serves the Control streams of one worker."""

    def __init__(
        self,
        engine: EngineThread,
        info: Callable[[], pb.WorkerInfo],
        tokenizer: pb.TokenizerFiles,
        epoch: int,
        grammars: Grammars,
        spans: Spans | None = None,
    ) -> None:
        """Create the service of an engine thread.

        `info`: function that returns the worker's description. `grammars`: compiled grammars of the worker's tokenizer.
        `spans`: receives the steps of traced slots; None to trace nothing.
        """
        self.engine = engine
        self.info = info
        self.tokenizer = tokenizer
        self.epoch = epoch
        self.streams = ControlStreams()
        self.draining = False
        """Whether the worker refuses new slots because it is about to stop. Open slots continue."""
        self.num_opening = 0
        """Number of slots that are being opened: their OpenSlot message has arrived and is not answered yet."""
        facts = info()
        self._context_limit = facts.context_limit
        self.own_vocabulary = SlotVocabulary(facts.vocab_size, tuple(facts.eos_token_ids), grammars)
        self.vocabulary_of: Callable[[pb.OpenSlot], SlotVocabulary] = lambda message: self.own_vocabulary
        """Function from a slot's OpenSlot message to the vocabulary of the token ids in all of the slot's messages."""
        self._slot_spans: SlotSpans | None = None
        if spans is not None:
            self._slot_spans = SlotSpans(spans)
        self._compiler = GrammarCompiler()
        self._compiling: dict[SlotKey, _Opening] = {}

    async def control(
        self,
        requests: AsyncIterator[Any],
        context: Any,
        *,
        batch_type: type[Any],
        reply_type: type[Any],
        take: Callable[[int, Any, Respond], None],
        to_proto: Callable[[Any], dict[str, Any]],
    ) -> None:
        """Serve one Control stream until it ends. An item (message of the stream) may be answered more than once.

        `take(owner, item, respond)` handles the items that only a draft worker has, or only a target.
        `to_proto(result)` returns the reply to such an item as {field of `reply_type`: value}. `reply_type`,
        `batch_type`: protobuf classes of a reply, and of the message in which replies are sent.
        """

        def dispatch(owner: int, item: Any, put: Callable[[Any], None]) -> None:
            add_spans: Respond | None = None
            if self._slot_spans is not None:
                add_spans = self._slot_spans.begin_item(owner, item)

            def respond(result: Any) -> None:
                reply = reply_type(id=item.id, **(_shared_reply(result) or to_proto(result)))
                put(reply)
                if add_spans is not None:
                    add_spans(reply)

            self._dispatch(owner, item, respond, take)

        await self.streams.serve(
            requests,
            context,
            make_batch=lambda items: batch_type(items=items),
            dispatch=dispatch,
            on_end=self._gone,
        )

    def _gone(self, owner: int) -> None:
        for key in list(self._compiling):
            if key[0] == owner:
                self._drop(key)
                self.num_opening -= 1
        self.engine.submit(CloseOwnerJob(owner))
        if self._slot_spans is not None:
            self._slot_spans.close_stream(owner)

    def _open(self, owner: int, message: pb.OpenSlot, respond: Respond) -> None:
        if self.draining:
            why = "this worker takes no new slots because it is about to stop; open it elsewhere"
            respond(JobError(JobFault.DRAINING, why))
            return

        is_answered = False

        def opened(result: Any) -> None:
            nonlocal is_answered
            self.num_opening -= not is_answered
            is_answered = True
            respond(result)

        try:
            vocabulary = self.vocabulary_of(message)
            job = open_job(owner, message, vocabulary, opened)
            if job.params.grammar:
                job.params.check(vocabulary.size)  # its length, before it is compiled
        except InvalidRequest as error:
            respond(JobError(JobFault.INVALID, error.message))
            return
        self.num_opening += 1
        grammar = vocabulary.grammars.get(job.params.grammar)
        if grammar is not None or not job.params.grammar:
            self.engine.submit(replace(job, grammar=grammar))
            return
        if len(self._compiling) >= MAX_COMPILING:
            why = f"the grammars of {MAX_COMPILING} slots wait to be compiled, no more are taken; open it later"
            opened(JobError(JobFault.EXHAUSTED, why))
            return
        opening = self._compiling[job.owner, job.slot_id] = _Opening(job)
        opening.task = asyncio.create_task(self._compile(opening, vocabulary.grammars))

    async def _compile(self, opening: _Opening, grammars: Grammars) -> None:
        job = opening.job
        result: OpenJob | JobError
        try:
            grammar = await self._compiler.compile(grammars, job.params.grammar, job.scheduling)
            result = replace(job, grammar=grammar)
        except InvalidRequest as error:
            result = JobError(JobFault.INVALID, error.message)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            log.exception("compiling the grammar of slot %d failed", job.slot_id)
            result = JobError(JobFault.INTERNAL, f"compiling the grammar failed: {error!r}")
        del self._compiling[job.owner, job.slot_id]
        if isinstance(result, OpenJob):
            self.engine.submit(result)
        else:
            job.respond(result)
        for handle_waiting in opening.waiting:
            handle_waiting()

    def _drop(self, key: SlotKey) -> _Opening:
        opening = self._compiling.pop(key)
        assert opening.task is not None
        opening.task.cancel()
        return opening

    def _close_compiling(self, key: SlotKey) -> None:
        opening = self._drop(key)
        opening.job.respond(JobError(JobFault.CANCELLED, "the slot was closed before its grammar was compiled"))
        for handle_waiting in opening.waiting:
            handle_waiting()

    def _too_long(self, message: pb.OpenSlot) -> str | None:
        # "9000 prediction_ids", where the context limit is below
        for name, ids in (("prediction_ids", message.prediction_ids), ("source_ids", message.source_ids)):
            if len(ids) > self._context_limit:
                return f"{len(ids)} {name}"
        return None

    def _dispatch(self, owner: int, item: Any, respond: Respond, take: Callable[[int, Any, Respond], None]) -> None:
        kind = item.WhichOneof("item")
        opening: _Opening | None = None
        if kind is not None:
            key = (owner, getattr(item, kind).slot)
            if kind == "close" and key in self._compiling:
                self._close_compiling(key)
            opening = self._compiling.get(key)
        if opening is not None and len(opening.waiting) >= MAX_WAITING:
            if item.id:
                why = f"slot has {MAX_WAITING} messages that wait for its grammar, no more are taken; wait for its open"
                respond(JobError(JobFault.INVALID, why))
        elif opening is not None:
            opening.waiting.append(partial(self._dispatch, owner, item, respond, take))
        elif item.epoch != self.epoch:
            if item.id:
                why = f"message is for epoch {item.epoch}, this worker's is {self.epoch}; open the slot again"
                respond(JobError(JobFault.STALE_EPOCH, why))
        elif (num_ids := _num_committed_ids(item)) > self._context_limit:
            respond(JobError(JobFault.INVALID, f"{num_ids} committed ids, the context limit is {self._context_limit}"))
        elif kind == "open" and (too_long := self._too_long(item.open)) is not None:
            respond(JobError(JobFault.INVALID, f"{too_long}, the context limit is {self._context_limit}"))
        elif kind == "open":
            self._open(owner, item.open, respond)
        elif kind == "truncate":
            reason = TRUNCATE_REASONS.get(item.truncate.reason, "unspecified")  # a newer gateway may know more
            self.engine.submit(TruncateJob(owner, item.truncate.slot, item.truncate.committed_len, reason))
        elif kind == "close":
            self.engine.submit(CloseJob(owner, item.close.slot))
        elif kind is not None:
            take(owner, item, respond)
        elif item.id:
            why = "message has no item, or one that this worker does not know; set exactly one"
            respond(JobError(JobFault.INVALID, why))


def _num_committed_ids(item: Any) -> int:
    kind = item.WhichOneof("item")
    if kind == "open":
        return len(item.open.committed_ids)
    if kind in ("verify", "advance"):
        message = getattr(item, kind)
        return len(message.committed_ids) + len(message.levels)
    return 0


def _shared_reply(result: Any) -> dict[str, Any] | None:
    if isinstance(result, JobError):
        return {"error": error_to_proto(result)}
    if isinstance(result, SlotOpened):
        return {"open": pb.OpenReply(committed_len=result.committed_len)}
    return None
