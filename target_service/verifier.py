"""The target's engine worker: steps all slots whose lease runs in one forward, and feeds prompts in pieces beside it.

`drafts` says what each slot's step might verify, `rows` how much of it, the engine's `scheduler` which slots run,
`decide` what is accepted; `commit_tokens` cuts it. Runs on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.penalties import NonFiniteLogits, SamplingState
from outrider.engine.speculation.beam import Level
from outrider.engine.step_plan import Row
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, Fault, JobError, OpenJob, OwnerGone, SlotKey, TruncateJob
from outrider.engine.worker.scheduler import DORMANT_S, StepRequest, StepScheduler, Turn, Want
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot, needs_prefill
from outrider.wire.kinds import Drafter, TokenKind
from outrider.wire.metrics import WorkerMetrics
from target_service.beams import Beams, Fed, ReadBest, best_reader
from target_service.commit import commit_tokens, kind_of_next
from target_service.decide import all_accepted, decide
from target_service.drafts import Drafts
from target_service.explaining import ExplainRequest, explain, explain_request
from target_service.feature_jobs import FeatureJob
from target_service.features import Features
from target_service.hold import PendingDraft, expected_arrival, waits_until
from target_service.jobs import (
    DraftOutcome,
    Explanation,
    ExtendJob,
    Finish,
    Logprobs,
    RefusedDelivery,
    Timings,
    Verdict,
    VerifyJob,
)
from target_service.lease import Candidates, Lease, Ready
from target_service.leases import Leases
from target_service.own_drafts import OwnDrafts
from target_service.prompt_scores import begin_scoring, note_scores, refuses_scoring, take_scores
from target_service.step_demand import StepDemand
from target_service.step_rows import Decided
from target_service.verify_budget import VerifyBudget


class Verifier:
    """Runs the target's jobs and steps."""

    def __init__(
        self,
        runner: ModelRunner,
        keeper: SlotKeeper[Slot],
        leases: Leases,
        engine: EngineThread,
        metrics: WorkerMetrics,
        max_prefill_tokens: int,
        own_drafts: OwnDrafts,
        features: Features,
    ) -> None:
        self._runner = runner
        self._keeper = keeper
        self._leases = leases
        self._engine = engine
        self._metrics = metrics
        self._own_drafts = own_drafts
        self._features = features
        metrics.kept_feature_bytes.set_function(lambda: features.num_kept_bytes)
        self._drafts = Drafts(own_drafts, keeper, metrics, runner.facts.vocab_size, runner.supports_trees)
        self._budget = VerifyBudget()
        self._max_prefill_tokens = max_prefill_tokens
        self._turns = StepScheduler(keeper.table, runner.pool, metrics, max_prefill_tokens)
        self._held_until: float | None = None  # when to call `step` again, after one that held everything back
        self._ended_s: float | None = None  # when the step before ended, where this one followed at once
        self._in_step: list[Lease] = []
        self._rows: dict[SlotKey, Row] = {}  # rows of the current step
        self._behind: dict[SlotKey, Tensor] = {}  # logits behind its scaffolds, [S_b, V] each
        self._turn: Turn | None = None
        self._num_fed = (0, 0, 0)  # tokens of the step, how many of them are prompts', and its number

    # jobs

    def handle(self, job: object) -> None:
        match job:
            case ExtendJob():
                self._leases.extend(job, time.monotonic())
            case VerifyJob():
                self._verify(job)
            case FeatureJob():
                self._features.handle(job)
            case RefusedDelivery(ticket, why):
                self._leases.refuse(ticket, why)
            case OpenJob():
                self._open(job)
            case TruncateJob():
                self._truncate(job)
            case CloseJob():
                self._leases.closed((job.owner, job.slot_id))
                self._own_drafts.close((job.owner, job.slot_id))
                self._features.closed((job.owner, job.slot_id))
                self._keeper.close(job)
            case OwnerGone():
                self._leases.owner_gone(job.owner)
                self._own_drafts.close_owner(job.owner)
                self._features.owner_gone(job.owner)
                self._keeper.close_owner(job)
            case _:
                raise TypeError(f"unknown job {job!r}")

    def _open(self, job: OpenJob) -> None:
        refused = self._own_drafts.refuses(job.drafter)
        if job.params.beams is not None and self._runner.tree_refusal is not None:
            why = f"use_beam_search is true, and this target runs no token trees: {self._runner.tree_refusal}"
            refused = JobError(Fault.INVALID, f"{why}; leave it out, or start the target on another attention_path")
        refused = refused or refuses_scoring(job)
        if refused is not None:
            self._engine.answer(lambda: job.respond(refused))
            return
        slot = self._keeper.open(job)
        if slot is not None:
            self._leases.end(slot.key, "the slot was opened again")
            self._leases.opened(job)
            self._features.closed(slot.key)
            self._own_drafts.open(job, slot)
            begin_scoring(job, slot)

    def _verify(self, job: VerifyJob) -> None:
        key = (job.owner, job.slot_id)
        self._leases.end(key, "a newer verify came")
        before = self._keeper.table.get(*key)
        known_ids = [] if before is None else before.committed[job.base_len :]
        beams = None if before is None else self._beams_of(before, job)
        settled = () if beams is None else beams.settled
        slot = self._keeper.commit(*key, job.base_len, (*job.committed_ids, *settled))
        if isinstance(slot, JobError):
            self._leases.answer(job, slot)
            return
        length = len(slot.committed) if beams is None else beams.length
        if job.until_len <= length or (beams is not None and beams.search.is_done):
            why = f"until_len is {job.until_len}, must be more than the {length} tokens committed"
            self._leases.answer(job, JobError(Fault.INVALID, why))
            return
        pairs = zip(known_ids, job.committed_ids, strict=False)
        num_same = job.base_len + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._own_drafts.commit(job, slot, num_same)
        self._features.cut(key, num_same)
        self._features.lease_began(self._leases.begin(job, slot, beams))

    def _beams_of(self, slot: Slot, job: VerifyJob) -> Beams | None:
        """Return a slot's search, brought to the levels of a message; None where it has none."""
        if slot.params.beams is None:
            return None
        slot.truncate(len(slot.committed) + 1)  # behind these lie nodes, whose ids may be those of what is settled now
        prompt, eos_token_ids = slot.committed[: slot.num_prompt], self._runner.facts.eos_token_ids
        rest = (eos_token_ids, self._leases.speculation_of(slot.key), self._max_prefill_tokens)
        return Beams(slot.params, prompt, job.levels, *rest)

    def _truncate(self, job: TruncateJob) -> None:
        """A slot that steps by itself has cropped itself, and may be ahead of the message: it keeps what it has, unless
        a stop string ended its answer.
        """
        key = (job.owner, job.slot_id)
        if job.reason == "stop":
            self._leases.end(key, "a stop string ended the answer")
        self._keeper.truncate(job, keeps=self._leases.get(key) is not None)

    # steps

    def next_wake(self) -> float | None:
        if self._held_until is not None:  # even if it has passed: later arrivals have not been considered
            return self._held_until
        return self._turns.next_wake(time.monotonic())

    def step(self, now: float) -> bool:
        """Run one forward over every slot whose lease runs, and the pieces of prompts that fit beside them."""
        self._leases.take_delivered()
        running = self._leases.running()
        fed = self._in_step = [lease for lease in running if not needs_prefill(lease.slot)]
        going_on = self._going([self._drafts.candidates(lease) for lease in fed], now)
        found = [self._drafts.with_scaffold(self._drafts.or_forced(each)) for each in going_on]
        self._in_step = [each.lease for each in found]
        if not found and len(running) == len(fed) and self._held_until is not None:
            self._ended_s = None
            return False
        chosen = self._chosen(found, now)
        turn = self._turn = self._turns.take(_requests(running, chosen), now, feed_all=True)
        taken = [chosen[key] for key in turn.running]
        going = [(each.lease, self._drafts.ready(*each)) for each in taken if each.lease.beams is None]
        searching = [_fed(each) for each in taken if each.lease.beams is not None]
        self._in_step = [each.lease for each in taken]
        stepping = [(lease.slot, _row(r)) for lease, r in going] + [(lease.slot, fed.row) for lease, fed in searching]
        rows = [*(row for _, row in stepping), *(p.row for p in turn.pieces)]
        if not rows:
            self._ended_s = None
            return turn.worked
        num_run_tokens = sum(row.num_new for _, row in stepping)
        num_prompt_tokens = sum(p.num_tokens for p in turn.pieces)
        self._num_fed = (num_run_tokens + num_prompt_tokens, num_prompt_tokens, self._num_fed[2] + 1)
        started = time.monotonic()
        self._engine.flush()  # the last verdicts leave while this runs
        logits = self._runner.forward(rows)
        num_decided = sum(row.num_logits for _, row in stepping)
        scored = logits[num_decided:]  # [P, V] float32, of the pieces of prompts that are to be scored
        logits = logits[:num_decided]  # [sum(K_b + 1 + S_b), V] float32
        self._features.fed(rows)
        self._rows = {slot.key: row for slot, row in stepping}
        for slot, row in stepping:
            slot.fed(row.new_ids)
        num_committed, num_searched = 0, sum(fed.row.num_logits for _, fed in searching)
        if going:
            own, self._behind = _apart([r for _, r in going], logits[: len(logits) - num_searched])
            num_committed += self._decide(going, own, started)
        if searching:
            num_committed += self._search(searching, logits[len(logits) - num_searched :], started)
        if not len(logits) and not searching:
            self._runner.forward_s()  # nothing else waits for pieces of prompts
        for piece in turn.pieces:
            self._features.stays(piece.slot.key, piece.row, range(piece.row.num_new))
        self._features.send()
        seconds = time.monotonic() - started
        self._turns.done(turn, num_run_tokens, seconds)
        for slot in note_scores(turn.pieces, scored):
            self._leases.end(slot.key, "scoring the prompt failed: its logits are not finite", Fault.INTERNAL)
            slot.distrust()
        if len(logits) and not turn.pieces and all(fed.row.num_logits for _, fed in searching):
            between_s = started - (now if self._ended_s is None else self._ended_s)
            self._budget.note(num_run_tokens, num_committed, seconds, between_s)
        self._ended_s = time.monotonic()
        self._in_step, self._rows, self._behind, self._turn = [], {}, {}, None
        self._metrics.batch_size.observe(len(rows))
        self._metrics.busy_seconds.inc(seconds)
        self._keeper.refresh_gauges()
        return True

    def _chosen(self, found: Sequence[Candidates], now: float) -> dict[SlotKey, _Chosen]:
        """Return how much of what each slot might be fed goes into the step, of those that are in it."""
        # The rest of a step goes plain where it has so many drafts: nobody is to wait longer for it.
        pool, most = self._runner.pool, self._max_prefill_tokens
        absent = [lease.slot.scheduling for lease in self._leases if _wants_part(lease, now)]
        max_extra_rows = min(most, pool.num_free * pool.block_size)
        shares = self._budget.choose([_demand(each) for each in found], most, absent, max_extra_rows)
        chosen = dict[SlotKey, _Chosen]()
        for each, share in zip(found, shares, strict=True):
            if share is None:
                each.lease.slot.asked_s = now  # it does not rest
            else:
                chosen[each.lease.slot.key] = _Chosen(each, *share)
        return chosen

    def fail_step(self, error: Exception) -> None:
        """Answer the slots of the step that have no verdict yet; they stay, and are fed anew."""
        for lease in self._in_step:
            self._leases.end(lease.slot.key, f"the target's step failed: {error}", Fault.INTERNAL)
            lease.slot.distrust()
        for piece in () if self._turn is None else self._turn.pieces:
            # Without its KV the slot is of no use; its next verify will be answered with UNKNOWN_SLOT.
            self._leases.end(piece.slot.key, f"feeding the prompt failed: {error}", Fault.INTERNAL)
            self._leases.closed(piece.slot.key)
            self._features.closed(piece.slot.key)
            piece.slot.distrust()
            self._own_drafts.drop(piece.slot.key)
            self._keeper.close(CloseJob(*piece.slot.key))
        self._in_step, self._rows, self._behind, self._turn, self._ended_s = [], {}, {}, None, None

    def _going(self, found: Sequence[Candidates], now: float) -> list[Candidates]:
        """Return those that take this step: none while it is held for guesses, and not those that wait for theirs by
        themselves. What is waited for in vain is not waited for again until something comes.
        """
        self._held_until = None
        if not found:
            return []
        lacking = [PendingDraft(each.lease, *draft) for each in found for draft in self._drafts.lacking(each)]
        waited_for = self._budget.waited_for(lacking)
        self._held_until = self._budget.hold_until(waited_for, now)
        waiting = {lease.slot.key for lease, *_ in lacking if lease.speculation.is_fixed and now < waits_until(lease)}
        held = [each.lease for each in found if self._held_until is not None or each.lease.slot.key in waiting]
        for lease in held:
            lease.held_from_s = now if lease.held_from_s is None else lease.held_from_s
            lease.slot.asked_s = now  # it does not rest
        if self._held_until is not None:
            return []
        held_for = {draft.ticket for _, draft, _ in waited_for}
        for lease, draft, _ in lacking:
            if draft.ticket in held_for or lease.speculation.is_fixed:
                draft.live = lease.slot.key in waiting or lease.held_from_s is None
            if not lease.speculation.is_fixed and expected_arrival(lease, draft, now) is not None:
                lease.is_passed_over = True
        if waiting:
            self._held_until = min(waits_until(lease) for lease in held)
        return [each for each in found if each.lease.slot.key not in waiting]

    # commit

    def _decide(self, going: list[tuple[Lease, Ready]], logits: Tensor, started: float) -> int:
        """Accept, commit and answer; return how many tokens. logits: [sum(K_b + 1), V] float32, slots in order."""
        ready = [r for _, r in going]
        try:
            states = [self._keeper.sampling_state(r.slot) for r in ready]
            decided = decide([r.proposal for r in ready], states, logits)
        except NonFiniteLogits as error:
            return self._decide_without(error, going, logits, started)
        forwarded = started + self._runner.forward_s()
        sound, asking = list[tuple[Lease, Ready, Decided]](), dict[SlotKey, ExplainRequest]()
        starts = [0, *accumulate(len(r.draft_ids) + 1 for r in ready)][:-1]
        for (lease, r), state, own, start in zip(going, states, decided, starts, strict=True):
            num_sound = _num_led_to(state, _accepted_ids(r, own))
            if num_sound == 0:
                why = f"the grammar can be followed no further: {state.failure(())}; ask for a simpler one"
                self._leases.end(lease.slot.key, why, Fault.GRAMMAR)
                continue
            if num_sound is not None:  # the next step fails; the draft that leads there takes the place of the last
                last_id = _accepted_ids(r, own)[num_sound - 1]
                own = replace(own, next_id=last_id, path=own.path[: num_sound - 1])
            sound.append((lease, r, own))
            if lease.speculation.explain:
                asking[lease.slot.key] = explain_request(r, state, own, start)
        told = dict(zip(asking, explain(list(asking.values()), logits), strict=True)) if asking else {}
        ended = time.monotonic()
        self._leases.take_delivered(in_step=True)
        num_committed = 0
        for lease, r, own in sound:
            timings = self._timings(lease, started, forwarded, ended)
            num_committed += self._commit(lease, r, own, timings, told.get(lease.slot.key))
        return num_committed

    def _decide_without(
        self, error: NonFiniteLogits, going: list[tuple[Lease, Ready]], logits: Tensor, started: float
    ) -> int:
        """Decide the others: NaN in one slot's logits fails that request alone."""
        raw = logits.split([len(r.draft_ids) + 1 for _, r in going])  # [K_b + 1, V] each
        slot_of_row = [b for b, own in enumerate(raw) for _ in range(len(own))]
        bad = {slot_of_row[row] for row in error.rows}
        for b in bad:
            lease, _ = going[b]
            lease.slot.distrust()
            self._leases.end(lease.slot.key, f"verify failed: {error.message}", Fault.INTERNAL)
        sound = [b for b in range(len(going)) if b not in bad]
        if not sound:
            return 0
        return self._decide([going[b] for b in sound], torch.cat([raw[b] for b in sound]), started)

    def _search(self, searching: list[tuple[Lease, Fed]], logits: Tensor, started: float) -> int:
        """Decide on beams, commit and answer; return how many tokens each search goes on by, together. logits:
        [sum(num_logits), V] float32, slots in order.
        """
        num_committed = 0
        self._leases.take_delivered(in_step=True)
        beams = [lease.beams for lease, _ in searching if lease.beams is not None]
        read = best_reader(logits, max(each.search.num_candidates for each in beams))
        forwarded = started + self._runner.forward_s()
        starts = accumulate((fed.row.num_logits for _, fed in searching), initial=0)
        for (lease, fed), start in zip(searching, starts, strict=False):
            assert lease.beams is not None, "it searches no beams"
            if not fed.row.num_logits:
                self._in_step.remove(lease)  # it has no verdict in this step
                continue
            try:
                levels = lease.beams.decide(fed, _read_from(read, start))
            except NonFiniteLogits as error:
                lease.slot.distrust()
                self._leases.end(lease.slot.key, f"verify failed: {error.message}", Fault.INTERNAL)
                continue
            timings = self._timings(lease, started, forwarded, time.monotonic())
            self._commit_levels(lease, lease.beams, fed, levels, timings)
            num_committed += len(levels)
        return num_committed

    def _commit_levels(self, lease: Lease, beams: Beams, fed: Fed, levels: list[Level], timings: Timings) -> None:
        slot, length, is_done = lease.slot, beams.length, beams.search.is_done
        num_given_up = 0 if is_done else beams.go_on(slot, fed, levels, self._runner)
        slot.asked_s = time.monotonic()
        hit = lease.first.hit
        fallback = None if fed.num_drafts else self._drafts.fallback(lease, is_here=bool(hit))
        num_wasted = self._drafts.decided(lease, fed, len(levels), num_given_up, slot.asked_s)
        last = kind_of_next(fed.num_drafts, len(levels) > fed.depth)
        verdict = Verdict(
            committed_len=length,
            token_ids=(),
            kinds=(*[TokenKind.ACCEPTED] * (len(levels) - 1), last),
            num_drafted=fed.num_drafts,
            depth=fed.depth,
            num_accepted=len(levels) - 1,
            finish=None if not is_done else Finish.STOP if levels[-1].live else Finish.LENGTH,
            stop_token_id=None,
            logprobs=(),
            fallback=fallback,
            timings=timings,
            num_cached_tokens=slot.num_adopted or 0,
            drafter=Drafter.MODEL if fed.num_drafts else None,
            hit=hit,
            num_wasted=num_wasted,
            levels=tuple(levels),
            hypotheses=tuple(beams.search.hypotheses()) if is_done else (),
        )
        if is_done:
            slot.truncate(len(slot.committed))
            self._leases.finish(slot.key)
        self._leases.answer(lease.job, verdict)
        self._in_step.remove(lease)
        self._metrics.steps.labels(kind="verify" if fed.num_drafts else "plain").inc()

    def _timings(self, lease: Lease, started: float, forwarded: float, ended: float) -> Timings:
        held_s = 0.0 if lease.held_from_s is None else max(0.0, started - lease.held_from_s)
        queue_s = max(0.0, started - lease.ready_s - held_s)
        return Timings(held_s, queue_s, forwarded - started, ended - forwarded, len(self._rows), *self._num_fed)

    def _commit(
        self, lease: Lease, r: Ready, decided: Decided, timings: Timings, explanation: Explanation | None
    ) -> int:
        slot = r.slot
        committed_len = len(slot.committed)
        accepted_ids = _accepted_ids(r, decided)
        path = decided.path
        if r.scaffold is not None:
            self._own_drafts.learn(slot, self._behind[slot.key], path, r.scaffold)
        kept = self._keep_path(r, path)
        last = kind_of_next(len(r.draft_ids), all_accepted(r.proposal, decided))
        num_output = committed_len - slot.num_prompt
        eos_token_ids = self._runner.facts.eos_token_ids
        commit = commit_tokens(slot.params, eos_token_ids, num_output, accepted_ids, decided.next_id, last)
        slot.commit_from(committed_len, commit.token_ids)
        slot.settle()
        slot.asked_s = time.monotonic()
        num_over = max(0, len(accepted_ids) - len(commit.token_ids))  # of drafts that stay and come after the end
        self._features.stays(slot.key, self._rows[slot.key], kept[: len(kept) - num_over])
        foretold = self._own_drafts.append(slot.key, commit.token_ids)
        seen = [(draft.hit, draft.refused is not None) for draft in lease.drafts]
        num_wasted = self._drafts.committed(lease, r, decided, commit.token_ids, foretold, slot.asked_s)
        verdict = Verdict(
            committed_len=committed_len,
            token_ids=commit.token_ids,
            kinds=commit.kinds,
            num_drafted=len(r.draft_ids),
            depth=max(map(r.proposal.tree.depth, range(len(r.draft_ids))), default=0),
            num_accepted=len(decided.path),
            finish=commit.finish,
            stop_token_id=commit.stop_token_id,
            logprobs=tuple(Logprobs(*found) for found in decided.reported[: len(commit.token_ids)]),
            fallback=r.fallback,
            timings=timings,
            num_cached_tokens=slot.num_adopted or 0,
            drafter=r.drafter,
            hit=seen[0][0],
            num_wasted=sum(num_wasted),
            num_foretold=sum(foretold),
            num_own_drafted=_num_own(r, range(len(r.draft_ids))),
            num_own_accepted=_num_own(r, path),
            drafts=_draft_outcomes(lease, r, path, seen, num_wasted),
            explanation=explanation if explanation is None else explanation.cut(len(commit.token_ids)),
            prompt_logprobs=take_scores(slot),
        )
        if commit.finish is not None:
            self._leases.finish(slot.key)
        self._leases.answer(lease.job, verdict)
        self._in_step.remove(lease)
        self._metrics.steps.labels(kind="verify" if TokenKind.PLAIN not in commit.kinds else "plain").inc()
        return len(commit.token_ids)

    def _keep_path(self, r: Ready, path: Sequence[int]) -> list[int]:
        """Return which of the fed tokens stay with this path of the drafts. Of a row with nodes side by side only these
        stay in the cache.
        """
        row = self._rows[r.slot.key]
        first = row.num_new - len(r.draft_ids) - len(r.scaffold_ids)  # committed tokens before the drafts
        kept = [*range(first), *(first + node for node in path)]
        if row.parents is not None:
            self._runner.compact(row, kept)
            r.slot.compacted(row.num_cached, [row.new_ids[place] for place in kept])
        return kept


