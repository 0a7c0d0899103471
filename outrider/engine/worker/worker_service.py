"""The part of the Control stream that both workers share, on the gRPC loop's thread: opens, truncates, closes, epochs.

It translates protobuf to jobs and results to protobuf, with no maths, and adds the worker's part of a trace: one span
for each propose and verify of a traced slot, and one below it for each phase. Spans are made from the timings of the
reply when it leaves, so the engine knows nothing of them. The span of a round is the gateway's and its id is the
round's ticket, so tracing adds nothing to the messages of a round.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, Fault, JobError, Opened, OpenJob, OwnerGone, SlotKey, TruncateJob
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import TRUNCATE_REASONS
from outrider.wire.params import SamplingParams, drafter_of
from outrider.wire.trace import Spans, TraceParent
from outrider.wire.transport.streams import ControlStreams

_PHASES = {
    "propose": (("queue", "queue_us"), ("compute", "compute_us")),
    "verdict": (("wait", "wait_us"), ("queue", "queue_us"), ("forward", "forward_us"), ("accept", "accept_us")),
}
"""For each reply, the names of its phases' spans and the fields with their times in microseconds."""
_FACTS = {
    "propose": ("payload_bytes", "encoding", "num_fed_tokens", "num_cached_tokens"),
    "verdict": ("num_drafted", "num_accepted", "batch_size", "num_cached_tokens"),
}
"""For each reply, the fields that become attributes of its span: counts, never token ids."""


Respond = Callable[[Any], None]
"""A callback that takes a job's result, a JobError or a reply."""


