"""The target's step, in the order in which it runs:

    candidates   the draft tokens that each ready slot might verify; no step runs while it is held for more
    budget       how many of them the step verifies, over all slots, and which slots get memory
    forward      one forward over these slots' rows, and pieces of prompts beside them
    decide       which draft tokens each slot accepts
    commit       the accepted tokens, up to the end of the output
    verdict      the answer to the slot's gateway

Exactness: under `rejection` no sampled token may influence what is verified. What is verified depends only on committed
tokens, clocks, acceptance probabilities of ranks, and how many draft tokens might have arrived. `candidates`
(`outrider.engine.speculation.candidates`) offers no sampled token for its value, the budget reads nothing but offers,
and if several draft workers deliver, a late one is left out as a whole (`DraftChooser`). The outcome is enumerated by
tests/unit/outrider/papers/test_merging.py.

Runs on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.penalties import NonFiniteLogits
from outrider.engine.step_plan import Row
from outrider.engine.worker.decisions import Need
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, JobFault, SlotKey
from outrider.engine.worker.scheduler import Chunk, ScheduledStep, StepRequest, StepScheduler
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import Slot, needs_prefill
from outrider.v1 import common_pb2 as pb
from outrider.wire.kinds import TokenKind
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.drafting.budget import VerifyBudget, VerifyChoice
from target_service.drafting.draft_chooser import DraftChooser, Merge
from target_service.drafting.own_drafts import OwnDrafts
from target_service.drafting.proposal import split_logits
from target_service.drafting.slot_candidates import Candidates
from target_service.features.features import Features
from target_service.leases.hold import PendingDraft, note_missing, waiting_slots
from target_service.leases.lease import Lease
from target_service.leases.lease_jobs import Verdict
from target_service.leases.leases import Leases
from target_service.leases.slot_search import best_tokens
from target_service.step.decide import decide, until_grammar_fails
from target_service.step.explaining import ExplainRequest, explain
from target_service.step.prompt_scores import note_scores
from target_service.step.sampled import SlotStep, commit_sampled
from target_service.step.searching import SearchStep, commit_search
from target_service.step.step_rows import Decided
from target_service.step.verdicts import StepClock


class Step:
    """Runs the steps of a target, one after the other. The engine thread calls `run`, and `fail` if `run` raises an
    error.
    """

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
        merge: Merge,
    ) -> None:
        self._runner = runner
        self._keeper = keeper
        self._leases = leases
        self._engine = engine
        self._max_prefill_tokens = max_prefill_tokens
        self._own_drafts = own_drafts
        self._features = features
        self._metrics = metrics
        self._drafting = DraftChooser(
            own_drafts, keeper, leases, metrics, runner.facts.vocab_size, runner.supports_trees, merge
        )
        self._budget = VerifyBudget()
        self._scheduler = StepScheduler(keeper.table, runner.pool, metrics, max_prefill_tokens)
        self._held_until: float | None = None
        """Monotonic time, in seconds, at which a held step is tried again; None if no step is held."""
        self._ended_s: float | None = None
        """Monotonic time, in seconds, at which the previous step ended; None if this one does not follow it at once."""
        self._in_step: list[Lease] = []
        """Leases that are in the step and have no verdict yet."""
        self._pieces: Sequence[Chunk] = ()
        """Pieces of prompts in the step."""

    def next_wake(self) -> float | None:
        """Return the monotonic time, in seconds, at which `run` has to be called even if no job or delivery arrives
        until then; None = never.
        """
        if self._held_until is not None:  # even if it has passed: later arrivals have not been considered
            return self._held_until
        return self._scheduler.next_wake(time.monotonic())

    def run(self, now: float) -> bool:
        """Run one forward over all slots that may step, and over pieces of prompts as far as max_prefill_tokens and the
        cache allow. Then decide which draft tokens are accepted, commit, and answer the gateways.

        Returns whether there was anything to do. If not, the engine thread waits for a job or for `next_wake`. now:
        monotonic time, in seconds.
        """
        self._in_step = []
        self._leases.insert_deliveries()
        running = self._leases.running()
        ready = [lease for lease in running if not needs_prefill(lease.slot)]
        self._in_step = ready
        candidates = self._candidates(ready, now)
        if not candidates and len(running) == len(ready) and self._held_until is not None:
            self._ended_s = None
            return False
        acceptance, searches, scheduled = self._within_budget(candidates, running, now)
        slot_steps: list[SlotStep | SearchStep] = [*acceptance, *searches]
        rows = list[Row]()
        num_step_tokens = 0
        num_decided = 0
        for slot_step in slot_steps:
            rows.append(slot_step.row)
            num_step_tokens += slot_step.row.num_new
            num_decided += slot_step.row.num_logits
        num_all_tokens = num_step_tokens
        for piece in scheduled.pieces:
            rows.append(piece.row)
            num_all_tokens += piece.num_tokens
        if not rows:
            self._ended_s = None
            return scheduled.has_work
        started_s = time.monotonic()
        self._engine.flush()  # the last verdicts leave while this runs
        # [R, V] float32; 2 sampled slots with 3 and 1 rows, a search with 2 and a scored piece with 4: 0-3, 4-5, 6-9
        logits = self._runner.forward(rows)
        self._features.fed(rows)
        for slot_step in slot_steps:
            slot_step.lease.slot.fed(slot_step.row.new_ids)
        times = StepClock(started_s, len(slot_steps), num_all_tokens)
        num_sampled = sum(slot_step.row.num_logits for slot_step in acceptance)
        num_committed = self._decide(acceptance, logits[:num_sampled], times)
        num_committed += self._search(searches, logits[num_sampled:num_decided], times)
        if not num_decided and not searches:
            self._runner.forward_s()  # nothing else waits for pieces of prompts
        for piece in scheduled.pieces:
            self._features.note_committed(piece.slot.key, piece.row, range(piece.row.num_new))
        self._features.send()
        seconds = time.monotonic() - started_s
        self._scheduler.note_step(scheduled, num_step_tokens, seconds)
        for slot in note_scores(scheduled.pieces, logits[num_decided:]):
            self._end(slot, "scoring the prompt failed: its logits are not finite")
        if num_decided and not scheduled.pieces and all(search.row.num_logits for search in searches):
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
        # None while the step is held for draft tokens, and none of a slot that waits for its own alone.
        candidates = list[Candidates]()
        pending = list[PendingDraft]()
        for lease in ready:
            candidates.append(self._drafting.candidates(lease))
            pending += self._drafting.pending(candidates[-1])
        awaited = self._budget.awaited(pending)
        self._held_until = self._budget.hold_until(awaited, now)
        waiting = waiting_slots(pending, now)
        for lease in ready:
            if self._held_until is not None or lease.slot.key in waiting:
                if lease.held_from_s is None:
                    lease.held_from_s = now
                lease.slot.last_request_s = now  # it is not dormant
        if self._held_until is not None:
            return []
        self._held_until = min(waiting.values(), default=None)
        note_missing(pending, awaited, waiting, now)
        stepping = list[Candidates]()
        for found in candidates:
            if found.lease.slot.key not in waiting:
                stepping.append(self._drafting.add_extra_rows(self._drafting.or_forced(found)))
        return stepping

    # budget

    def _within_budget(
        self, candidates: Sequence[Candidates], running: Sequence[Lease], now: float
    ) -> tuple[list[SlotStep], list[SearchStep], ScheduledStep]:
        pool = self._runner.pool
        num_free = pool.num_free * pool.block_size
        absent = list[Scheduling]()
        for lease in self._leases:
            if lease.is_soon_ready(now):
                absent.append(lease.slot.scheduling)
        chosen = dict[SlotKey, tuple[Candidates, VerifyChoice]]()
        requests = dict[SlotKey, StepRequest]()
        demands = [found.demand for found in candidates]
        choices = self._budget.choose(demands, self._max_prefill_tokens, num_free, absent)
        for found, choice in zip(candidates, choices, strict=True):
            slot = found.lease.slot
            if choice is None:
                slot.last_request_s = now  # it is not dormant
            else:
                chosen[slot.key] = found, choice
                requests[slot.key] = StepRequest(Need.RUN, found.num_after(choice))
        for lease in running:
            if lease.slot.key not in requests and needs_prefill(lease.slot):
                requests[lease.slot.key] = StepRequest(Need.PREFILL, len(lease.slot.committed))
        scheduled = self._scheduler.schedule(requests, now, feed_all=True)
        self._pieces = scheduled.pieces
        self._in_step = []
        acceptance = list[SlotStep]()
        searches = list[SearchStep]()
        for key in scheduled.running:
            found, choice = chosen[key]
            lease = found.lease
            self._in_step.append(lease)
            if lease.beams is not None:
                fed = lease.beams.feed(lease.slot, choice.num_draft_tokens)
                fallback = self._drafting.fallback(
                    lease, len(fed.draft_nodes), is_left_out=bool(lease.first.has_drafts)
                )
                searches.append(SearchStep(lease, lease.beams, fed, fed.row, fallback))
            else:
                proposal = self._drafting.proposal(found, choice)
                fallback = self._drafting.fallback(lease, len(proposal.tree), is_left_out=bool(found.budget_items))
                acceptance.append(SlotStep(lease, proposal, proposal.row(), fallback))
        return acceptance, searches, scheduled

    # decide and commit

    def _decide(self, acceptance: Sequence[SlotStep], logits: Tensor, times: StepClock) -> int:
        """Decide the slots that sample, commit and answer; return the total number of tokens that they commit.

        logits: [R, V] float32, the rows of `acceptance` in order.
        """
        if not acceptance:
            return 0
        proposals = [slot_step.proposal for slot_step in acceptance]
        states = [self._keeper.sampling_state(slot_step.lease.slot) for slot_step in acceptance]
        own, extra_logits = split_logits(proposals, logits)  # [sum(N_b + 1), V]; by slot [E, V]
        decisions = decide(proposals, states, own)
        times.forwarded_s = times.started_s + self._runner.forward_s()
        decided = list[tuple[SlotStep, Decided]]()
        explained = list[ExplainRequest]()
        end = 0
        for slot_step, state, decision in zip(acceptance, states, decisions, strict=True):
            slot = slot_step.lease.slot
            start, end = end, end + len(slot_step.proposal.tree) + 1
            if isinstance(decision, NonFiniteLogits):
                self._end(slot, f"verify failed: {decision.message}")
                continue
            sound = until_grammar_fails(slot_step.proposal, state, decision)
            if sound is None:
                why = f"the grammar can be followed no further: {state.failure(())}; ask for a simpler one"
                self._leases.end(slot.key, why, JobFault.GRAMMAR)
                continue
            decided.append((slot_step, sound))
            if slot_step.lease.speculation.explain:
                explained.append(ExplainRequest(slot_step.proposal, state, sound, start))
        explanations: Mapping[SlotKey, pb.Explanation] = {}
        if explained:
            explanations = explain(explained, own)
        times.decided_s = time.monotonic()
        self._leases.insert_deliveries(in_step=True)
        num_committed = 0
        for slot_step, sound in decided:
            key = slot_step.lease.slot.key
            verdict = commit_sampled(
                slot_step,
                sound,
                extra_logits.get(key),
                explanations.get(key),
                times,
                self._runner,
                self._own_drafts,
                self._features,
                self._metrics,
            )
            self._answer(slot_step.lease, verdict)
            num_committed += len(verdict.token_ids)
        return num_committed

    def _search(self, searches: Sequence[SearchStep], logits: Tensor, times: StepClock) -> int:
        """Decide the beam searches, commit and answer; return the total number of levels that they decide.

        logits: [R, V] float32, the rows of `searches` in order.
        """
        if not searches:
            return 0
        self._leases.insert_deliveries(in_step=True)
        best = best_tokens(logits, max(search.beams.search.num_candidates for search in searches))
        times.forwarded_s = times.started_s + self._runner.forward_s()
        num_committed = end = 0
        for search in searches:
            start, end = end, end + search.row.num_logits
            if start == end:
                self._in_step.remove(search.lease)  # it has no verdict in this step
                continue
            try:
                levels = search.beams.decide(search.fed, best, start)
            except NonFiniteLogits as error:
                self._end(search.lease.slot, f"verify failed: {error.message}")
                continue
            times.decided_s = time.monotonic()
            self._answer(search.lease, commit_search(search, levels, times, self._runner, self._metrics))
            num_committed += len(levels)
        return num_committed

    # verdict

    def _answer(self, lease: Lease, verdict: Verdict) -> None:
        now = time.monotonic()
        lease.slot.last_request_s = now
        lease.begin_step(now)
        if verdict.finish is not None:
            self._leases.finish(lease.slot.key)
        self._leases.answer(lease.job, verdict)
        self._in_step.remove(lease)
        kind = "verify"
        if TokenKind.PLAIN in verdict.kinds:
            kind = "plain"
        self._metrics.steps.labels(kind=kind).inc()

    def fail(self, error: Exception) -> None:
        """Send an error to the gateways of those slots of the step that have no verdict yet. Call it after `run` has
        raised. The slots stay open, except those that were being prefilled.

        error: what `run` raised.
        """
        for lease in self._in_step:
            self._end(lease.slot, f"the target's step failed: {error}")
        for piece in self._pieces:
            # Without its KV cache the slot is of no use: its next Verify is answered with UNKNOWN_SLOT.
            self._end(piece.slot, f"feeding the prompt failed: {error}")
            self.forget(piece.slot.key, is_ended=False)
            self._keeper.close(CloseJob(*piece.slot.key))
        self._in_step = []
        self._pieces = ()
        self._ended_s = None

    def forget(self, key: SlotKey, *, is_ended: bool = True) -> None:
        """End the lease, the drafting and the features of a slot that is closed. is_ended: whether the slot's output is
        complete, so that drafters may learn from it.
        """
        self._leases.closed(key)
        self._own_drafts.close(key, is_ended=is_ended)
        self._features.closed(key)

    def _end(self, slot: Slot, why: str) -> None:
        self._leases.end(slot.key, why, JobFault.INTERNAL)
        slot.invalidate()