class _Chosen(NamedTuple):
    """What a slot is to be fed."""

    found: Candidates
    count: int
    """Of its candidates."""
    with_scaffold: bool

    @property
    def lease(self) -> Lease:
        return self.found.lease

    @property
    def num_nodes(self) -> int:
        return self.found.num_nodes(self.count) + (self.found.num_scaffolds if self.with_scaffold else 0)


def _demand(found: Candidates) -> StepDemand:
    lease = found.lease
    probs: Sequence[float] = found.gains
    if found.must and found.is_whole and lease.speculation.tree is not None:
        share = lease.first.shares.share(0)
        probs = [share**depth for depth in range(1, lease.speculation.tree.depth + 1)]
    extra_gain, extra_cost_rows = 0.0, 0
    if found.scaffold is not None:
        extra_gain = found.scaffold.gain(lease.own_shares[found.scaffold.drafter])
        own = found.nodes if found.drafter is found.scaffold.drafter else ()  # which came of earlier ones
        extra_cost_rows = found.num_scaffolds + len(own)
    return StepDemand(
        probs,
        num_required=found.must,
        max_rows=found.most_must,
        is_whole=found.is_whole,
        is_fixed=lease.speculation.is_fixed,
        num_pending_rows=lease.num_undrafted,
        extra_rows=found.num_scaffolds,
        extra_gain=extra_gain,
        extra_cost_rows=extra_cost_rows,
        scheduling=lease.slot.scheduling,
        ready_s=lease.ready_s,
    )


