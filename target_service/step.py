"""The target's step, in the order in which it runs:

    candidates   what each slot that is ready might verify, or why the step waits
    budget       how much of it the step verifies, over all slots, and who gets memory
    forward      one forward over these slots, and pieces of prompts beside them
    decide       which draft tokens each slot accepts
    commit       what of them its output keeps
    verdict      what its gateway is answered

Exactness: under `rejection` nothing that was sampled may decide what is verified. What is verified follows from the
committed tokens, clocks, acceptance probabilities of ranks, and how many draft tokens might have come: `candidates`
(`outrider.engine.speculation.candidates`) offers no sampled token for its value, the budget reads offers alone, and a
draft of several that is late is absent as a whole (`Drafting`). `tests/unit/test_merging.py` enumerates the outcome.

Runs on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.penalties import NonFiniteLogits
from outrider.engine.step_plan import Row
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, Fault, SlotKey
from outrider.engine.worker.scheduler import DORMANT_S, StepRequest, StepScheduler, Turn, Want
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot, needs_prefill
from outrider.v1 import common_pb2 as pb
from outrider.wire.kinds import TokenKind
from outrider.wire.metrics import WorkerMetrics
from target_service.budget import VerifyBudget, VerifyChoice
from target_service.commit import commit_tokens, kind_of_next
from target_service.decide import all_accepted, decide, until_grammar_fails
from target_service.drafting import Candidates, Drafting
from target_service.explaining import ExplainRequest, explain
from target_service.features import Features
from target_service.hold import PendingDraft, expected_arrival, waits_until
from target_service.jobs import Fallback, Verdict
from target_service.lease import Lease
from target_service.leases import Leases
from target_service.own_drafts import OwnDrafts
from target_service.prompt_scores import note_scores, take_scores
from target_service.proposal import Proposal, split_logits
from target_service.searching import SearchShare, commit_search, decide_searches
from target_service.step_rows import Decided
from target_service.verdicts import StepTimes, drafter_of, learn


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one slot feeds to the step."""

    lease: Lease
    proposal: Proposal
    row: Row
    fallback: Fallback | None
    """Why there are no draft tokens, where there were to be some."""


