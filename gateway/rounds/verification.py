"""The target of a choice: its slot and lease there, its verdicts, and the recovery from errors.

A request stays on its target as long as possible, because its KV cache is there. It moves to another target if the
target is lost, hangs, fails or has no slot, and continues there from its committed tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence

from gateway.rounds.session import Session
from gateway.rounds.verdict_check import why_invalid
from gateway.workers.connection import Connection, WorkerSlot
from gateway.workers.member import TargetMember
from gateway.workers.request_placement import prefix_key
from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import DeadlineExceeded, InvalidRequest, WorkerFault, WorkerLost
from outrider.wire.processes.health import CallOutcome
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import MAX_DRAFT_TOKENS
from outrider.wire.requests.speculation import Speculation
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.streams import Replies

log = get_logger(__name__)

REOPENED = (pb.WORKER_ERROR_CODE_UNKNOWN_SLOT, pb.WORKER_ERROR_CODE_STALE_EPOCH, pb.WORKER_ERROR_CODE_CANCELLED)
"""Error codes of a target after which the choice's slot there is opened again and the round repeated."""
MAX_FAULTS = 2
"""Number of failures of targets (internal errors or invalid verdicts) in a row for one choice after which its request
fails. A request that makes every target fail then does not reach all targets."""
TOKENS_AHEAD = 2 * (MAX_DRAFT_TOKENS + 1)
"""Number of tokens that a target may commit beyond the last verdict that the gateway has used. It is enough for two
steps with MAX_DRAFT_TOKENS draft tokens each: the target runs one while the verdict of the other is on its way to the
gateway."""
EXTEND_AGAIN_S = 1.0
"""Seconds without a verdict after which the last Extend message, which lengthens the lease, is sent again, because it
may have been lost."""


