"""Runs choices. `Decoder.run_round` is the whole round: lease, verdict, commit.

    # committed "the cat"; target T and draft D have a slot for the choice
    # LEASE    to T: Verify(base_len 2, lease_end_len 2 + TOKENS_AHEAD, ticket 7); to D: Advance(base_len 2, ticket 7)
    #          D grows "sat", "down" and sends them to T under ticket 7; T verifies them in its next step
    # VERDICT  from T: committed_len 2, token_ids "sat on", num_drafted 2, num_accepted 1: "down" was rejected
    # COMMIT   committed "the cat sat on"; to D: Advance(base_len 2, "sat on"); to T nothing, or an Extend
    # the next round needs no new lease: it waits for T's verdict at committed_len 4

A failed round ends in tokens, in a new lease, or in one error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from gateway.generation import OutputTimings, RoundOutput
from gateway.rounds.drafting import DraftSession
from gateway.rounds.explaining import is_forced
from gateway.rounds.session import Session
from gateway.rounds.verification import SlotRefused, Verification
from gateway.telemetry.request_record import RoundRecord, current_record
from gateway.telemetry.round_metrics import note_drafts, note_lookups, note_round, note_truncate
from gateway.workers.connection import Connection, WorkerSlot
from gateway.workers.drafts.draft_limits import speculation_of
from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import Unavailable, WorkerLost
from outrider.wire.requests.drafters import GRAMMAR, Drafter
from outrider.wire.requests.speculation import Speculation
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

MAX_RECOVERIES = 8
"""Number of times that a choice's failed round may be repeated without a committed token in between. Then its request
fails. A request may make every target crash, and this limits how many targets it can stop."""
MOVES = ("full", "draining")
"""Reasons for which a choice goes to another target although none failed: the target has no free slot, or drains. Such
moves count neither as recoveries nor as retries."""

WASTING = (tpb.FALLBACK_REASON_LATE, tpb.FALLBACK_REASON_REFUSED)
"""Reasons why a step used no draft tokens: they came too late, or were refused. After such a step the gateway cuts the
draft slots to the committed tokens."""


class Decoder:
    """The decode loop of one choice. It owns the choice's slots, and closes them in whichever way the choice ends."""

    def __init__(
        self, model: ServedModel, session: Session, deadline_s: float, note_opened: Callable[[], object] = lambda: None
    ) -> None:
        """Create a decode loop.

        deadline_s: monotonic time at which the request times out, in seconds. note_opened: called without arguments
        whenever a target has opened the choice's slot.
        """
        self.model = model
        self._note_opened = note_opened
        self.session = session
        pools = model.pools_for(session.request)
        self.drafts = [DraftSession(model, session, index, pool) for index, pool in enumerate(pools)]
        self.target = Verification(model, session, deadline_s)
        self._drafter = model.drafter_for(session.request)
        self._speculation: Speculation | None = None
        """Speculation with which the target's slot was opened; None for decoding without drafts."""
        self._own: Drafter | None = None
        """The target's own drafter for the slot; None if it has none."""
        self._began_s = 0.0
        """Monotonic time when the current round began, in seconds: the begin of the lease or the previous verdict."""
        self._record: RoundRecord | None = None
        """Record of the current round; None between rounds."""

    async def run(self) -> AsyncGenerator[RoundOutput]:
        """Run rounds until the choice is finished, and yield the output of each round.

        A beam search yields all its outputs at the end. A failed round is repeated from the committed tokens, on the
        same target or another.
        """
        num_recoveries = 0
        try:
            while not self.session.is_finished:
                output = await self._try_round()
                if output is not None:
                    num_recoveries = 0
                    for visible in self.session.visible_outputs(output):
                        yield visible
                    continue
                self.model.metrics.retries.labels(reason=self.target.why_again).inc()
                if self.target.why_again in MOVES:
                    continue
                num_recoveries += 1
                if num_recoveries > MAX_RECOVERIES:
                    raise Unavailable("the targets keep losing the request; try again later", retry_after_s=1.0)
                await self.target.wait_for_retry()
        finally:
            for draft in self.drafts:
                draft.close()
            self.target.close()

    async def _try_round(self) -> RoundOutput | None:
        try:
            return await self.run_round()
        except WorkerLost as error:
            log.warning("request %s lost its target: %s", self.session.request.request_id, error.message)
            self.target.why_again = "lost"
        except SlotRefused as error:
            self.target.why_again = error.reason
        finally:
            if self._record is not None:
                current_record().add_round(self._record)
                self._record = None
        return None

    async def run_round(self) -> RoundOutput | None:
        """Run one round, and return its output.

        None means that no token was committed. The next round must then begin with a new lease.
        """
        # 1 LEASE: the target steps by itself from here on, and drafts deliver to it under the lease's tickets
        target = await self.target.place()
        if not self.target.slot.is_open_on(target):
            self._speculation = self._speculate(target)
            self._own = self._own_drafter(target)
            await self.target.open(target, self._speculation, self._own)
            self._note_opened()
        if self._uses_draft_worker:
            have_misbehaved = [draft.place(self.target.member) for draft in self.drafts]
            if any(have_misbehaved) or self._is_ticket_reused(target):
                self.target.end_lease()
        if not self.target.has_lease:
            self._began_s = time.monotonic()
            drafted = [self._uses_draft_worker and draft.is_active for draft in self.drafts]
            self.target.begin_lease(target, drafted=drafted)
            self._advance(target)

        # 2 VERDICT: of the step that follows the committed tokens, which may have been made long ago
        started_s = self._began_s
        ticket = self.target.tickets[0]
        record = RoundRecord(ticket, self.session.committed_len, started_s, self.target.member.name)
        self._record = record
        verdict = await self.target.next_verdict(target)
        if verdict is None:
            return None
        self._began_s = time.monotonic()
        record.verdict = verdict

        # 3 COMMIT, and let target and drafts continue: nothing here waits for a reply
        timings = _timings(verdict, self._began_s - started_s)
        output = self.session.apply(verdict, timings)
        for draft in self.drafts:
            draft.note(verdict)
        if not self.session.is_finished:
            self._advance(target)
            self.target.extend(target)
        self._truncate(verdict, output)
        await asyncio.sleep(0)  # the messages are sent before the round is counted
        self._note(verdict, output, record)
        return output

    def _is_ticket_reused(self, target: Connection) -> bool:
        pairs = zip(self.drafts, self.target.tickets, strict=False)  # before the first lease there is one ticket
        return any(draft.is_ticket_reused(ticket, target) for draft, ticket in pairs)

    @property
    def _uses_draft_worker(self) -> bool:
        return self._speculation is not None and (self._own is None or self._drafter.uses_draft_worker)

    def _speculate(self, target: Connection) -> Speculation | None:
        workers = [target.info]
        for draft in self.drafts:
            info = draft.choose(self.target.member)
            if info is not None:
                workers.append(info)
        return speculation_of(self.session.request, self.model.config, workers, self.session.num_cached)

    def _own_drafter(self, target: Connection) -> Drafter | None:
        kind = self._drafter.own
        if kind is None or self._speculation is None:
            return None
        if self._drafter.is_merged:
            kind = self._drafter
        if kind in target.info.drafters:
            return kind
        if not any(draft.kind is kind for draft in self.model.drafts.values()):
            name = target.info.model_id
            self.model.warn_once(f"the target {name} has no drafter {kind}: its requests are drafted for by a model")
        return None

    def _advance(self, target: Connection) -> None:
        if self._uses_draft_worker:
            for draft, ticket in zip(self.drafts, self.target.tickets, strict=True):
                draft.advance(ticket, target, self.target.member)

    def _note(self, verdict: tpb.Verdict, output: RoundOutput, record: RoundRecord) -> None:
        """A round is counted for the pair of target and drafter.

        A round that the target drafted itself is counted under its own drafter's label. Of several drafts, the first
        with a verified token counts.
        """
        by_target = verdict.outcomes[-1]
        label = self._own_label(verdict)
        verified = self._note_outcomes(verdict)
        if label is not None and by_target.num_drafted:
            note_drafts(self.model.series.own(label), by_target)
        if label is not None and not verified and (by_target.num_drafted or not self._drafter.uses_draft_worker):
            pair = self.model.series.own(label)
            record.draft = label
        else:
            verified = verified or self.drafts[:1]
            pair = verified[0].metrics
            record.draft = _names_of(verified)
        note_lookups(self.model.metrics, verdict)
        reason = ""
        if not verdict.num_drafted:
            reason = self._why_plain(verdict, output)
            self.session.usage.plain_reasons[reason] += 1
        note_round(pair, verdict, output, reason)
        if self.session.is_finished:
            self._note_overrun(verdict, output)

    def _own_label(self, verdict: tpb.Verdict) -> str | None:
        if is_forced(verdict):
            return GRAMMAR
        if verdict.outcomes[-1].num_drafted:
            return Drafter(verdict.drafter).own
        if self._own is not None and self._own is not Drafter.AUTO:
            return self._own.own
        return None

    def _note_outcomes(self, verdict: tpb.Verdict) -> list[DraftSession]:
        """Return the drafts of which a token was verified. The verdict's last outcome is the target's own."""
        verified = list[DraftSession]()
        has_delivery = has_late = False
        for draft, outcome in zip(self.drafts, verdict.outcomes[:-1], strict=True):
            draft.metrics.wasted_tokens.inc(outcome.num_wasted)
            note_drafts(draft.metrics, outcome)
            has_delivery |= outcome.HasField("has_drafts")
            has_late |= outcome.num_wasted > 0
            if outcome.is_verified:
                verified.append(draft)
        self.model.num_rounds += has_delivery
        self.model.num_late += has_late
        return verified

    def _note_overrun(self, verdict: tpb.Verdict, output: RoundOutput) -> None:
        """Counts the tokens that the target made beyond the end of the output.

        # stop "END", the draft tokens "a", "END", "b" accepted: 3 of these and a bonus token were made, 2 are in the
        # output, so 2 are counted, besides the tokens of verdicts that have arrived since
        """
        num_made = len(verdict.token_ids)
        if verdict.num_drafted and not verdict.levels:
            num_made = verdict.num_accepted + 1
        num_cut = num_made - len(output.tokens)
        self.model.metrics.overrun_tokens.inc(num_cut + self.target.end_lease())

    def _why_plain(self, verdict: tpb.Verdict, output: RoundOutput) -> str:
        """Return which of PLAIN_REASONS explains a round without drafts."""
        if self._speculation is None or (self._own is None and not self.model.draft_pools):
            return "off"
        if self.session.max_draft_tokens() + len(output.tokens) < 1:
            return "end"
        if verdict.fallback == tpb.FALLBACK_REASON_REFUSED:
            return "refused"
        if verdict.fallback == tpb.FALLBACK_REASON_DOES_NOT_PAY or any(draft.is_unprofitable for draft in self.drafts):
            return "does_not_pay"
        members = [draft.member for draft in self.drafts if draft.member is not None]
        if members:
            return "none_parked" if members[-1].kind is Drafter.MODEL else "nothing"
        if self._own is not None and not (self._uses_draft_worker and self.model.draft_pools):
            return "nothing"
        if any(draft.is_usable and draft.load.is_full for draft in self.model.drafts.values()):
            return "busy"
        return "no_draft"

    def _truncate(self, verdict: tpb.Verdict, output: RoundOutput) -> None:
        # Nothing waits for these messages, and correctness does not depend on them.
        is_target_truncated = True
        if len(output.tokens) < len(verdict.token_ids):
            reason = pb.TRUNCATE_REASON_STOP
        elif not verdict.levels and verdict.num_accepted < verdict.num_drafted:  # a beam search truncates by itself
            reason = pb.TRUNCATE_REASON_REJECTED
        elif verdict.fallback in WASTING:
            reason = pb.TRUNCATE_REASON_WASTED
            is_target_truncated = False
        else:
            return
        if is_target_truncated:
            self._truncate_slot("target", self.target.slot, reason)
        for draft in self.drafts:
            self._truncate_slot("draft", draft.slot, reason)

    def _truncate_slot(self, worker: str, slot: WorkerSlot, reason: pb.TruncateReason) -> None:
        if slot.truncate(self.session.committed_len, reason):
            note_truncate(self.model.metrics, worker, reason)


def _names_of(drafts: Sequence[DraftSession]) -> str | None:
    names = list[str]()
    for draft in drafts:
        if draft.member is not None:
            names.append(draft.member.name)
    return "&".join(names) or None


def _timings(verdict: tpb.Verdict, total_s: float) -> OutputTimings:
    # Durations of the target are measured by its own clock, so that the clocks need not agree.
    verify_s = (verdict.queue_us + verdict.forward_us + verdict.accept_us) / 1e6
    wait_s = verdict.wait_us / 1e6
    return OutputTimings(total_s, wait_s, verify_s, max(0.0, total_s - verify_s - wait_s))