class Step:
    """Runs one step after the other."""

    def __init__(
        self,
        runner: ModelRunner,
        keeper: SlotKeeper[Slot],
        leases: Leases,
        engine: EngineThread,
        metrics: WorkerMetrics,
        max_prefill_tokens: int,
        drafting: Drafting,
        own_drafts: OwnDrafts,
        features: Features,
    ) -> None:
        self._runner = runner
        self._keeper = keeper
        self._leases = leases
        self._engine = engine
        self._metrics = metrics
        self._max_prefill_tokens = max_prefill_tokens
        self._drafting = drafting
        self._own_drafts = own_drafts
        self._features = features
        self._budget = VerifyBudget()
        self._scheduler = StepScheduler(keeper.table, runner.pool, metrics, max_prefill_tokens)
        self._held_until: float | None = None
        """Monotonic time at which a step that held everything back is tried again."""
        self._ended_s: float | None = None
        """When the previous step ended, where this one follows at once."""
        self._in_step: list[Lease] = []
        """Leases of the step that have no verdict yet."""
        self._turn: Turn | None = None

    def next_wake(self) -> float | None:
        if self._held_until is not None:  # even if it has passed: later arrivals have not been considered
            return self._held_until
        return self._scheduler.next_wake(time.monotonic())

    def run(self, now: float) -> bool:
        """Run one forward over every slot whose lease runs, and the pieces of prompts that fit beside them. Returns
        whether there was anything to do.
        """
        self._leases.take_delivered()
        running = self._leases.running()
        ready = [lease for lease in running if not needs_prefill(lease.slot)]
        candidates = self._candidates(ready, now)
        if not candidates and len(running) == len(ready) and self._held_until is not None:
            self._ended_s = None
            return False
        shares, searches, turn = self._within_budget(candidates, running, now)
        all_shares: list[StepShare | SearchShare] = [*shares, *searches]
        rows = [share.row for share in all_shares]
        num_step_tokens = sum(row.num_new for row in rows)
        rows += [piece.row for piece in turn.pieces]
        if not rows:
            self._ended_s = None
            return turn.worked
        started_s = time.monotonic()
        self._engine.flush()  # the last verdicts leave while this runs
        logits = self._runner.forward(rows)
        self._features.fed(rows)
        for share in all_shares:
            share.lease.slot.fed(share.row.new_ids)
        num_all_tokens = num_step_tokens + sum(piece.num_tokens for piece in turn.pieces)
        times = StepTimes(started_s, 0.0, 0.0, len(shares) + len(searches), num_all_tokens)
        num_committed = self._decide_and_commit(shares, searches, logits, times)
        num_decided = sum(share.row.num_logits for share in all_shares)
        if not num_decided and not searches:
            self._runner.forward_s()  # nothing else waits for pieces of prompts
        for piece in turn.pieces:
            self._features.stays(piece.slot.key, piece.row, range(piece.row.num_new))
        self._features.send()
        seconds = time.monotonic() - started_s
        self._scheduler.done(turn, num_step_tokens, seconds)
        for slot in note_scores(turn.pieces, logits[num_decided:]):
            self._leases.end(slot.key, "scoring the prompt failed: its logits are not finite", Fault.INTERNAL)
            slot.distrust()
        if num_decided and not turn.pieces and all(search.row.num_logits for search in searches):
            previous_s = now if self._ended_s is None else self._ended_s
            self._budget.note(num_step_tokens, num_committed, seconds, started_s - previous_s)
        self._ended_s = time.monotonic()
        self._in_step = []
        self._turn = None
        self._metrics.batch_size.observe(len(rows))
        self._metrics.busy_seconds.inc(seconds)
        self._keeper.refresh_gauges()
        return True

    # candidates

    def _candidates(self, ready: Sequence[Lease], now: float) -> list[Candidates]:
        """Return what the slots of this step might verify: none while it is held for draft tokens, and not those that
        wait for theirs by themselves. What is waited for in vain is not waited for again until some arrive.
        """
        self._in_step = list(ready)
        self._held_until = None
        candidates = [self._drafting.candidates(lease) for lease in ready]
        pending = list[PendingDraft]()
        for found in candidates:
            pending += self._drafting.pending(found)
        awaited = self._budget.awaited(pending)
        self._held_until = self._budget.hold_until(awaited, now)
        waiting = set[SlotKey]()
        for draft in pending:
            if draft.lease.speculation.is_fixed and now < waits_until(draft.lease):
                waiting.add(draft.lease.slot.key)
        held = [lease for lease in ready if self._held_until is not None or lease.slot.key in waiting]
        for lease in held:
            lease.held_from_s = now if lease.held_from_s is None else lease.held_from_s
            lease.slot.asked_s = now  # it does not rest
        if self._held_until is not None:
            return []
        awaited_tickets = {draft.draft.ticket for draft in awaited}
        for lease, delivered, _ in pending:
            is_fixed = lease.speculation.is_fixed
            if delivered.ticket in awaited_tickets or is_fixed:
                delivered.is_active = lease.slot.key in waiting or lease.held_from_s is None
            if not is_fixed and expected_arrival(lease, delivered, now) is not None:
                lease.is_passed_over = True
        if waiting:
            self._held_until = min(waits_until(lease) for lease in held)
        going = list[Candidates]()
        for found in candidates:
            if found.lease.slot.key not in waiting:
                going.append(self._drafting.with_rows_beside(self._drafting.or_forced(found)))
        self._in_step = [found.lease for found in going]
        return going

    # budget

    def _within_budget(
        self, candidates: Sequence[Candidates], running: Sequence[Lease], now: float
    ) -> tuple[list[StepShare], list[SearchShare], Turn]:
        """Return what each slot of the step feeds to it, and the scheduler's choice, with pieces of prompts beside
        them.
        """
        pool = self._runner.pool
        num_free = pool.num_free * pool.block_size
        absent = [lease.slot.scheduling for lease in self._leases if _is_soon_ready(lease, now)]
        demands = [found.demand for found in candidates]
        chosen = dict[SlotKey, tuple[Candidates, VerifyChoice]]()
        requests = dict[SlotKey, StepRequest]()
        choices = self._budget.choose(demands, self._max_prefill_tokens, num_free, absent)
        for found, choice in zip(candidates, choices, strict=True):
            slot = found.lease.slot
            if choice is None:
                slot.asked_s = now  # it does not rest
            else:
                chosen[slot.key] = found, choice
                requests[slot.key] = StepRequest(Want.STEP, found.num_after(choice))
        for lease in running:
            if lease.slot.key not in requests and needs_prefill(lease.slot):
                requests[lease.slot.key] = StepRequest(Want.PREFILL, len(lease.slot.committed))
        turn = self._turn = self._scheduler.take(requests, now, feed_all=True)
        shares, searches = list[StepShare](), list[SearchShare]()
        for key in turn.running:
            found, choice = chosen[key]
            lease = found.lease
            if lease.beams is not None:
                searches.append(SearchShare(lease, lease.beams, lease.beams.feed(lease.slot, choice.num_drafts)))
            else:
                proposal = self._drafting.proposal(found, choice)
                fallback = None
                if not len(proposal.tree):
                    fallback = self._drafting.fallback(lease, is_left_out=bool(found.offers))
                shares.append(StepShare(lease, proposal, proposal.row(), fallback))
        self._in_step = [chosen[key][0].lease for key in turn.running]
        return shares, searches, turn

    # decide

    def _decide_and_commit(
        self, shares: Sequence[StepShare], searches: Sequence[SearchShare], logits: Tensor, times: StepTimes
    ) -> int:
        """Decide on every slot of the step, commit and answer; return how many tokens they committed together. logits:
        [R, V] float32, of the shares, of the searches and of pieces of prompts.
        """
        num_committed = 0
        num_rows = sum(share.row.num_logits for share in shares)
        if shares:
            own, beside = split_logits([share.proposal for share in shares], logits[:num_rows])
            num_committed += self._decide(shares, own, beside, times)
        if searches:
            self._leases.take_delivered(in_step=True)
            num_search_rows = sum(search.row.num_logits for search in searches)
            decided = decide_searches(searches, logits[num_rows : num_rows + num_search_rows], self._leases)
            times = replace(times, forwarded_s=times.started_s + self._runner.forward_s())
            for search, levels in decided:
                lease = search.lease
                lease.slot.asked_s = time.monotonic()
                is_left_out = bool(lease.first.hit)
                fallback = None
                if not search.fed.num_drafts:
                    fallback = self._drafting.fallback(lease, is_left_out=is_left_out)
                verdict = commit_search(search, levels, fallback, times, self._runner, self._metrics)
                lease.begin_step(lease.slot.asked_s)
                self._answer(lease, verdict)
                num_committed += len(levels)
        return num_committed

    def _decide(
        self, shares: Sequence[StepShare], logits: Tensor, beside: Mapping[SlotKey, Tensor], times: StepTimes
    ) -> int:
        """Decide on sampled slots. logits: [sum(N_b + 1), V] float32, after the last committed token of each and after
        each of its N_b draft tokens. beside: of slots that have rows beside, those after them.
        """
        states = [self._keeper.sampling_state(share.lease.slot) for share in shares]
        decisions = decide([share.proposal for share in shares], states, logits)
        times = replace(times, forwarded_s=times.started_s + self._runner.forward_s())
        decided = list[tuple[StepShare, Decided]]()
        explained = list[ExplainRequest]()
        end = 0
        for share, state, decision in zip(shares, states, decisions, strict=True):
            slot = share.lease.slot
            start, end = end, end + len(share.proposal.tree) + 1
            if isinstance(decision, NonFiniteLogits):
                slot.distrust()
                self._leases.end(slot.key, f"verify failed: {decision.message}", Fault.INTERNAL)
                continue
            sound = until_grammar_fails(share.proposal, state, decision)
            if sound is None:
                why = f"the grammar can be followed no further: {state.failure(())}; ask for a simpler one"
                self._leases.end(slot.key, why, Fault.GRAMMAR)
                continue
            decided.append((share, sound))
            if share.lease.speculation.explain:
                explained.append(ExplainRequest(share.proposal, state, sound, start))
        explanations = explain(explained, logits) if explained else {}
        times = replace(times, decided_s=time.monotonic())
        self._leases.take_delivered(in_step=True)
        num_committed = 0
        for share, sound in decided:
            key = share.lease.slot.key
            num_committed += self._commit(share, sound, beside.get(key), explanations.get(key), times)
        return num_committed

    # commit

    def _commit(
        self,
        share: StepShare,
        decided: Decided,
        beside: Tensor | None,
        explanation: pb.Explanation | None,
        times: StepTimes,
    ) -> int:
        """Commit what a slot accepted, up to the end of its output, and answer; return the number of tokens."""
        lease, proposal, row, slot = share.lease, share.proposal, share.row, share.lease.slot
        committed_len = len(slot.committed)
        if proposal.rows_beside is not None and beside is not None:
            self._own_drafts.read(slot, beside, decided.path, proposal.rows_beside)
        kept = self._keep_path(share, decided.path)
        last = kind_of_next(len(proposal.tree), all_accepted(proposal, decided))
        commit = commit_tokens(
            slot.params,
            self._runner.facts.eos_token_ids,
            committed_len - slot.num_prompt,
            proposal.tree.prefix(decided.last),
            decided.next_id,
            last,
        )
        num_tokens = len(commit.token_ids)
        if explanation is not None and num_tokens <= len(decided.path):  # it ended before it was rejected
            explanation.ClearField("rejection")
        slot.commit_from(committed_len, commit.token_ids)
        slot.settle()
        slot.asked_s = time.monotonic()
        num_cut = max(0, len(decided.path) - num_tokens)  # accepted behind the end of the output
        self._features.stays(slot.key, row, kept[: len(kept) - num_cut])
        foretold = self._own_drafts.append(slot, commit.token_ids)
        verdict = Verdict(
            committed_len=committed_len,
            token_ids=commit.token_ids,
            kinds=commit.kinds,
            finish=commit.finish,
            outcomes=learn(lease, proposal, decided.path, num_tokens, foretold, self._metrics),
            drafter=drafter_of(proposal),
            depth=proposal.tree.max_depth,
            fallback=share.fallback,
            timings=times.timings(lease),
            num_cached_tokens=slot.num_adopted or 0,
            num_foretold=sum(foretold),
            logprobs=decided.reported[:num_tokens],
            prompt_logprobs=take_scores(slot),
            explanation=explanation,
        )
        lease.begin_step(slot.asked_s)
        self._answer(lease, verdict)
        return num_tokens

    def _keep_path(self, share: StepShare, path: Sequence[int]) -> list[int]:
        """Return which of the tokens that were fed stay with an accepted path. Of a row with nodes side by side only
        these stay in the cache.
        """
        row, slot = share.row, share.lease.slot
        first = row.num_new - row.num_logits + 1  # committed tokens before the draft tokens
        kept = [*range(first), *(first + node for node in path)]
        if row.parents is not None:
            self._runner.compact(row, kept)
            slot.compacted(row.num_cached, [row.new_ids[index] for index in kept])
        return kept

    # verdict

    def _answer(self, lease: Lease, verdict: Verdict) -> None:
        if verdict.finish is not None:
            self._leases.finish(lease.slot.key)
        self._leases.answer(lease.job, verdict)
        self._in_step.remove(lease)
        kind = "plain" if TokenKind.PLAIN in verdict.kinds else "verify"
        self._metrics.steps.labels(kind=kind).inc()

    def fail(self, error: Exception) -> None:
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
        self._in_step = []
        self._turn = None
        self._ended_s = None


def _is_soon_ready(lease: Lease, now: float) -> bool:
    """Return whether steps leave room for the slot's caller: it was asked for lately, or its prompt is being fed, which
    takes many steps, and as many longer ones where nobody bounds them.
    """
    slot = lease.slot
    return now - slot.asked_s < DORMANT_S or bool(lease.is_running and slot.num_blocks and needs_prefill(slot))
