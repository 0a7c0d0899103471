"""The target's part of a round: a slot, one verify, and what to do when it cannot be answered as asked."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from gateway.links import Connection
from gateway.pair import Pair
from gateway.session import Session
from gateway.worker_slot import WorkerSlot
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import DeadlineExceeded, InvalidRequest, WorkerFault

_REOPEN = (pb.WORKER_ERROR_CODE_UNKNOWN_SLOT, pb.WORKER_ERROR_CODE_STALE_EPOCH, pb.WORKER_ERROR_CODE_CANCELLED)


class TargetSide:
    def __init__(self, pair: Pair, session: Session, deadline_s: float) -> None:
        """`deadline_s`: monotonic time at which the request's life ends."""
        self.slot = WorkerSlot(session.slot_id, tpb.TargetRequest)
        self._pair = pair
        self._session = session
        self._deadline_s = deadline_s
        self._num_faults = 0

    async def connection(self) -> Connection:
        """Waits for a target that is away. Raises Unavailable or DeadlineExceeded."""
        async with self._in_time():
            return await self._pair.target.wait_connected(self._pair.config.start_timeout_s)

    async def open(self, target: Connection) -> None:
        """Makes sure of a slot on this connection; waits its turn while the target has none free.

        Raises WorkerLost, DeadlineExceeded, InvalidRequest, WorkerFault.
        """
        if not self.slot.is_open_on(target):
            async with self._in_time():
                await self._pair.room.enter(lambda: self._try_open(target))

    async def verify(
        self, target: Connection, ticket: int, num_draft_tokens: int, wait_budget_s: float
    ) -> tpb.Verdict | None:
        """Asks for one round. None: the slot is not as we thought; go again.

        Raises WorkerLost, DeadlineExceeded, WorkerFault.
        """
        session = self._session
        request = tpb.Verify(
            slot=session.slot_id,
            base_len=self.slot.agreed_len,
            committed_ids=session.committed[self.slot.agreed_len :],
            num_draft_tokens=num_draft_tokens,
            ticket=ticket,
            wait_budget_us=int(wait_budget_s * 1e6) if num_draft_tokens else 0,
        )
        async with self._in_time():
            reply = await target.call(tpb.TargetRequest(verify=request))
        if reply.WhichOneof("item") == "verdict":
            self._check(reply.verdict)
            self.slot.agreed_len = reply.verdict.committed_len + len(reply.verdict.token_ids)
            self._num_faults = 0
            return reply.verdict  # type: ignore[no-any-return]
        self._mend(target, reply.error)
        return None

    def close(self) -> None:
        """Free the slot. A round in flight is cancelled by it."""
        self.slot.close()
        self._pair.room.note_freed()

    async def _try_open(self, target: Connection) -> bool:
        """False: no slot is free now. A request that could never fit is refused as INVALID."""
        self.slot.opened(target, self._session.committed_len)
        reply = await target.call(tpb.TargetRequest(open=self._session.open_message()))
        if reply.WhichOneof("item") == "open":
            return True
        self.slot.open_again()
        if reply.error.code == pb.WORKER_ERROR_CODE_EXHAUSTED:
            return False
        if reply.error.code == pb.WORKER_ERROR_CODE_INVALID:
            raise InvalidRequest(f"the target cannot take the request: {reply.error.message}")
        raise WorkerFault(f"the target refused the request: {reply.error.message}")

    def _mend(self, target: Connection, error: pb.WorkerError) -> None:
        """Make the next round possible. Raises WorkerFault when it would only fail again."""
        self._num_faults += error.code == pb.WORKER_ERROR_CODE_INTERNAL
        if error.code == pb.WORKER_ERROR_CODE_BEHIND:
            self.slot.agreed_len = min(error.known_len, self._session.committed_len)
        elif error.code in _REOPEN or self._num_faults == 1:
            self.slot.open_again()
        else:
            raise WorkerFault(f"the target failed: {error.message}")
        if error.code == pb.WORKER_ERROR_CODE_STALE_EPOCH:
            target.drop()  # we talk to a life that is over

    def _time_left(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._time_left()):
                yield
        except TimeoutError:
            raise timed_out(self._pair.config.request_timeout_s) from None

    def _check(self, verdict: tpb.Verdict) -> None:
        """Never apply a verdict that is not for our length: it would repeat or lose tokens."""
        if verdict.committed_len != self._session.committed_len or not verdict.token_ids:
            raise WorkerFault(
                f"the target's verdict is for length {verdict.committed_len} with {len(verdict.token_ids)} tokens, "
                f"the request is at {self._session.committed_len}"
            )


def timed_out(limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the request took longer than {limit_s:g} s (request_timeout_s)")
