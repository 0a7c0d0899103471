"""Translate protobuf to jobs for the engine, and results to protobuf. No maths. Runs on the gRPC loop's thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from draft_service.slot_jobs import AdvanceJob
from outrider.engine.speculation.beam import BeamLevel, levels_from_proto
from outrider.engine.worker.worker_service import Respond, WorkerFacts, WorkerService
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import draft_pb2_grpc
from outrider.wire.errors import ConfigError, IncompatiblePair, InvalidRequest
from outrider.wire.peer_text import bound_strings
from outrider.wire.requests.params import MAX_CHOICES

PairingCheck = Callable[[str, int], Awaitable[None]]
"""Function that checks whether the draft worker fits a target, or prepares it for that target. Arguments: the target's
address and its epoch. Raises `ConfigError` or `IncompatiblePair` if the two do not fit."""


class DraftServicer(WorkerFacts, draft_pb2_grpc.DraftServiceServicer):
    """Implements the RPCs of a draft worker."""

    def __init__(self, service: WorkerService, checks: Sequence[PairingCheck]) -> None:
        """Create a servicer. `checks`: the pairing checks of the draft worker, in the order in which they run."""
        super().__init__(service)
        self._checks = checks
        self._vocab_size = service.info().vocab_size

    async def Pair(self, request: dpb.PairRequest, context: Any) -> dpb.PairReply:
        bound_strings(request)
        try:
            for check in self._checks:
                await check(request.target_address, request.target_epoch)
        except (ConfigError, IncompatiblePair) as error:
            return dpb.PairReply(reason=error.message)
        return dpb.PairReply(is_compatible=True)

    async def Control(self, requests: AsyncIterator[dpb.DraftRequestBatch], context: Any) -> None:
        await self._service.control(
            requests,
            context,
            batch_type=dpb.DraftReplyBatch,
            reply_type=dpb.DraftReply,
            take=self._advance,
            to_proto=_no_other_reply,
        )

    def _advance(self, owner: int, item: dpb.DraftRequest, respond: Respond) -> None:
        # An Advance has no reply: an error in it is sent later, under the id of the slot's OpenSlot.
        message = item.advance
        levels: tuple[BeamLevel, ...] = ()
        wrong = ""
        try:
            levels = levels_from_proto(message.levels, self._vocab_size, MAX_CHOICES)
        except InvalidRequest as error:
            wrong = error.message
        job = AdvanceJob(
            owner,
            message.slot,
            message.ticket,
            message.base_len,
            tuple(message.committed_ids),
            message.is_missed,
            levels,
            wrong,
        )
        self._service.engine.submit(job)


def _no_other_reply(result: Any) -> dict[str, Any]:
    raise TypeError(f"a draft answers with no {result!r}")