def _requests(running: Sequence[Lease], chosen: dict[SlotKey, _Chosen]) -> dict[SlotKey, StepRequest]:
    """Return what each slot would do now: step, or be fed its prompt first."""
    found: dict[SlotKey, StepRequest] = {}
    for lease in running:
        key, num_committed = lease.slot.key, len(lease.slot.committed)
        if key in chosen:
            num_cached = num_committed if lease.beams is None else len(lease.slot.cached) + lease.num_undrafted
            found[key] = StepRequest(Want.STEP, num_cached + chosen[key].num_nodes)
        elif needs_prefill(lease.slot):
            found[key] = StepRequest(Want.PREFILL, num_committed)
    return found


def _wants_part(lease: Lease, now: float) -> bool:
    """Return whether steps leave room for the slot's caller: it was asked for lately, or its prompt is being fed, which
    takes many steps, and as many longer ones where nobody bounds them.
    """
    slot = lease.slot
    return now - slot.asked_s < DORMANT_S or bool(lease.runs and slot.num_blocks and needs_prefill(slot))


def _fed(chosen: _Chosen) -> tuple[Lease, Fed]:
    """Return what a step feeds of a search."""
    lease = chosen.lease
    assert lease.beams is not None, "it searches no beams"
    return lease, lease.beams.feed(lease.slot, [node for _, node, _ in chosen.found.nodes[: chosen.count]])


