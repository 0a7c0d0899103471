"""Which slots are in the next forward, and with how much: continuous batching, chunked prefill, memory. No torch.

Plain values in, typed decisions out; `turns.py` applies them for both workers. The rules:

1. Slots whose next step is ready run, always: a prompt never keeps them waiting.
2. Prompts get what the step's budget leaves, first come first served, several short ones together. It is small beside
   steps of others, and also while others are between two steps: those would find the forward under way. Now and then
   it is nothing, to see what the others' steps cost. When many short ones wait beside few that run, it is whole for
   them: all run sooner, and in fuller batches, if those few pause.
3. A slot that holds nothing begins only when the free blocks cover all it needs for its next step, besides one for
   each slot that is running; while one waits for that, no younger one begins.
4. Memory that runs out is taken from the youngest slot, which begins anew from its committed tokens when its turn
   comes. Nobody takes from an older slot, unless that has been dormant: so the oldest that wants something gets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from outrider.engine.step_cost import StepCost

SlotKey = tuple[int, int]
"""(owner, slot id): an owner is one gateway's stream."""

MAX_NARROW = 16
"""Uncached tokens that ride along in a decode or verify row; more are fed as a prompt, in pieces."""


WAITING_SERVED_RATIO = 0.3
"""Short prompts that wait, over slots that run: from here on those that run pause for them. The name and the idea are
those of text-generation-inference."""
SHORT_STEPS = 2
"""A prompt that takes no more than so many whole steps is short: for a long one nobody pauses."""


class Want(Enum):
    """What a slot would do with a place in the next forward."""

    STEP = auto()
    """A verify or one more draft token, ready to go."""
    PREFILL = auto()
    """Its prompt only: nothing was asked yet, or what was asked waits for a proposal."""
    NOTHING = auto()
    """It is between two rounds and will be back."""
    DORMANT = auto()
    """Nothing was asked of it for long: its memory is the first to be taken."""


class Demand(NamedTuple):
    """A slot as the scheduler sees it."""

    key: SlotKey
    want: Want
    num_committed: int
    num_cached: int
    num_after: int
    """Tokens in its cache after its next step; never more than fit the pool alone."""
    num_blocks: int
    """Held."""
    num_copied: int = 0
    """1 when its next token goes into a block that others read, which costs one block more."""

    @property
    def num_to_feed(self) -> int:
        """Prompt tokens to be fed in pieces before its step; 0 when few enough ride along."""
        num_uncached = self.num_committed - self.num_cached
        return num_uncached - 1 if num_uncached > MAX_NARROW else 0


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take the slot's blocks away, and ask again: what that frees is known only then."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Admit:
    """The slot may begin: adopt what is cached of its tokens. Its Run or Feed follows."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Run:
    """Its step is in the next forward."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Feed:
    """At most so many tokens of its prompt are in the next forward."""

    key: SlotKey
    num_tokens: int


class Why(Enum):
    MEMORY = auto()
    """No blocks, or an older slot waits for some."""
    BUDGET = auto()
    """Older prompts fill the step."""


@dataclass(frozen=True, slots=True)
class Wait:
    """It has work and is not in the next forward."""

    key: SlotKey
    why: Why


Decision = Preempt | Admit | Run | Feed | Wait


class Scheduler:
    """Remembers nothing but the cost of steps."""

    def __init__(self, block_size: int, max_prefill_tokens: int) -> None:
        self.cost = StepCost()
        self._block_size = block_size
        self._max_prefill_tokens = max_prefill_tokens

    def plan(self, demands: Sequence[Demand], num_free: int) -> list[Decision]:
        """demands: every open slot, the longest open first. num_free: blocks that can be had.

        Either all decisions are Preempt, and the caller asks again after them, or none is. Run comes before the rest.
        """
        plan = _Plan(demands, num_free, self._block_size)
        num_running, most = plan.run(), self._max_prefill_tokens
        beside = self.cost.prefill_tokens(num_running or plan.num_expected(), most)
        plan.feed(0 if num_running and self.cost.wants_probe(num_running) else beside, most)
        return list(plan.preempted) or plan.decisions


