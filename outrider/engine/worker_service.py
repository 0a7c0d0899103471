"""What the servicers of both workers do alike: opens, truncates, closes, epochs. On the gRPC loop's thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from outrider.engine.engine_thread import EngineThread
from outrider.engine.jobs import Fault, JobError, Opened, OwnerGone
from outrider.engine.slot_spans import SlotSpans
from outrider.engine.translate import close_job, draining, error_to_proto, no_item, open_job, stale_epoch, truncate_job
from outrider.v1 import common_pb2 as pb
from outrider.wire.control import ControlStreams
from outrider.wire.errors import InvalidRequest
from outrider.wire.trace import Spans

Respond = Callable[[Any], None]
"""Takes the job's result or a JobError."""


class WorkerService:
    def __init__(
        self,
        engine: EngineThread,
        info: Callable[[], pb.WorkerInfo],
        tokenizer: pb.TokenizerFiles,
        epoch: int,
        spans: Spans | None = None,
    ) -> None:
        """spans: where the rounds of traced slots go."""
        self.engine = engine
        self.info = info
        self.tokenizer = tokenizer
        self.epoch = epoch
        self.streams = ControlStreams()
        self.draining = False
        """No slot is opened any more; those there are go on."""
        self.num_opening = 0
        """Slots on their way to the engine."""
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
        """One Control stream, until it ends.

        take(owner, item, respond): an item of the kind that only this worker knows. to_proto(result): its reply's
        field and message.
        """

        def dispatch(owner: int, item: Any, put: Callable[[Any], None]) -> None:
            told = None if self._slot_spans is None else self._slot_spans.asked(owner, item)

            def respond(result: Any) -> None:
                reply = reply_type(id=item.id, **(_shared_reply(result) or to_proto(result)))
                put(reply)
                if told is not None:
                    told(reply)

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
            respond(draining())
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
                respond(stale_epoch(item.epoch, self.epoch))
        elif kind == "open":
            self._open(owner, item.open, respond)
        elif kind == "truncate":
            self.engine.submit(truncate_job(owner, item.truncate))
        elif kind == "close":
            self.engine.submit(close_job(owner, item.close))
        elif kind is not None:
            take(owner, item, respond)
        elif item.id:
            respond(no_item())


def _shared_reply(result: Any) -> dict[str, Any] | None:
    """None for a result that only one worker gives."""
    if isinstance(result, JobError):
        return {"error": error_to_proto(result)}
    if isinstance(result, Opened):
        return {"open": pb.OpenReply(committed_len=result.committed_len)}
    return None
