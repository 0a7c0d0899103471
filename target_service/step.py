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
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.penalties import NonFiniteLogits
from outrider.engine.step_plan import Row
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, Fault, SlotKey
from outrider.engine.worker.scheduler import DORMANT_S, Piece, StepRequest, StepScheduler, Turn, Want
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot, needs_prefill
from outrider.v1 import common_pb2 as pb
from outrider.wire.kinds import TokenKind
from outrider.wire.metrics import WorkerMetrics
from target_service.beams import best_tokens
from target_service.budget import VerifyBudget, VerifyChoice
from target_service.commit import commit_tokens, kind_of_next
from target_service.decide import decide, until_grammar_fails
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
from target_service.searching import SearchShare, commit_search
from target_service.step_rows import Decided
from target_service.verdicts import StepTimes, drafter_of, learn


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one slot feeds to the step that searches no beams."""

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
        self._pieces: Sequence[Piece] = ()
        """Of prompts, in the step."""

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
        num_decided = sum(row.num_logits for row in rows)
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
        times = StepTimes(started_s, 0.0, 0.0, len(all_shares), num_all_tokens)
        num_sampled = sum(share.row.num_logits for share in shares)
        num_committed = self._decide(shares, logits[:num_sampled], times)
        num_committed += self._search(searches, logits[num_sampled:num_decided], times)
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
        self._pieces = ()
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
        candidates, pending = list[Candidates](), list[PendingDraft]()
        for lease in ready:
            candidates.append(self._drafting.candidates(lease))
            pending += self._drafting.pending(candidates[-1])
        awaited = self._budget.awaited(pending)
        self._held_until = self._budget.hold_until(awaited, now)
        waiting = dict[SlotKey, float]()
        for lease, _, _ in pending:
            if lease.speculation.is_fixed and now < waits_until(lease):
                waiting[lease.slot.key] = waits_until(lease)
        for lease in ready:
            if self._held_until is not None or lease.slot.key in waiting:
                lease.held_from_s = now if lease.held_from_s is None else lease.held_from_s
                lease.slot.asked_s = now  # it does not rest
        self._in_step = []
        if self._held_until is not None:
            return []
        self._held_until = min(waiting.values(), default=None)
        awaited_tickets = {draft.ticket for _, draft, _ in awaited}
        for lease, delivered, _ in pending:
            is_fixed = lease.speculation.is_fixed
            if delivered.ticket in awaited_tickets or is_fixed:
                delivered.is_active = lease.slot.key in waiting or lease.held_from_s is None
            if not is_fixed and expected_arrival(lease, delivered, now) is not None:
                lease.is_passed_over = True
        going = list[Candidates]()
        for found in candidates:
            if found.lease.slot.key not in waiting:
                self._in_step.append(found.lease)
                going.append(self._drafting.with_rows_beside(self._drafting.or_forced(found)))
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
        turn = self._scheduler.take(requests, now, feed_all=True)
        self._pieces = turn.pieces
        self._in_step = []
        shares, searches = list[StepShare](), list[SearchShare]()
        for key in turn.running:
            found, choice = chosen[key]
            lease = found.lease
            self._in_step.append(lease)
            if lease.beams is not None:
                fed = lease.beams.feed(lease.slot, choice.num_drafts)
                fallback = self._drafting.fallback(lease, fed.num_drafts, is_left_out=bool(lease.first.hit))
                searches.append(SearchShare(lease, lease.beams, fed, fed.row, fallback))
            else:
                proposal = self._drafting.proposal(found, choice)
                fallback = self._drafting.fallback(lease, len(proposal.tree), is_left_out=bool(found.offers))
                shares.append(StepShare(lease, proposal, proposal.row(), fallback))
        return shares, searches, turn

    # decide and commit

    def _decide(self, shares: Sequence[StepShare], logits: Tensor, times: StepTimes) -> int:
        """Decide on sampled slots, commit and answer; return how many tokens they committed together. logits: [R, V]
        float32, of their rows.
        """
        if not shares:
            return 0
        proposals = [share.proposal for share in shares]
        own, beside = split_logits(proposals, logits)
        states = [self._keeper.sampling_state(share.lease.slot) for share in shares]
        decisions = decide(proposals, states, own)
        times = replace(times, forwarded_s=times.started_s + self._runner.forward_s())
        decided = list[tuple[StepShare, Decided]]()
        explained = list[ExplainRequest]()
        end = 0
        for share, state, decision in zip(shares, states, decisions, strict=True):
            slot = share.lease.slot
            start, end = end, end + len(share.proposal.tree) + 1
            if isinstance(decision, NonFiniteLogits):
                self._end_non_finite(slot, decision)
                continue
            sound = until_grammar_fails(share.proposal, state, decision)
            if sound is None:
                why = f"the grammar can be followed no further: {state.failure(())}; ask for a simpler one"
                self._leases.end(slot.key, why, Fault.GRAMMAR)
                continue
            decided.append((share, sound))
            if share.lease.speculation.explain:
                explained.append(ExplainRequest(share.proposal, state, sound, start))
        explanations = explain(explained, own) if explained else {}
        times = replace(times, decided_s=time.monotonic())
        self._leases.take_delivered(in_step=True)
        num_committed = 0
        for share, sound in decided:
            key = share.lease.slot.key
            num_committed += self._commit(share, sound, beside.get(key), explanations.get(key), times)
        return num_committed

    def _search(self, searches: Sequence[SearchShare], logits: Tensor, times: StepTimes) -> int:
        """Do as `_decide` for slots that search beams; return how many levels they decided together."""
        if not searches:
            return 0
        self._leases.take_delivered(in_step=True)
        best = best_tokens(logits, max(search.beams.search.num_candidates for search in searches))
        times = replace(times, forwarded_s=times.started_s + self._runner.forward_s())
        num_committed = end = 0
        for search in searches:
            start, end = end, end + search.row.num_logits
            if start == end:
                self._in_step.remove(search.lease)  # it has no verdict in this step
                continue
            try:
                levels = search.beams.decide(search.fed, best, start)
            except NonFiniteLogits as error:
                self._end_non_finite(search.lease.slot, error)
                continue
            times = replace(times, decided_s=time.monotonic())
            self._answer(search.lease, commit_search(search, levels, times, self._runner, self._metrics))
            num_committed += len(levels)
        return num_committed

    def _end_non_finite(self, slot: Slot, error: NonFiniteLogits) -> None:
        slot.distrust()
        self._leases.end(slot.key, f"verify failed: {error.message}", Fault.INTERNAL)

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
        tree, path = proposal.tree, decided.path
        committed_len = len(slot.committed)
        if proposal.rows_beside is not None and beside is not None:
            self._own_drafts.read(slot, beside, path, proposal.rows_beside)
        kept = self._keep_path(share, path)
        commit = commit_tokens(
            slot.params,
            self._runner.facts.eos_token_ids,
            committed_len - slot.num_prompt,
            tree.prefix(decided.last),
            decided.next_id,
            kind_of_next(len(tree), not tree.children(decided.last)),
        )
        num_tokens = len(commit.token_ids)
        if explanation is not None and num_tokens <= len(path):  # it ended before it was rejected
            explanation.ClearField("rejection")
        slot.commit_from(committed_len, commit.token_ids)
        slot.settle()
        num_cut = max(0, len(path) - num_tokens)  # accepted behind the end of the output
        self._features.stays(slot.key, row, kept[: len(kept) - num_cut])
        foretold = self._own_drafts.append(slot, commit.token_ids)
        verdict = Verdict(
            committed_len=committed_len,
            token_ids=commit.token_ids,
            kinds=commit.kinds,
            finish=commit.finish,
            outcomes=learn(lease, proposal, path, num_tokens, foretold, self._metrics),
            drafter=drafter_of(proposal),
            depth=tree.max_depth,
            fallback=share.fallback,
            timings=times.timings(lease),
            num_cached_tokens=slot.num_adopted or 0,
            num_foretold=sum(foretold),
            logprobs=decided.reported[:num_tokens],
            prompt_logprobs=take_scores(slot),
            explanation=explanation,
        )
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
        """Answer with what is committed: the slot is ready for its next step."""
        now = lease.slot.asked_s = time.monotonic()
        lease.begin_step(now)
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
        for piece in self._pieces:
            # Without its KV the slot is of no use; its next verify will be answered with UNKNOWN_SLOT.
            self._leases.end(piece.slot.key, f"feeding the prompt failed: {error}", Fault.INTERNAL)
            self._leases.closed(piece.slot.key)
            self._features.closed(piece.slot.key)
            piece.slot.distrust()
            self._own_drafts.drop(piece.slot.key)
            self._keeper.close(CloseJob(*piece.slot.key))
        self._in_step = []
        self._pieces = ()
        self._ended_s = None


def _is_soon_ready(lease: Lease, now: float) -> bool:
    """Return whether steps leave room for the slot's caller: it was asked for lately, or its prompt is being fed, which
    takes many steps, and as many longer ones where nobody bounds them.
    """
    slot = lease.slot
    return now - slot.asked_s < DORMANT_S or bool(lease.is_running and slot.num_blocks and needs_prefill(slot))
