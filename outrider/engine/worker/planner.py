"""Decide which slots run in the next forward: continuous batching, chunked prefill and KV memory. No torch.

`Scheduler` takes plain values and returns typed decisions; `StepScheduler` applies them for both workers. The rules:

1. A slot that is ready for its next step always runs: a prompt never delays it. (Before that, a target leaves out slots
   of a caller that would slow another caller by more than its share.)
2. Prompts get the rest of the step's budget, several short ones together. Prompts of the caller that was fed least,
   relative to its weight, come first; within a caller the lowest priority number, then first come first served. The
   budget is small in a step of other slots, and also while other slots are between two steps, since those would have to
   wait for the running forward. After `PROBE_STEPS` it is zero for one step, which measures decoding alone. If many
   short prompts wait and few slots run, all of one caller, the prompts get whole steps: all then finish sooner, and in
   fuller batches.
3. A slot without blocks is admitted only if the free blocks cover its next step and leave one block for each slot,
   itself included, whose last block is nearly full. While one such slot waits, none after it is admitted.
4. When memory runs out, the youngest slot is preempted; it starts again from its committed tokens. A slot never takes
   memory from an older one unless that one is dormant, so the oldest slot with work always gets memory.

All of this runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.worker.decisions import (
    Admit,
    Decision,
    Need,
    Preempt,
    PrefillSlot,
    Run,
    SkipSlot,
    SlotState,
    WaitReason,
)
from outrider.engine.worker.step_cost import StepCost
from outrider.wire.requests.scheduling import VirtualTokens

GROWTH_TOKENS = 16
"""Number of tokens by which each running slot must still be able to grow when another slot is admitted: one block of
the attention backends for CPUs."""
WAITING_SERVED_RATIO = 0.3
"""Number of waiting short prompts, divided by the number of running slots, from which on the running slots pause while
these prompts are fed. Name and idea are from text-generation-inference."""
SHORT_STEPS = 2
"""Maximum length of a short prompt, in multiples of max_prefill_tokens, the number of prompt tokens that one step may
have. Running slots never pause for a longer prompt."""


class Scheduler:
    """Planner of a worker's next forward. Its only state is the measured duration of steps and the number of prompt
    tokens fed for each caller.
    """

    def __init__(self, block_size: int, max_prefill_tokens: int) -> None:
        self.cost = StepCost()
        self._block_size = block_size
        self._max_prefill_tokens = max_prefill_tokens
        self._fed = VirtualTokens()

    def plan(self, states: Sequence[SlotState], num_free: int) -> list[Decision]:
        """Return the decisions for the next forward.

        `states`: state of every open slot, the longest open first. `num_free`: number of free blocks.

        If slots have to be preempted, all decisions are `Preempt`. The caller then has to apply them and plan again.
        Otherwise none is `Preempt`, and `Run` decisions come first.

        Example, with memory for all: slot A is ready to verify, slot B of another caller is new with a prompt of 1,000
        tokens, and `StepCost` allows 64 prompt tokens in A's step: Run(A), Admit(B), PrefillSlot(B, 64).
        """
        plan = _Plan(states, num_free, self._block_size)
        num_running = plan.run()
        step_budget = self._max_prefill_tokens
        budget = self.cost.prefill_tokens(num_running or plan.num_expected(), step_budget)
        if num_running and self.cost.needs_probe(num_running):
            budget = 0
        plan.feed(self._sort_waiting(states), budget, step_budget)
        if not plan.preempted:
            self._note_fed(states, plan.decisions)
        return list(plan.preempted) or plan.decisions

    def _sort_waiting(self, states: Sequence[SlotState]) -> list[int]:
        # indices of the slots that wait, by what their caller was given, and within a caller by priority and age
        waiting = [index for index, state in enumerate(states) if state.is_waiting]
        first = dict[bytes, int]()
        weights = dict[bytes, float]()
        for index in waiting:
            scheduling = states[index].scheduling
            if scheduling.caller not in first:
                first[scheduling.caller] = index
                weights[scheduling.caller] = scheduling.weight
        self._fed.wait(weights, (state.scheduling.caller for state in states))

        def rank(index: int) -> tuple[float, int, int]:
            scheduling = states[index].scheduling
            return self._fed.served(scheduling.caller), first[scheduling.caller], scheduling.priority

        return sorted(waiting, key=rank)

    def _note_fed(self, states: Sequence[SlotState], decisions: Sequence[Decision]) -> None:
        callers = {state.key: state.scheduling.caller for state in states}
        for decision in decisions:
            if isinstance(decision, PrefillSlot):
                self._fed.add_served(callers[decision.key], decision.num_tokens)


class _Plan:
    """Decisions of one call of `Scheduler.plan`. After the first `Preempt` no more are made."""

    def __init__(self, states: Sequence[SlotState], num_free: int, block_size: int) -> None:
        self.decisions: list[Decision] = []
        self.preempted: list[Preempt] = []
        self._states = states
        self._num_free = num_free
        self._block_size = block_size

    def run(self) -> int:
        """Decide to run the ready slots that hold blocks; return the number of tokens that they feed."""
        num_tokens = 0
        for index, state in enumerate(self._states):
            if state.want is not Need.RUN or not state.num_blocks or state.num_to_feed or self.preempted:
                continue
            missing = self._missing(state, state.num_after)
            if missing > self._num_free:
                self._preempt_for(missing - self._num_free, index)
                self.decisions.append(SkipSlot(state.key, WaitReason.MEMORY))
                continue
            self._num_free -= missing
            self.decisions.append(Run(state.key))
            num_tokens += state.num_after - state.num_cached
        return num_tokens

    def num_expected(self) -> int:
        """Return the number of tokens that the slots that are now between two steps will feed in their next one."""
        num_tokens = 0
        for state in self._states:
            if state.want in (Need.NOTHING, Need.PREFILL) and state.num_blocks and not state.num_to_feed:
                # Draft tokens of the last step may still be in the slot's cache.
                num_tokens += max(1, state.num_after - state.num_cached)
        return num_tokens

    def feed(self, waiting: Sequence[int], decode_budget: int, step_budget: int) -> None:
        """Decide which prompts are fed, within the budgets of tokens and blocks.

        `waiting`: indices of slots with a prompt to feed, in scheduling order. `decode_budget`: number of prompt tokens
        that hardly delay the running slots. `step_budget`: number of prompt tokens that a step may have at most.
        """
        num_spare = self._num_spare()
        short = self._pause_for(step_budget)
        num_fed = 0
        no_memory = False  # for an admission: no later slot may be admitted either
        for index in waiting:
            state = self._states[index]
            if self.preempted:
                return
            budget = decode_budget - num_fed
            if state.num_to_read <= short:
                budget = step_budget - num_fed
            if state.num_blocks:
                if state.num_to_feed:
                    num_fed += self._feed(state, index, budget)
                continue
            missing = self._missing(state, state.num_after)
            if not no_memory and missing > num_spare:
                no_memory = True
                self._preempt(missing - num_spare, self._dormant())
            if no_memory:
                self.decisions.append(SkipSlot(state.key, WaitReason.MEMORY))
                continue
            if state.num_to_feed and budget <= 0:
                self.decisions.append(SkipSlot(state.key, WaitReason.BUDGET))
                continue
            self.decisions.append(Admit(state.key))
            num_spare -= missing + self._reserve(state)
            if state.num_to_feed:
                num_fed += self._feed(state, index, budget)
            else:
                num_fed += self._run_admitted(state)

    def _pause_for(self, step_budget: int) -> int:
        """Return the maximum prompt length, in tokens, for which running slots pause; 0 when they do not."""
        short = SHORT_STEPS * step_budget
        callers = set[bytes]()
        num_running = 0
        num_waiting = 0
        for state in self._states:
            if state.has_memory and not state.num_to_feed:
                num_running += 1
                callers.add(state.scheduling.caller)
            elif state.want in (Need.RUN, Need.PREFILL) and state.num_to_feed and state.num_to_read <= short:
                num_waiting += 1
                callers.add(state.scheduling.caller)
        if num_running and len(callers) > 1:
            return 0  # a slot never pauses for another caller's prompt
        if num_waiting < WAITING_SERVED_RATIO * num_running:
            return 0
        return short

    def _feed(self, state: SlotState, index: int, budget: int) -> int:
        if budget <= 0:
            self.decisions.append(SkipSlot(state.key, WaitReason.BUDGET))
            return 0
        num_needed = state.num_cached
        if not state.num_to_encode:  # a chunk adds a token at least to the slot's cache; a source adds none
            num_needed += 1
        missing = self._missing(state, num_needed)
        if missing > self._num_free:
            self._preempt_for(missing - self._num_free, index)
            self.decisions.append(SkipSlot(state.key, WaitReason.MEMORY))
            return 0
        if state.num_to_encode:
            self._num_free -= missing
            self.decisions.append(PrefillSlot(state.key, state.num_to_encode))
            return state.num_to_encode
        num_blocks = state.num_blocks - state.num_source_blocks + self._num_free - state.num_copied
        num_tokens = min(state.num_to_feed, budget, num_blocks * self._block_size - state.num_cached)
        self._num_free -= self._missing(state, state.num_cached + num_tokens)
        self.decisions.append(PrefillSlot(state.key, num_tokens))
        return num_tokens

    def _run_admitted(self, state: SlotState) -> int:
        self._num_free -= self._missing(state, state.num_after)
        self.decisions.append(Run(state.key))
        return state.num_after

    def _num_spare(self) -> int:
        """Return the number of free blocks that no running or half-prefilled slot needs.

        Dormant slots reserve nothing: they are preempted when their blocks are needed.
        """
        num_spare = self._num_free
        for state in self._states:
            if not state.has_memory:
                continue
            num_spare -= self._reserve(state)
            if state.num_to_feed:
                num_spare -= self._missing(state, state.num_after)
        return num_spare

    def _reserve(self, state: SlotState) -> int:
        # blocks of 256: one more block where fewer than 16 tokens fit into the last one; blocks of 16: always one more
        return int(-state.num_after % self._block_size < GROWTH_TOKENS)

    def _missing(self, state: SlotState, num_tokens: int) -> int:
        # blocks of 16, 3 held, no source: 50 tokens need 4 blocks, so 1 is missing
        missing = state.num_source_blocks - (-num_tokens // self._block_size) - state.num_blocks
        num_missing = max(missing, 0)
        if num_tokens > state.num_cached:
            num_missing += state.num_copied
        return num_missing

    def _preempt_for(self, num_blocks: int, index: int) -> None:
        """Preempt dormant slots, then slots younger than the one at `index`, the youngest first."""
        younger = [state for state in reversed(self._states[index + 1 :]) if state.has_memory]
        self._preempt(num_blocks, [*self._dormant(), *younger])

    def _dormant(self) -> list[SlotState]:
        return [state for state in self._states if state.want is Need.DORMANT and state.num_blocks]

    def _preempt(self, num_blocks: int, victims: Sequence[SlotState]) -> None:
        """Preempt `victims` in order until `num_blocks` are free; preempt none when all of them do not hold enough."""
        if num_blocks > sum(victim.num_blocks for victim in victims):
            return
        for victim in victims:
            if num_blocks <= 0:
                return
            self.preempted.append(Preempt(victim.key))
            num_blocks -= victim.num_blocks
