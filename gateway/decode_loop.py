"""The round. `run_round` is the whole of it: propose, verify, commit. Everything that can go wrong ends in tokens,
in a re-opened slot, or in one error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from gateway.generation import DraftLogprobs, RoundOutput, RoundTimings
from gateway.links import Connection
from gateway.pair import Pair
from gateway.session import Session
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OutriderError,
    Overloaded,
    Unavailable,
    WorkerFault,
    WorkerLost,
)
from outrider.wire.log import get_logger

log = get_logger(__name__)

MAX_RECOVERIES = 8
"""Re-opens of one request in a row, without a committed token between, before it fails."""
REPLY_GRACE_S = 0.05
ROOM_POLL_S = 0.05
_REOPEN = (pb.WORKER_ERROR_CODE_UNKNOWN_SLOT, pb.WORKER_ERROR_CODE_STALE_EPOCH, pb.WORKER_ERROR_CODE_CANCELLED)


@dataclass
class WorkerSlot:
    """What the gateway knows of a request's slot on one worker."""

    connection: Connection | None = None
    """The stream it was opened on; a slot does not outlive it."""
    agreed_len: int = 0
    """Committed length that both sides agreed on last."""
    target_epoch: int = 0
    """Of a draft's slot: the target that its proposals are for."""

    def is_open_on(self, connection: Connection, target_epoch: int = 0) -> bool:
        return self.connection is connection and connection.alive and self.target_epoch == target_epoch


@dataclass(frozen=True)
class Proposing:
    """A Propose on its way."""

    future: asyncio.Future[dpb.DraftReply]
    committed_len: int
    num_draft_tokens: int
    sent_s: float


