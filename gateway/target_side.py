"""The target's part of a round: one verify, and what to do when it cannot be answered as asked."""

from __future__ import annotations

import asyncio
import time

from gateway.draft_side import ignore_outcome
from gateway.links import Connection
from gateway.pair import Pair
from gateway.session import Session
from gateway.worker_slot import WorkerSlot
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable, WorkerFault

ROOM_POLL_S = 0.05
_REOPEN = (pb.WORKER_ERROR_CODE_UNKNOWN_SLOT, pb.WORKER_ERROR_CODE_STALE_EPOCH, pb.WORKER_ERROR_CODE_CANCELLED)


class NoRoom(Overloaded):
    """The target's slots or blocks are promised to others just now."""


class TargetSide:
    def __init__(self, pair: Pair, session: Session) -> None:
        self.slot = WorkerSlot(session.slot_id, tpb.TargetRequest)
        self._pair = pair
        self._session = session
        self._opening: asyncio.Future[tpb.TargetReply] | None = None
        self._deadline_s = time.monotonic() + pair.config.request_timeout_s

    async def connection(self) -> Connection:
        """Waits for a target that is away. Raises Unavailable or DeadlineExceeded."""
        timeout_s = min(self._pair.config.start_timeout_s, self.time_left())
        return await self._pair.target.wait_connected(timeout_s)

    async def verify(self, target: Connection, ticket: int, num_draft_tokens: int) -> tpb.Verdict | None:
        """Sends Open (once a connection) and Verify together. None: the slot is not as we thought; go again.

        Raises NoRoom, WorkerLost, DeadlineExceeded, Unavailable (a target that hangs), InvalidRequest, WorkerFault.
        """
        session = self._session
        if not self.slot.is_open_on(target):
            self._opening = target.call(tpb.TargetRequest(open=session.open_message()))
            self._opening.add_done_callback(ignore_outcome)
            self.slot.opened(target, session.committed_len)
        request = tpb.Verify(
            slot=session.slot_id,
            base_len=self.slot.agreed_len,
            committed_ids=session.committed[self.slot.agreed_len :],
            num_draft_tokens=num_draft_tokens,
            ticket=ticket,
            wait_budget_us=int(self._pair.wait_budget.seconds * 1e6) if num_draft_tokens else 0,
        )
        reply = await self._in_time(target.call(tpb.TargetRequest(verify=request)))
        if reply.WhichOneof("item") == "verdict":
            self._check(reply.verdict)
            self.slot.agreed_len = reply.verdict.committed_len + len(reply.verdict.token_ids)
            return reply.verdict
        await self._raise_if_open_failed()
        if reply.error.code == pb.WORKER_ERROR_CODE_BEHIND:
            self.slot.agreed_len = min(reply.error.known_len, session.committed_len)
        elif reply.error.code in _REOPEN:
            self.slot.open_again()
        else:
            raise WorkerFault(f"the target failed: {reply.error.message}")
        return None

    def time_left(self) -> float:
        """Seconds of the request's life. Raises DeadlineExceeded."""
        left = self._deadline_s - time.monotonic()
        if left <= 0:
            raise self._timed_out()
        return left

    async def wait_for_room(self, reason: NoRoom) -> None:
        """Until trying again makes sense; raises `reason` when the request's time is up."""
        if self._deadline_s - time.monotonic() <= ROOM_POLL_S:
            raise reason
        await asyncio.sleep(ROOM_POLL_S)

    async def _in_time(self, future: asyncio.Future[tpb.TargetReply]) -> tpb.TargetReply:
        time_left, limit = self.time_left(), self._pair.config.round_timeout_s
        try:
            async with asyncio.timeout(min(time_left, limit)):
                return await future
        except TimeoutError:
            if time_left <= limit:
                raise self._timed_out() from None
            raise Unavailable(f"the target answered no round within {limit:g} s", retry_after_s=5.0) from None

    async def _raise_if_open_failed(self) -> None:
        """A verify cannot succeed where the open was refused; the open's answer says why."""
        opening, self._opening = self._opening, None
        if opening is None:
            return
        reply = await opening
        if reply.WhichOneof("item") != "error" or reply.error.code in _REOPEN:
            return
        self.slot.open_again()
        if reply.error.code == pb.WORKER_ERROR_CODE_EXHAUSTED:
            raise NoRoom(f"the target has no room: {reply.error.message}", retry_after_s=1.0)
        if reply.error.code == pb.WORKER_ERROR_CODE_INVALID:
            raise InvalidRequest(f"the target cannot take the request: {reply.error.message}")
        raise WorkerFault(f"the target refused the request: {reply.error.message}")

    def _check(self, verdict: tpb.Verdict) -> None:
        """Never apply a verdict that is not for our length: it would repeat or lose tokens."""
        if verdict.committed_len != self._session.committed_len or not verdict.token_ids:
            raise WorkerFault(
                f"the target's verdict is for length {verdict.committed_len} with {len(verdict.token_ids)} tokens, "
                f"the request is at {self._session.committed_len}"
            )

    def _timed_out(self) -> DeadlineExceeded:
        limit = self._pair.config.request_timeout_s
        return DeadlineExceeded(f"the request took longer than {limit:g} s (request_timeout_s)")