class SlotSpans:
    """Remember which slots are traced, and add the spans of their rounds."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._traced: dict[SlotKey, TraceParent] = {}

    def asked(self, owner: int, item: Any) -> Respond | None:
        """Note an item that arrived on a Control stream; return the callback for its reply, or None when untraced."""
        kind = item.WhichOneof("item")
        if kind == "open":
            self._opened((owner, item.open.slot), TraceParent.parse(item.open.traceparent))
        elif kind == "close":
            self._traced.pop((owner, item.close.slot), None)
        elif kind in ("propose", "verify"):
            message = getattr(item, kind)
            place = self._traced.get((owner, message.slot))
            if place is not None:
                return self._asked(kind, message, place, time.time_ns())
        return None

    def gone(self, owner: int) -> None:
        for key in [key for key in self._traced if key[0] == owner]:
            del self._traced[key]

    def _opened(self, key: SlotKey, place: TraceParent | None) -> None:
        if place is not None and place.sampled:
            self._traced[key] = place
        else:
            self._traced.pop(key, None)

    def _asked(self, name: str, message: Any, request: TraceParent, arrived_ns: int) -> Respond:
        above = TraceParent(request.trace_id, message.ticket or request.span_id, True)
        facts: dict[str, Any] = {"outrider.slot": message.slot, "outrider.num_draft_tokens": message.num_draft_tokens}

        def add_spans(reply: Any) -> None:
            kind = reply.WhichOneof("item")
            if kind not in _PHASES:
                code = pb.WorkerErrorCode.Name(reply.error.code).removeprefix("WORKER_ERROR_CODE_")
                self._spans.add(name, above, arrived_ns, time.time_ns(), facts, error=code, server=True)
                return
            answer = getattr(reply, kind)
            for field in _FACTS[kind]:
                facts[f"outrider.{field}"] = getattr(answer, field)
            took_us = {phase: getattr(answer, field) for phase, field in _PHASES[kind]}
            end_ns = arrived_ns + 1000 * sum(took_us.values())
            own = self._spans.add(name, above, arrived_ns, end_ns, facts, server=True)
            if own is not None:
                self._add_phases(own, arrived_ns, took_us)

        return add_spans

    def _add_phases(self, whole: TraceParent, start_ns: int, took_us: dict[str, int]) -> None:
        """Add a child span for each phase that took time, end to end from `start_ns`."""
        for name, us in took_us.items():
            end_ns = start_ns + 1000 * us
            if us:
                self._spans.add(name, whole, start_ns, end_ns, {})
            start_ns = end_ns


def error_to_proto(error: JobError) -> pb.WorkerError:
    code = pb.WorkerErrorCode.Value(f"WORKER_ERROR_CODE_{error.fault.name}")
    return pb.WorkerError(code=code, message=error.message, known_len=error.known_len)


def open_job(owner: int, message: pb.OpenSlot, respond: Callable[[Any], None]) -> OpenJob:
    return OpenJob(
        owner=owner,
        slot_id=message.slot,
        committed_ids=tuple(message.committed_ids),
        num_prompt=message.num_prompt_tokens,
        params=SamplingParams.from_proto(message.params),
        respond=respond,
        cache_salt=message.cache_salt,
        deliver_to=message.deliver_to,
        target_epoch=message.target_epoch,
        drafter=drafter_of(message.drafter, "drafter"),
    )


class WorkerService:
    """Serves Control streams for one engine."""

    def __init__(
        self,
        engine: EngineThread,
        info: Callable[[], pb.WorkerInfo],
        tokenizer: pb.TokenizerFiles,
        epoch: int,
        spans: Spans | None = None,
    ) -> None:
        """`spans` receives the rounds of traced slots; None traces nothing."""
        self.engine = engine
        self.info = info
        self.tokenizer = tokenizer
        self.epoch = epoch
        self.streams = ControlStreams()
        self.draining = False
        """Whether new slots are refused. Open slots continue."""
        self.num_opening = 0
        """Number of open requests sent to the engine and not yet answered."""
        self._context_limit = info().context_limit
        self._slot_spans = None if spans is None else SlotSpans(spans)

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
        """Serve one Control stream until it ends.

        `take(owner, item, respond)` handles the items that only this worker knows; `to_proto(result)` returns the
        field and message of their replies.
        """

        def dispatch(owner: int, item: Any, put: Callable[[Any], None]) -> None:
            add_spans = None if self._slot_spans is None else self._slot_spans.asked(owner, item)

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
            gone=self._gone,
        )

    def _gone(self, owner: int) -> None:
        self.engine.submit(OwnerGone(owner))
        if self._slot_spans is not None:
            self._slot_spans.gone(owner)

    def _open(self, owner: int, message: pb.OpenSlot, respond: Respond) -> None:
        if self.draining:
            why = "this worker takes no new slots because it is about to stop; open it elsewhere"
            respond(JobError(Fault.DRAINING, why))
            return

        def opened(result: Any) -> None:
            self.num_opening -= 1
            respond(result)

        try:
            job = open_job(owner, message, opened)
        except InvalidRequest as error:
            respond(JobError(Fault.INVALID, error.message))
            return
        self.num_opening += 1
        self.engine.submit(job)

    def _dispatch(self, owner: int, item: Any, respond: Respond, take: Callable[[int, Any, Respond], None]) -> None:
        kind = item.WhichOneof("item")
        if item.epoch != self.epoch:
            if item.id:
                why = f"message is for epoch {item.epoch}, this worker's is {self.epoch}; open the slot again"
                respond(JobError(Fault.STALE_EPOCH, why))
        elif (num_ids := _num_committed_ids(item)) > self._context_limit:
            respond(JobError(Fault.INVALID, f"{num_ids} committed ids, the context limit is {self._context_limit}"))
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
            respond(JobError(Fault.INVALID, why))


def _num_committed_ids(item: Any) -> int:
    """Count the ids without converting them to Python ints."""
    kind = item.WhichOneof("item")
    return len(getattr(item, kind).committed_ids) if kind in ("open", "verify", "propose") else 0


def _shared_reply(result: Any) -> dict[str, Any] | None:
    """Return the reply field of a result that both workers give, None for any other."""
    if isinstance(result, JobError):
        return {"error": error_to_proto(result)}
    if isinstance(result, Opened):
        return {"open": pb.OpenReply(committed_len=result.committed_len)}
    return None