class Decoder:
    """Runs one answer to its end. Owns its two slots and frees them, however it ends."""

    def __init__(self, pair: Pair, session: Session) -> None:
        self.pair = pair
        self.session = session
        self.target = WorkerSlot()
        self.draft = WorkerSlot()
        self.proposing: Proposing | None = None
        self.last_propose_s = 0.0
        self.num_recoveries = 0
        self.opening: asyncio.Future[tpb.TargetReply] | None = None
        self.deadline_s = time.monotonic() + pair.config.request_timeout_s

    async def run(self) -> AsyncGenerator[RoundOutput]:
        try:
            while not self.session.finished:
                try:
                    output = await self.run_round()
                except WorkerLost as error:  # the target: wait for its return and go on from the committed tokens
                    log.warning("request %s lost the target: %s", self.session.request.request_id, error.message)
                    output = None
                if output is not None:
                    self.num_recoveries = 0
                    yield output
                    continue
                self.num_recoveries += 1
                if self.num_recoveries > MAX_RECOVERIES:
                    raise Unavailable("the target keeps losing the request; try again later", retry_after_s=1.0)
        finally:
            self.close()

    async def run_round(self) -> RoundOutput | None:
        """One round; None when nothing was committed and the slot has to be opened again."""
        session, started_s = self.session, time.monotonic()
        target = await self.pair.target.wait_connected(min(self.pair.config.start_timeout_s, self._time_left()))
        ticket = self.pair.new_ticket()

        # 1 PROPOSE
        num_draft_tokens = self._open_draft_and_propose(ticket)

        # 2 VERIFY
        verdict = await self._open_target_and_verify(target, ticket, num_draft_tokens)
        if verdict is None:
            return None

        # 3 COMMIT
        verified_s = time.monotonic()
        if verdict.num_drafted:
            await self._let_reply_arrive()
        timings = self._timings(verdict, started_s, verified_s)
        output = session.apply(verdict, timings)
        self.target.agreed_len = verdict.committed_len + len(verdict.token_ids)
        self._note_round(verdict, num_draft_tokens, output, timings)
        self._truncate(verdict, num_draft_tokens, output)
        return output

    # propose

    def _open_draft_and_propose(self, ticket: int) -> int:
        """Sends Open (once a connection) and Propose together. Returns K, 0 for a plain round."""
        num_draft_tokens = self._num_draft_tokens()
        draft = None if self.pair.draft is None else self.pair.draft.connection
        target = self.pair.target.connection
        if not num_draft_tokens or draft is None or target is None or self.proposing is not None:
            return 0
        if not self.session.backoff.may_draft():
            return 0
        if not self.draft.is_open_on(draft, target.epoch):
            draft.call(dpb.DraftRequest(open=self._open_message(target))).add_done_callback(_ignore)
            self.draft = WorkerSlot(draft, self.session.committed_len, target.epoch)
        base_len = self.draft.agreed_len
        request = dpb.Propose(
            slot=self.session.slot_id,
            base_len=base_len,
            committed_ids=self.session.committed[base_len:],
            num_draft_tokens=num_draft_tokens,
            ticket=ticket,
            draft_logprobs=self._draft_logprobs(),
            draft_topk=min(self._draft_topk(), self.pair.facts.vocab_size),
        )
        future = draft.call(dpb.DraftRequest(propose=request))
        self.proposing = Proposing(future, self.session.committed_len, num_draft_tokens, time.monotonic())
        future.add_done_callback(self._on_proposed)
        return num_draft_tokens

    def _num_draft_tokens(self) -> int:
        options = self.session.request.speculation
        if not options.enabled:
            return 0
        wanted = self.pair.config.num_draft_tokens if options.num_draft_tokens is None else options.num_draft_tokens
        context_left = self.pair.draft_context_limit - self.session.committed_len - 1
        return max(0, min(wanted, self.session.draft_room(), context_left))

    def _draft_logprobs(self) -> Any:  # the stub's enum type is no real class
        wish = self.session.request.speculation.draft_logprobs
        return (wish or DraftLogprobs[self.pair.config.draft_logprobs.upper()]).value

    def _draft_topk(self) -> int:
        return self.session.request.speculation.draft_topk or self.pair.config.draft_topk

    def _on_proposed(self, future: asyncio.Future[dpb.DraftReply]) -> None:
        """The draft answered, in time or not, or was lost."""
        proposing, self.proposing = self.proposing, None
        if proposing is None or future.cancelled() or future.exception() is not None:
            self.draft.connection = None
            return
        reply = future.result()
        if reply.WhichOneof("item") == "propose":
            self.draft.agreed_len = proposing.committed_len
            self.last_propose_s = (reply.propose.queue_us + reply.propose.compute_us) / 1e6
            self.pair.note_proposal(reply.propose, time.monotonic() - proposing.sent_s)
        elif reply.error.code == pb.WORKER_ERROR_CODE_BEHIND:
            self.draft.agreed_len = min(reply.error.known_len, proposing.committed_len)
        else:
            log.info("draft refused slot %d: %s", self.session.slot_id, reply.error.message)
            self.draft.connection = None  # open it again next time
            self.session.backoff.late()

    # verify

    async def _open_target_and_verify(
        self, target: Connection, ticket: int, num_draft_tokens: int
    ) -> tpb.Verdict | None:
        """Sends Open (once a connection) and Verify together. None: the slot is not as we thought; go again."""
        session = self.session
        if not self.target.is_open_on(target):
            self.opening = target.call(tpb.TargetRequest(open=self._open_message(None)))
            self.opening.add_done_callback(_ignore)
            self.target = WorkerSlot(target, session.committed_len)
        base_len = self.target.agreed_len
        request = tpb.Verify(
            slot=session.slot_id,
            base_len=base_len,
            committed_ids=session.committed[base_len:],
            num_draft_tokens=num_draft_tokens,
            ticket=ticket,
            wait_budget_us=int(self.pair.wait_budget.seconds * 1e6) if num_draft_tokens else 0,
        )
        reply = await self._in_time(target.call(tpb.TargetRequest(verify=request)))
        if reply.WhichOneof("item") == "verdict":
            self._check(reply.verdict)
            return reply.verdict
        await self._raise_if_open_failed()
        if reply.error.code == pb.WORKER_ERROR_CODE_BEHIND:
            self.target.agreed_len = min(reply.error.known_len, session.committed_len)
        elif reply.error.code in _REOPEN:
            self.target.connection = None
        else:
            raise WorkerFault(f"the target failed: {reply.error.message}")
        return None

    async def _in_time(self, future: asyncio.Future[tpb.TargetReply]) -> tpb.TargetReply:
        """Raises WorkerLost, DeadlineExceeded for the request, or Unavailable for a target that hangs."""
        time_left = self._time_left()
        try:
            async with asyncio.timeout(min(time_left, self.pair.config.round_timeout_s)):
                return await future
        except TimeoutError:
            if time_left <= self.pair.config.round_timeout_s:
                raise self._timed_out() from None
            limit = self.pair.config.round_timeout_s
            raise Unavailable(f"the target answered no round within {limit:g} s", retry_after_s=5.0) from None

    async def _raise_if_open_failed(self) -> None:
        """A verify cannot succeed where the open was refused; the open's answer says why."""
        opening, self.opening = self.opening, None
        if opening is None:
            return
        reply = await opening
        if reply.WhichOneof("item") == "error":
            if reply.error.code == pb.WORKER_ERROR_CODE_EXHAUSTED:
                await self._wait_for_room(reply.error.message)
                return
            if reply.error.code == pb.WORKER_ERROR_CODE_INVALID:
                raise InvalidRequest(f"the target cannot take the request: {reply.error.message}")
            if reply.error.code not in _REOPEN:
                raise WorkerFault(f"the target refused the request: {reply.error.message}")

    async def _wait_for_room(self, reason: str) -> None:
        """The target's slots or blocks are promised to others: try again until some end, or time runs out.

        Raises Overloaded. A request that could never fit is refused as INVALID and does not come here.
        """
        if self._time_left() <= ROOM_POLL_S:
            raise Overloaded(f"the target has no room: {reason}", retry_after_s=1.0)
        self.num_recoveries = 0
        await asyncio.sleep(ROOM_POLL_S)

    def _check(self, verdict: tpb.Verdict) -> None:
        """Never apply a verdict that is not for our length: it would repeat or lose tokens."""
        if verdict.committed_len != self.session.committed_len or not verdict.token_ids:
            raise WorkerFault(
                f"the target's verdict is for length {verdict.committed_len} with {len(verdict.token_ids)} tokens, "
                f"the request is at {self.session.committed_len}"
            )

    # commit

    async def _let_reply_arrive(self) -> None:
        """The draft's reply left together with the proposal that was verified: it is here, or about to be."""
        if self.proposing is not None:
            await asyncio.wait({self.proposing.future}, timeout=REPLY_GRACE_S)
            await asyncio.sleep(0)  # its callback

    def _timings(self, verdict: tpb.Verdict, started_s: float, verified_s: float) -> RoundTimings:
        """Split of the round. Durations come from the workers' own clocks, so the clocks need not agree."""
        total = verified_s - started_s
        verify = (verdict.queue_us + verdict.forward_us + verdict.accept_us) / 1e6
        wait = verdict.wait_us / 1e6
        propose = min(wait, self.last_propose_s) if verdict.num_drafted else 0.0
        return RoundTimings(total, propose, wait - propose, verify, max(0.0, total - verify - wait))

    def _note_round(
        self, verdict: tpb.Verdict, num_draft_tokens: int, output: RoundOutput, timings: RoundTimings
    ) -> None:
        if num_draft_tokens:
            if verdict.fallback == tpb.FALLBACK_REASON_UNSPECIFIED:
                self.session.backoff.in_time()
            else:
                self.session.backoff.late()
                self.session.usage.num_wasted_tokens += num_draft_tokens
                self.pair.note_wasted(num_draft_tokens, verdict.fallback)
        self.pair.note_round(verdict, output, timings)

    def _truncate(self, verdict: tpb.Verdict, num_draft_tokens: int, output: RoundOutput) -> None:
        """Tell both workers what was dropped. One way: nobody waits, and correctness does not depend on it."""
        num_kept = len(output.tokens)
        if num_kept < len(verdict.token_ids):
            self.send_truncate("target", pb.TRUNCATE_REASON_STOP)
            self.send_truncate("draft", pb.TRUNCATE_REASON_STOP)
        elif verdict.num_accepted < verdict.num_drafted:
            self.send_truncate("target", pb.TRUNCATE_REASON_REJECTED)
            self.send_truncate("draft", pb.TRUNCATE_REASON_REJECTED)
        elif num_draft_tokens and not verdict.num_drafted:
            self.send_truncate("draft", pb.TRUNCATE_REASON_WASTED)

    def send_truncate(self, worker: str, reason: pb.TruncateReason) -> None:
        slot = self.target if worker == "target" else self.draft
        if slot.connection is None or not slot.connection.alive:
            return
        message = pb.Truncate(slot=self.session.slot_id, committed_len=self.session.committed_len, reason=reason)
        slot.connection.send(_one_way(worker, truncate=message))
        self.pair.note_truncate(worker, reason)

    def close(self) -> None:
        """Free both slots. A round in flight is cancelled by the close."""
        for worker, slot in (("target", self.target), ("draft", self.draft)):
            if slot.connection is not None and slot.connection.alive:
                slot.connection.send(_one_way(worker, close=pb.CloseSlot(slot=self.session.slot_id)))
            slot.connection = None

    # shared

    def _open_message(self, target: Connection | None) -> pb.OpenSlot:
        """`target`: where proposals go, for the draft's slot."""
        session = self.session
        message = pb.OpenSlot(
            slot=session.slot_id,
            committed_ids=session.committed,
            num_prompt_tokens=session.num_prompt,
            params=session.request.params.to_proto(),
        )
        if target is not None:  # a draft with a shorter context drafts as far as it reaches
            room = self.pair.draft_context_limit - session.num_prompt
            message.params.max_tokens = min(message.params.max_tokens, room)
            message.params.min_tokens = min(message.params.min_tokens, room)
            message.deliver_to = self.pair.config.target_for_draft or self.pair.config.target
            message.target_epoch = target.epoch
        return message

    def _time_left(self) -> float:
        left = self.deadline_s - time.monotonic()
        if left <= 0:
            raise self._timed_out()
        return left

    def _timed_out(self) -> OutriderError:
        limit = self.pair.config.request_timeout_s
        return DeadlineExceeded(f"the request took longer than {limit:g} s (request_timeout_s)")


def _one_way(
    worker: str, truncate: pb.Truncate | None = None, close: pb.CloseSlot | None = None
) -> dpb.DraftRequest | tpb.TargetRequest:
    request_type = dpb.DraftRequest if worker == "draft" else tpb.TargetRequest
    return request_type(truncate=truncate, close=close)


def _ignore(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a future that may have no other reader."""
    if not future.cancelled():
        future.exception()