class _Plan:
    """One call of `Scheduler.plan`. It ends with the first Preempt."""

    def __init__(self, demands: Sequence[Demand], num_free: int, block_size: int) -> None:
        self.decisions: list[Decision] = []
        self.preempted: list[Preempt] = []
        self._demands = demands
        self._num_free = num_free
        self._block_size = block_size

    def run(self) -> int:
        """Steps of slots that hold memory already. Returns how many tokens they feed."""
        num_tokens = 0
        for index, demand in enumerate(self._demands):
            if demand.want is not Want.STEP or not demand.num_blocks or demand.num_to_feed or self.preempted:
                continue
            missing = self._missing(demand, demand.num_after)
            if missing > self._num_free:
                self._make_room(missing - self._num_free, index)
                self.decisions.append(Wait(demand.key, Why.MEMORY))
                continue
            self._num_free -= missing
            self.decisions.append(Run(demand.key))
            num_tokens += demand.num_after - demand.num_cached
        return num_tokens

    def num_expected(self) -> int:
        """Tokens that slots between two steps will feed: they have answers out, or proposals under way."""
        waiting = [d for d in self._demands if d.want in (Want.NOTHING, Want.PREFILL)]
        # Guesses of the last step may still be in its cache.
        return sum(max(1, d.num_after - d.num_cached) for d in waiting if d.num_blocks and not d.num_to_feed)

    def feed(self, beside: int, most: int) -> None:
        """Prompts, in the order of arrival, as far as the budget in tokens and memory go.

        beside: tokens that hardly delay those who run. most: tokens of a whole step.
        """
        spare = self._num_spare()
        short = self._pause_for(most)
        num_fed = 0
        no_memory = False  # for one that holds nothing, so that no younger one may begin
        for index, demand in enumerate(self._demands):
            if self.preempted:
                return
            if demand.want is not Want.STEP and (demand.want is not Want.PREFILL or not demand.num_to_feed):
                continue
            budget = (most if demand.num_committed <= short else beside) - num_fed
            if demand.num_blocks:
                if demand.num_to_feed:
                    num_fed += self._feed(demand, index, budget)
                continue
            missing = self._missing(demand, demand.num_after)
            if not no_memory and missing > spare:
                no_memory = True
                self._take(missing - spare, self._dormant())
            if no_memory or (demand.num_to_feed and budget <= 0):
                self.decisions.append(Wait(demand.key, Why.MEMORY if no_memory else Why.BUDGET))
                continue
            self.decisions.append(Admit(demand.key))
            spare -= missing + 1
            num_fed += self._feed(demand, index, budget) if demand.num_to_feed else self._run_admitted(demand)

    def _pause_for(self, most: int) -> int:
        """Tokens of the longest text for whose prompt those who run pause; 0: for none."""
        short = SHORT_STEPS * most
        num_running = sum(1 for d in self._demands if d.num_blocks and not d.num_to_feed and d.want is not Want.DORMANT)
        wanting = [d for d in self._demands if d.want in (Want.STEP, Want.PREFILL) and d.num_to_feed]
        num_waiting = sum(1 for d in wanting if d.num_committed <= short)
        return short if num_waiting >= WAITING_SERVED_RATIO * num_running else 0

    def _feed(self, demand: Demand, index: int, budget: int) -> int:
        """Part of a prompt, of a slot that holds memory or was just admitted. Returns its tokens."""
        if budget <= 0:
            self.decisions.append(Wait(demand.key, Why.BUDGET))
            return 0
        within = (demand.num_blocks + self._num_free - demand.num_copied) * self._block_size - demand.num_cached
        num_tokens = min(demand.num_to_feed, budget, within)
        if num_tokens <= 0:
            self._make_room(1 - self._num_free, index)
            self.decisions.append(Wait(demand.key, Why.MEMORY))
            return 0
        self._num_free -= self._missing(demand, demand.num_cached + num_tokens)
        self.decisions.append(Feed(demand.key, num_tokens))
        return num_tokens

    def _run_admitted(self, demand: Demand) -> int:
        """The step of a slot whose whole text is short. Returns its tokens."""
        self._num_free -= self._missing(demand, demand.num_after)
        self.decisions.append(Run(demand.key))
        return demand.num_after

    def _num_spare(self) -> int:
        """Free blocks that nobody who holds memory counts on: one each, and what half-fed prompts still need.

        Dormant slots count on nothing: what they hold is taken when it is needed.
        """
        holding = [d for d in self._demands if d.num_blocks and d.want is not Want.DORMANT]
        half_fed = sum(self._missing(demand, demand.num_after) for demand in holding if demand.num_to_feed)
        return self._num_free - len(holding) - half_fed

    def _missing(self, demand: Demand, num_tokens: int) -> int:
        """Blocks to be had before the slot's cache can hold num_tokens."""
        missing = -(-num_tokens // self._block_size) - demand.num_blocks
        return max(missing, 0) + (demand.num_copied if num_tokens > demand.num_cached else 0)

    def _make_room(self, num_blocks: int, index: int) -> None:
        """For the slot at `index`: from dormant slots, then from younger ones, the youngest first."""
        younger = [d for d in reversed(self._demands[index + 1 :]) if d.num_blocks and d.want is not Want.DORMANT]
        self._take(num_blocks, [*self._dormant(), *younger])

    def _dormant(self) -> list[Demand]:
        return [demand for demand in self._demands if demand.want is Want.DORMANT and demand.num_blocks]

    def _take(self, num_blocks: int, victims: Sequence[Demand]) -> None:
        """Preempt as many of them as it takes; none when all together do not hold so many."""
        if num_blocks > sum(victim.num_blocks for victim in victims):
            return
        for victim in victims:
            if num_blocks <= 0:
                return
            self.preempted.append(Preempt(victim.key))
            num_blocks -= victim.num_blocks