def _row(ready: Ready) -> Row:
    slot, scaffold, parents = ready.slot, ready.scaffold, None
    tail = slot.committed[len(slot.cached) :]
    if ready.tree is not None or scaffold is not None:
        # the path to each of these nodes begins with the committed tokens before them
        nodes = [*ready.parents, *(() if scaffold is None else scaffold.parents)]
        parents = [*range(-1, len(tail) - 1), *(len(tail) + parent for parent in nodes)]
    new_ids = [*tail, *ready.draft_ids, *ready.scaffold_ids]
    num_logits = len(new_ids) - len(tail) + 1
    return Row(slot.table, new_ids, len(slot.cached), num_logits, slot.cached, parents, source=slot.source)


def _apart(ready: Sequence[Ready], logits: Tensor) -> tuple[Tensor, dict[SlotKey, Tensor]]:
    """Return what is decided by, [sum(K_b + 1), V], and by slot what is said behind its scaffold, [S_b, V]."""
    if all(r.scaffold is None for r in ready):
        return logits, {}
    parts = logits.split([num for r in ready for num in (len(r.draft_ids) + 1, len(r.scaffold_ids))])
    return torch.cat(parts[::2]), {r.slot.key: part for r, part in zip(ready, parts[1::2], strict=True)}


def _read_from(read: ReadBest, start: int) -> ReadBest:
    return lambda rows, num: read([start + row for row in rows], num)