class SlotRefused(Exception):
    """The target opens no slot for the choice now: it is full and another target is not, it drains, or it failed.

    `reason`: value of the label `reason` of outrider_retries_total.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Verification:
    """The target worker of one choice, with the choice's slot and lease there."""

    def __init__(self, model: ServedModel, session: Session, deadline_s: float) -> None:
        """Create the object, without a target yet.

        deadline_s: monotonic time at which the request times out, in seconds.
        """
        self.slot = WorkerSlot(session.slot_id, tpb.TargetRequest)
        self.why_again = ""
        """Reason why the last round must be repeated: value of the label `reason` of outrider_retries_total."""
        self.tickets: Sequence[int] = (0,)
        """Numbers by which the target recognises the deliveries for the last lease, one for each draft worker of the
        choice; one number if it has none. The first stands for the lease itself."""
        self._model = model
        self._session = session
        self._deadline_s = deadline_s
        self._lease_end_len = 0
        """Committed length up to which the lease was last extended."""
        self._verdicts: Replies[tpb.TargetReply] | None = None
        self._key = prefix_key(session.request.caller_prompt_ids, session.request.cache_salt)
        self._member: TargetMember | None = None
        self._avoid: str | None = None
        """Name of the target that failed last; None since the last valid verdict."""
        self._num_faults = 0

    @property
    def member(self) -> TargetMember:
        """Target worker of the choice. Only valid after `place`."""
        assert self._member is not None, "place() comes first"
        return self._member

    async def place(self) -> Connection:
        """Wait for the target of the next round, and return its connection.

        It is the current target, or another one if the choice cannot continue there.

        Raises Unavailable if no target becomes usable in time, WorkerLost if the chosen one is lost at once, and
        DeadlineExceeded if the request times out.
        """
        if self._member is None or not self._may_stay(self._member):
            self._leave()
            async with self._in_time():
                self._member = await self._model.place_target(self, self._key, self._avoid)
        connection = self._member.connection
        if connection is None:
            raise WorkerLost("lost the worker: it went the moment it was chosen")
        return connection

    async def open(self, target: Connection, speculation: Speculation | None, own: Drafter | None) -> None:
        """Open the choice's slot on this connection. Waits in line while the target has no free slot.

        speculation: speculation of the slot; None for decoding without draft tokens. own: the target's own drafter for
        the slot; None for none.

        Raises SlotRefused if another target should be tried, WorkerLost if the stream ends, DeadlineExceeded if the
        request times out, InvalidRequest if the target refuses the request as invalid, WorkerFault after MAX_FAULTS
        failures.
        """
        self.end_lease()
        message = self._session.open_message()
        if speculation is not None:
            message.speculation.CopyFrom(speculation.to_proto())
            message.prediction_ids.extend(self._session.request.prediction_ids)
        if own is not None and own is not Drafter.PREDICTION:
            message.drafter = own
        if self._session.num_prompt_logprobs is not None:
            message.num_prompt_logprobs = self._session.num_prompt_logprobs
        async with self._in_time():
            await self.member.slot_queue.enter(lambda: self._try_open(target, message))

    async def wait_for_retry(self) -> None:
        """Wait until the gateway's retry budget allows a retry. Raises DeadlineExceeded if the request times out."""
        retries = self._model.retries
        async with self._in_time():
            while not retries.use_retry():  # noqa: ASYNC110  (the budget refills with time, without an event)
                await asyncio.sleep(1 / retries.floor_per_s)

    @property
    def has_lease(self) -> bool:
        """Whether the target has a lease for the choice. Only with a lease does it step and send verdicts."""
        return self._verdicts is not None

    def begin_lease(self, target: Connection, *, drafted: Sequence[bool]) -> None:
        """Begin a lease at the committed tokens, with new tickets. The target drops tokens that it made beyond these.

        drafted: for each `DraftSession` of the choice, whether its draft worker is about to get the committed tokens,
        so that the target may expect draft tokens. It has at least one entry, even if no worker drafts.
        """
        self.end_lease()
        self.tickets = [secrets.randbits(64) for _ in drafted]  # nobody can guess them
        self._lease_end_len = self._session.committed_len + TOKENS_AHEAD
        verify = tpb.Verify(
            slot=self._session.slot_id,
            lease_end_len=self._lease_end_len,
            **self._session.resumed(self.slot.agreed_len),
        )
        for ticket, is_drafted in zip(self.tickets, drafted, strict=True):
            verify.tickets.add(ticket=ticket, is_drafted=is_drafted)
        self._verdicts = target.subscribe(tpb.TargetRequest(verify=verify))

    async def next_verdict(self, target: Connection) -> tpb.Verdict | None:
        """Wait for the next verdict of the lease. Return None if the round must be repeated.

        Raises WorkerLost if the stream ends, DeadlineExceeded if the request times out, InvalidRequest if its grammar
        cannot go on, WorkerFault for another error of the target or after MAX_FAULTS failures.
        """
        assert self._verdicts is not None, "begin_lease() comes first"
        async with self._in_time():
            reply = await self._next_reply(target, self._verdicts)
        if reply.WhichOneof("item") != "verdict":
            self.end_lease()
            self._handle_error(target, reply.error)
            return None
        verdict: tpb.Verdict = reply.verdict
        num_committed = self._session.num_committed_by(verdict)
        why = why_invalid(verdict, num_committed, len(self.tickets), self._num_expected_scores)
        if why is not None:
            self._handle_invalid(why)
            return None
        if verdict.committed_len != self._session.committed_len or not num_committed:
            self._note_other_length(verdict, num_committed)
            return None
        self.member.health.note(CallOutcome.OK)
        self.slot.agreed_len = verdict.committed_len + num_committed
        self._num_faults = 0
        self._avoid = None
        return verdict

    @property
    def _num_expected_scores(self) -> int | None:
        """Number of prompt tokens whose log-probs the next verdict must hold; None for no check."""
        if self._session.num_prompt_logprobs is None:
            return None
        return self._session.num_prompt - 1

    async def _next_reply(self, target: Connection, verdicts: Replies[tpb.TargetReply]) -> tpb.TargetReply:
        while True:
            try:
                async with asyncio.timeout(EXTEND_AGAIN_S):
                    return await verdicts.next()
            except TimeoutError:
                self._lease_end_len = 0
                self.extend(target)

    def extend(self, target: Connection) -> None:
        """Send an Extend message, which lengthens the target's lease, if at least half of TOKENS_AHEAD is used up.

        # TOKENS_AHEAD 130, and the last Extend allowed 330 tokens: the next is sent once 265 are committed
        """
        lease_end_len = self._session.committed_len + TOKENS_AHEAD
        if 2 * (lease_end_len - self._lease_end_len) < TOKENS_AHEAD:
            return
        self._lease_end_len = lease_end_len
        extend = tpb.Extend(slot=self._session.slot_id, ticket=self.tickets[0], lease_end_len=lease_end_len)
        target.send(tpb.TargetRequest(extend=extend))

    def end_lease(self) -> int:
        """End the lease. Verdicts that arrive later are ignored.

        Return the number of tokens in verdicts that had arrived and were not read yet. These are dropped.
        """
        verdicts = self._verdicts
        self._verdicts = None
        if verdicts is None:
            return 0
        verdicts.close()
        num_unused = 0
        for reply in verdicts.read_available():
            num_unused += self._session.num_committed_by(reply.verdict)
        return num_unused

    def close(self) -> None:
        """End the lease, close the slot, and no longer count the choice as placed on the target."""
        self._leave()

    def _may_stay(self, member: TargetMember) -> bool:
        connection = member.connection
        if connection is None or not member.health.allows(self):
            return False
        return self.slot.is_open_on(connection) or (not member.is_draining and self._avoid != member.name)

    def _leave(self) -> None:
        self.end_lease()
        self.slot.close()
        if self._member is not None:
            self._member.detach()
            self._member.slot_queue.note_freed()
            self._member = None

    async def _try_open(self, target: Connection, message: pb.OpenSlot) -> bool:
        self.slot.note_opened(target, len(self._session.committed))
        reply = await target.call(tpb.TargetRequest(open=message))
        if reply.WhichOneof("item") == "open":
            return True
        self.slot.open_again()
        if reply.error.code == pb.WORKER_ERROR_CODE_EXHAUSTED:
            self.member.note_exhausted()
            if self._model.has_other_free_target(self.member):
                raise self._elsewhere("full")
            return False
        if reply.error.code == pb.WORKER_ERROR_CODE_DRAINING:
            self.member.note_draining()
            self._model.note_change()
            raise self._elsewhere("draining")
        if reply.error.code == pb.WORKER_ERROR_CODE_INVALID:
            raise InvalidRequest(f"the target cannot take the request: {reply.error.message}")
        if reply.error.code == pb.WORKER_ERROR_CODE_STALE_EPOCH:
            target.drop()  # it belongs to a process that has ended
            raise WorkerLost("lost the worker: it was started again")
        self._fault(reply.error.message)
        raise self._elsewhere("fault")

    def _elsewhere(self, reason: str) -> SlotRefused:
        self._avoid = self.member.name
        return SlotRefused(reason)

    def _handle_error(self, target: Connection, error: pb.WorkerError) -> None:
        if error.code == pb.WORKER_ERROR_CODE_BEHIND:
            self.why_again = "behind"
            self.slot.agreed_len = min(error.committed_len, self._session.committed_len)
            return
        self.slot.open_again()
        self.why_again = "slot"
        if error.code == pb.WORKER_ERROR_CODE_STALE_EPOCH:
            target.drop()  # it belongs to a process that has ended
        elif error.code == pb.WORKER_ERROR_CODE_INTERNAL:
            self._fault(error.message)
            self.why_again = "fault"
        elif error.code == pb.WORKER_ERROR_CODE_GRAMMAR:
            raise InvalidRequest(f"the target cannot go on: {error.message}", param="grammar")
        elif error.code not in REOPENED:
            raise WorkerFault(f"the target failed: {error.message}")

    def _handle_invalid(self, why: str) -> None:
        self.end_lease()
        self.slot.open_again()
        self._fault(why)
        self.why_again = "fault"

    def _fault(self, why: str) -> None:
        self.member.health.note(CallOutcome.REFUSED)
        self._avoid = self.member.name
        self._num_faults += 1
        if self._num_faults >= MAX_FAULTS:
            raise WorkerFault(f"the target failed: {why}")

    def _time_left(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._time_left()):
                yield
        except TimeoutError:
            raise timed_out(self._model.config.request_timeout_s) from None

    def _note_other_length(self, verdict: tpb.Verdict, num_committed: int) -> None:
        # A verdict for another length is never applied: it would repeat or lose tokens.
        log.error(
            "the target's verdict is for length %d with %d tokens, request %s is at %d: it is set back",
            verdict.committed_len,
            num_committed,
            self._session.request.request_id,
            self._session.committed_len,
        )
        self.member.health.note(CallOutcome.REFUSED)
        self.why_again = "length"
        self.end_lease()


def timed_out(limit_s: float) -> DeadlineExceeded:
    """Return the error for a request that ran longer than `limit_s` seconds."""
    return DeadlineExceeded(f"the request took longer than {limit_s:g} s (request_timeout_s)")
