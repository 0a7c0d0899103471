"""Runs rounds. `run_round` is the whole of one: propose, verify, commit. A failure ends in tokens, in a slot that is
opened again, or in one error.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator

from gateway.generation import FinishReason, OutputTimings, RoundOutput
from gateway.rounds.draft_length import TargetDrafts
from gateway.rounds.drafting import Drafting
from gateway.rounds.session import Session
from gateway.rounds.verification import GoElsewhere, Verification
from gateway.telemetry.request_record import RoundRecord, current_record
from gateway.telemetry.round_metrics import note_round, note_truncate
from gateway.workers.links import WorkerSlot
from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import Unavailable, WorkerLost
from outrider.wire.log import get_logger

log = get_logger(__name__)

MAX_RECOVERIES = 8
"""A request fails after so many fresh starts in a row without a committed token between them. Twice as many let it
survive longer where targets keep dying, and let one that kills them kill more."""
MOVES = ("full", "draining")
"""Reasons to go elsewhere for which nobody failed: they use up neither fresh starts nor retries."""


class Decoder:
    """Runs one answer to its end. It owns the answer's two slots and frees them, however the answer ends."""

    def __init__(self, model: ServedModel, session: Session, deadline_s: float) -> None:
        """deadline_s: monotonic time at which the request's life ends."""
        self.model = model
        self.session = session
        self.draft = Drafting(model, session)
        self.own = TargetDrafts(model, session)
        self.target = Verification(model, session, deadline_s, self.own)
        self._record: RoundRecord | None = None
        self._reply_is_due = False
        """The draft's reply to a verified proposal may still be on its way."""
        self._truncation: tuple[tuple[WorkerSlot, ...], pb.TruncateReason] | None = None
        """Slots that still hold what the last round dropped, and why it was dropped."""

    async def run(self) -> AsyncGenerator[RoundOutput]:
        """Run rounds until the answer is finished, and yield what each adds.

        A round that failed is done again from the committed tokens, here or on another target.
        """
        num_recoveries = 0
        try:
            while not self.session.finished:
                output = await self._try_round()
                if output is not None:
                    num_recoveries = 0
                    yield output
                    continue
                self.model.metrics.retries.labels(reason=self.target.why_again).inc()
                if self.target.why_again in MOVES:
                    continue
                num_recoveries += 1
                if num_recoveries > MAX_RECOVERIES:
                    raise Unavailable("the targets keep losing the request; try again later", retry_after_s=1.0)
                await self.target.pay_for_retry()
        finally:
            self._truncate()
            self.draft.close()
            self.own.close()
            self.target.close()

    async def _try_round(self) -> RoundOutput | None:
        """Return None when the round has to be done again."""
        try:
            return await self.run_round()
        except WorkerLost as error:
            log.warning("request %s lost its target: %s", self.session.request.request_id, error.message)
            self.target.why_again = "lost"
        except GoElsewhere as error:
            self.target.why_again = error.reason
        finally:
            record, self._record = self._record, None
            if record is not None:
                current_record().add_round(record)
        return None

    async def run_round(self) -> RoundOutput | None:
        """Run one round. Return None when nothing was committed and the slot has to be opened again."""
        if self._reply_is_due:  # of the round before: its tokens have left for the user already
            await self.draft.let_reply_arrive()
        self._truncate()
        target = await self.target.place()
        await self.target.open(target)
        ticket, started_s = secrets.randbits(64), time.monotonic()  # nobody can guess a ticket

        # 1 PROPOSE: leaves now; the proposal goes from the draft to the target directly, or the target makes its own
        own = self.own.plan(target, self.target.member)
        num_draft_tokens = self.draft.propose(ticket, target, self.target.member) if own is None else 0
        num_own = 0 if own is None else own.num_draft_tokens
        draft = self.draft.member_name if num_draft_tokens else own.drafter if own is not None and num_own else None
        self._record = record = RoundRecord(
            ticket, started_s, self.target.member.name, num_draft_tokens or num_own, draft
        )

        # 2 VERIFY: leaves together with it; the target waits for the proposal within its budget
        verdict = await self.target.verify(target, ticket, num_draft_tokens, self.draft.wait_budget_s, num_own)
        if verdict is None:
            return None
        verified_s, record.verdict = time.monotonic(), verdict

        # 3 COMMIT
        self._reply_is_due = num_draft_tokens > 0 and verdict.fallback == tpb.FALLBACK_REASON_UNSPECIFIED
        timings = self._timings(verdict, verified_s - started_s)
        output = self.session.apply(verdict, timings)
        if own is None:
            self.own.skip(verdict)
            self.draft.note_verdict(verdict, ticket, time.monotonic() - started_s, self.target.is_new_step)
            note_round(self.draft.metrics, verdict, output, timings, self.draft.why_plain, self.draft.asked_for_tree)
        else:
            self.draft.skip(target)
            self.own.note_verdict(verdict, timings.total_s, self.target.is_new_step)
            note_round(own.metrics, verdict, output, timings, own.why_plain, is_tree=False)
        self._truncation = self._dropped(verdict, num_draft_tokens, output)
        if output.finish_reason is not None:
            self.model.lengths.ended(self.session.num_output, output.finish_reason is FinishReason.STOP)
        return output

    def _timings(self, verdict: tpb.Verdict, total_s: float) -> OutputTimings:
        """Split the round's time. Durations come from the workers' own clocks, so the clocks need not agree."""
        verify_s = (verdict.queue_us + verdict.forward_us + verdict.accept_us) / 1e6
        wait_s = verdict.wait_us / 1e6
        propose_s = min(wait_s, self.draft.last_propose_s) if verdict.num_drafted else 0.0
        return OutputTimings(total_s, propose_s, wait_s - propose_s, verify_s, max(0.0, total_s - verify_s - wait_s))

    def _dropped(
        self, verdict: tpb.Verdict, num_draft_tokens: int, output: RoundOutput
    ) -> tuple[tuple[WorkerSlot, ...], pb.TruncateReason] | None:
        """Return the slots that hold more than was committed, and why; None when neither does."""
        if len(output.tokens) < len(verdict.token_ids):
            return (self.target.slot, self.draft.slot), pb.TRUNCATE_REASON_STOP
        if verdict.num_accepted < verdict.num_drafted:
            return (self.target.slot, self.draft.slot), pb.TRUNCATE_REASON_REJECTED
        if num_draft_tokens and verdict.fallback != tpb.FALLBACK_REASON_UNSPECIFIED:
            return (self.draft.slot,), pb.TRUNCATE_REASON_WASTED
        return None

    def _truncate(self) -> None:
        """Tell both workers what was dropped, in the message that leaves next. Nobody waits for it, and correctness
        does not depend on it.
        """
        truncation, self._truncation = self._truncation, None
        if truncation is None:
            return
        slots, reason = truncation
        for slot in slots:
            if slot.truncate(self.session.committed_len, reason):
                note_truncate(self.model.metrics, "target" if slot is self.target.slot else "draft", reason)