def _num_own(r: Ready, nodes: Sequence[int]) -> int:
    """Return how many of these drafts of several sources the target alone has made."""
    counts = zip(r.sources, r.num_of(nodes), strict=True) if len(r.sources) > 1 else ()
    return sum(num for source, num in counts if isinstance(source.whose, Drafter))


def _draft_outcomes(
    lease: Lease, r: Ready, path: Sequence[int], seen: Sequence[tuple[bool | None, bool]], num_wasted: Sequence[int]
) -> list[DraftOutcome]:
    """Return what came of each draft, where there are several. seen: of each whether it was a hit, and refused."""
    if len(lease.drafts) < 2:
        return []
    counts = zip(r.num_of(range(len(r.draft_ids))), r.num_of(path), strict=True)
    came = {id(source.whose): each for source, each in zip(r.sources, counts, strict=True)}
    return [
        DraftOutcome(*came.get(id(draft), (0, 0)), id(draft) in came, *each, wasted)
        for draft, each, wasted in zip(lease.drafts, seen, num_wasted, strict=True)
    ]


def _accepted_ids(r: Ready, decided: Decided) -> list[int]:
    return [r.draft_ids[node] for node in decided.path]


def _num_led_to(state: SamplingState, accepted_ids: Sequence[int]) -> int | None:
    """Return how many of them lead to where the grammar fails; None where it does not."""
    if not state.params.grammar or state.failure(tuple(accepted_ids)) is None:
        return None
    return next(num for num in range(len(accepted_ids) + 1) if state.failure(tuple(accepted_ids[:num])) is not None)
