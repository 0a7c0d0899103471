"""The target's part of a round: which target, a slot there, one verify, and what to do when it is answered otherwise.

A request stays where it is while it can: its cache is there. It moves when its target is lost, hangs, fails or has no
slot, and goes on from its committed tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from gateway.rounds.draft_length import TargetDrafts
from gateway.rounds.session import Session
from gateway.workers.links import Connection, WorkerSlot
from gateway.workers.member import TargetMember
from gateway.workers.placement import prefix_key
from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import DeadlineExceeded, InvalidRequest, WorkerFault, WorkerLost
from outrider.wire.health import Outcome

_REOPEN = (pb.WORKER_ERROR_CODE_UNKNOWN_SLOT, pb.WORKER_ERROR_CODE_STALE_EPOCH, pb.WORKER_ERROR_CODE_CANCELLED)


MAX_FAULTS = 2
"""Of one request in a row, before it fails: a request that no target can answer must not try them all."""


class GoElsewhere(Exception):
    """The target takes no slot for this request now; `reason` is a label of outrider_retries_total."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Verification:
    def __init__(self, model: ServedModel, session: Session, deadline_s: float, own_drafts: TargetDrafts) -> None:
        """`deadline_s`: monotonic time at which the request's life ends."""
        self.slot = WorkerSlot(session.slot_id, tpb.TargetRequest)
        self.why_again = ""
        """Why the last round has to be done again: a label of outrider_retries_total."""
        self.is_new_step = False
        """The last verdict is the first of its step."""
        self._model = model
        self._session = session
        self._deadline_s = deadline_s
        self._own_drafts = own_drafts
        self._key = prefix_key(session.request.prompt_ids, session.request.cache_salt)
        self._member: TargetMember | None = None
        self._decodes = False
        """It is in the steps there: not while it waits for a place or for memory."""
        self._avoid: str | None = None
        """Where it failed last."""
        self._num_faults = 0

    @property
    def member(self) -> TargetMember:
        """Once it is placed."""
        assert self._member is not None, "place() comes first"
        return self._member

    async def place(self) -> Connection:
        """The target of the next round: the one it has, or another when it cannot go on there. Waits for one.

        Raises WorkerLost, Unavailable or DeadlineExceeded.
        """
        if self._member is None or not self._may_stay(self._member):
            self._leave()
            async with self._in_time():
                self._member = await self._model.place_target(self, self._key, self._avoid)
        connection = self._member.connection
        if connection is None:
            raise WorkerLost("lost the worker: it went the moment it was chosen")
        return connection

    async def open(self, target: Connection) -> None:
        """Makes sure of a slot on this connection; waits its turn while no target has one free.

        Raises WorkerLost, GoElsewhere, DeadlineExceeded, InvalidRequest, WorkerFault.
        """
        if not self.slot.is_open_on(target):
            async with self._in_time():
                await self.member.room.enter(lambda: self._try_open(target))

    async def pay_for_retry(self) -> None:
        """Waits while the gateway's retries are used up. Raises DeadlineExceeded."""
        retries = self._model.retries
        async with self._in_time():
            while not retries.take():  # noqa: ASYNC110  (nobody tells when time has passed)
                await asyncio.sleep(1 / retries.floor_per_s)

    async def verify(
        self,
        target: Connection,
        ticket: int,
        num_draft_tokens: int,
        wait_budget_s: float,
        num_own_draft_tokens: int = 0,
    ) -> tpb.Verdict | None:
        """Asks for one round, of a proposal to wait for or one of the target's own. None: the slot is not as we
        thought; go again.

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
            num_own_draft_tokens=num_own_draft_tokens,
        )
        async with self._in_time():
            reply = await target.call(tpb.TargetRequest(verify=request))
        if reply.WhichOneof("item") == "verdict":
            self._check(reply.verdict)
            self.member.health.note(Outcome.OK)
            self._note_step(reply.verdict)
            self.slot.agreed_len = reply.verdict.committed_len + len(reply.verdict.token_ids)
            self._num_faults, self._avoid = 0, None
            return reply.verdict  # type: ignore[no-any-return]
        self._mend(target, reply.error)
        return None

    def close(self) -> None:
        """Free the slot. A round in flight is cancelled by it."""
        self._leave()

    def _may_stay(self, member: TargetMember) -> bool:
        connection = member.connection
        if connection is None or not member.health.lets(self):
            return False
        return self.slot.is_open_on(connection) or (not member.draining and self._avoid != member.name)

    def _leave(self) -> None:
        self.slot.close()
        if self._member is not None:
            self._member.planner.num_slots -= self._decodes
            self._decodes = False
            self._member.detach()
            self._member.room.note_freed()
            self._member = None

    async def _try_open(self, target: Connection) -> bool:
        """False: no slot is free now. A request that could never fit is refused as INVALID."""
        self.slot.opened(target, self._session.committed_len)
        reply = await target.call(tpb.TargetRequest(open=self._own_drafts.open_message(target)))
        if reply.WhichOneof("item") == "open":
            return True
        self.slot.open_again()
        if reply.error.code == pb.WORKER_ERROR_CODE_EXHAUSTED:
            self.member.told_exhausted()
            if self._model.has_room_beside(self.member):
                raise self._elsewhere("full")
            return False
        if reply.error.code == pb.WORKER_ERROR_CODE_DRAINING:
            self.member.told_draining()
            self._model.note_change()
            raise self._elsewhere("draining")
        if reply.error.code == pb.WORKER_ERROR_CODE_INVALID:
            raise InvalidRequest(f"the target cannot take the request: {reply.error.message}")
        if reply.error.code == pb.WORKER_ERROR_CODE_STALE_EPOCH:
            target.drop()  # we talk to a life that is over
            raise WorkerLost("lost the worker: it was started again")
        self._fault(reply.error)
        raise self._elsewhere("fault")

    def _elsewhere(self, reason: str) -> GoElsewhere:
        self._avoid = self.member.name
        return GoElsewhere(reason)

    def _mend(self, target: Connection, error: pb.WorkerError) -> None:
        """Make the next round possible. Raises WorkerFault when it would only fail again."""
        if error.code == pb.WORKER_ERROR_CODE_BEHIND:
            self.why_again = "behind"
            self.slot.agreed_len = min(error.known_len, self._session.committed_len)
            return
        self.slot.open_again()
        self.why_again = "slot"
        if error.code == pb.WORKER_ERROR_CODE_STALE_EPOCH:
            target.drop()  # we talk to a life that is over
        elif error.code == pb.WORKER_ERROR_CODE_INTERNAL:
            self._fault(error)
            self.why_again = "fault"
        elif error.code not in _REOPEN:
            raise WorkerFault(f"the target failed: {error.message}")

    def _fault(self, error: pb.WorkerError) -> None:
        """The target failed. Raises WorkerFault when it is the request's last chance."""
        self.member.health.note(Outcome.REFUSED)
        self._avoid = self.member.name
        self._num_faults += 1
        if self._num_faults >= MAX_FAULTS:
            raise WorkerFault(f"the target failed: {error.message}")

    def _time_left(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._time_left()):
                yield
        except TimeoutError:
            raise timed_out(self._model.config.request_timeout_s) from None

    def _note_step(self, verdict: tpb.Verdict) -> None:
        step_s = (verdict.forward_us + verdict.accept_us) / 1e6
        num_tokens, num_prompt_tokens = verdict.num_batch_tokens, verdict.num_batch_prompt_tokens
        if not self._decodes:
            self._decodes = True
            self.member.planner.num_slots += 1
        of_batch = (verdict.batch_size, num_tokens, num_prompt_tokens, step_s)
        self.is_new_step = self.member.planner.note_step(verdict.step, *of_batch)

    def _check(self, verdict: tpb.Verdict) -> None:
        """Never apply a verdict that is not for our length: it would repeat or lose tokens."""
        if verdict.committed_len != self._session.committed_len or not verdict.token_ids:
            self.member.health.note(Outcome.REFUSED)
            raise WorkerFault(
                f"the target's verdict is for length {verdict.committed_len} with {len(verdict.token_ids)} tokens, "
                f"the request is at {self._session.committed_len}"
            )


def timed_out(limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the request took longer than {limit_s:g} s (request_timeout_s)")
