"""A draft, a target and a gateway in simulated time: what a planner would meet, at the cost of no model.

The target serves whatever is ready in one step, and holds a step back for slots that will be ready at once; the draft
makes all proposals of a moment together, token by token.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.planning.planner import TargetPlanner
from gateway.planning.slot_plan import DraftChoice, SlotPlan
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.scheduler import StepCost
from target_service.returning import Returning

ROUND_TRIP_S = 0.0008
DRIFT_S = 3.0
"""The machine is as fast as it is for so long."""
OWNER = 1


@dataclass
class Pair:
    """What is true of it."""

    step_s: Callable[[int, int], float]
    """Of the target, by slots and tokens."""
    draft_token_s: Callable[[int], float]
    """Of the draft, for a token of so many proposals at once."""
    acceptance: Callable[[int], float]
    """By position: that its token is kept if those before it were."""
    draft_delay_s: float = 0.0
    noise: float = 0.05
    drift: float = 0.0
    """By how much the machine is slower, at most, for a while."""
    draft_feed_s: float = 0.0
    """Of the draft, for a token that it has not seen."""


@dataclass
class Slot:
    index: int
    plan: SlotPlan | None
    has_begun: bool = False
    """Its answer, of which so many tokens are made:"""
    num_made: int = 0
    num_behind: int = 2
    """Of them, that the draft has not seen; two once it has drafted."""
    began_s: float = 0.0
    k: int = 0
    due_s: float = 0.0
    """When its verify goes without drafts."""
    complete_s: float | None = None
    """When its proposal is there."""
    arrived_s: float = 0.0
    reply_pending: bool = False
    choice: DraftChoice = field(default_factory=lambda: DraftChoice(0, 0.0))


class System:
    """`fixed`: K of every round; None asks the planner. answer_tokens: of each answer; those that begin together wait
    for the last of them, then the next ones begin. Without, answers never end, and begin without a prompt.
    """

    def __init__(
        self,
        pair: Pair,
        num_slots: int,
        fixed: int | None,
        seed: int = 0,
        answer_tokens: int | None = None,
        prompt_tokens: int = 8,
    ) -> None:
        self.pair, self.fixed, self.answer_tokens = pair, fixed, answer_tokens
        self._prompt_tokens = 0 if answer_tokens is None else prompt_tokens
        self.now = 0.0
        self.num_tokens = 0
        self.num_drafted_rounds = 0
        self._num_steps = 0
        self.chosen: list[int] = []
        self.planner = TargetPlanner(clock=lambda: self.now)
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._waiting: list[Slot] = []
        self._returning = Returning(self._ready_s)
        self._cost = StepCost()
        self._busy = False
        self._drafting = 0
        self.slots: list[Slot] = []
        self._ended: list[Slot] = []
        self.set_slots(num_slots)

    def set_slots(self, num_slots: int) -> None:
        while len(self.slots) > num_slots:
            self._leave(self.slots.pop())
        while len(self.slots) < num_slots:
            slot = Slot(len(self.slots), self._new_plan())
            self.slots.append(slot)
            self._at(0.0, lambda slot=slot: self._begin(slot))

    def _new_plan(self) -> SlotPlan | None:
        return SlotPlan(self.planner, self.planner.source("draft", 1), "greedy") if self.fixed is None else None

    def _leave(self, slot: Slot) -> None:
        self.planner.num_slots -= slot.has_begun
        slot.has_begun = False
        self._returning.gone((OWNER, slot.index))
        if slot.plan is not None:
            slot.plan.leave()

    def _end_answer(self, slot: Slot) -> None:
        self._leave(slot)
        slot.num_made, slot.num_behind = 0, self._prompt_tokens + 1
        self._ended.append(slot)
        if len(self._ended) < len(self.slots):
            return
        self._ended = []
        for each in self.slots:
            each.plan = self._new_plan()
            self._at(0.0002, lambda each=each: self._begin(each))

    def run(self, seconds: float) -> float:
        """Tokens per second."""
        ends_s, before = self.now + seconds, self.num_tokens
        while self._events and self._events[0][0] < ends_s:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = ends_s
        return (self.num_tokens - before) / seconds

    def _at(self, after_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + after_s, next(self._order), event))

    def _begin(self, slot: Slot) -> None:
        if slot not in self.slots:
            return
        slot.began_s, slot.complete_s, slot.k = self.now, None, 0
        wait_s = 10.0
        if slot.plan is None:
            slot.k = self.fixed or 0
        elif slot.reply_pending or slot.plan.rests:
            slot.plan.skip()
        else:
            left = 1000.0 if self.answer_tokens is None else self.answer_tokens - slot.num_made
            slot.k, wait_s = slot.plan.choose(64, slot.num_behind, lambda: left, not slot.has_begun)
        self.chosen.append(slot.k)
        if slot.k:
            self._propose(slot)
        self._at(ROUND_TRIP_S / 2, lambda: self._arrive(slot, wait_s))

    def _propose(self, slot: Slot) -> None:
        self._drafting += 1
        slot.reply_pending = True
        k, sent_s, began_s, num_fed = slot.k, self.now, slot.began_s, slot.num_behind
        slot.num_behind = 0
        fed_s = self.pair.draft_feed_s * max(0, num_fed - 2)
        compute_s = (k * self.pair.draft_token_s(self._drafting) + fed_s) * self._noise()

        def made() -> None:
            self._drafting -= 1
            if slot.began_s == began_s:
                slot.complete_s = self.now
            self._try_step()
            self._at(ROUND_TRIP_S / 2, replied)

        def replied() -> None:
            slot.reply_pending = False
            if slot.plan is not None and slot in self.slots:
                slot.plan.replied(self.now - sent_s, compute_s, k, num_fed)

        self._at(ROUND_TRIP_S / 2 + self.pair.draft_delay_s + compute_s, made)

    def _arrive(self, slot: Slot, wait_s: float) -> None:
        slot.arrived_s, slot.due_s = self.now, self.now + (wait_s if slot.k else 0.0)
        self._waiting.append(slot)
        self._returning.arrived((OWNER, slot.index), slot.k > 0, slot.due_s)
        self._try_step()
        if slot.k and wait_s:
            self._at(wait_s, self._try_step)

    def _try_step(self) -> None:
        if self._busy:
            return
        until_s = self._returning.wait_until(self.now)
        if until_s is not None:
            self._at(until_s - self.now, self._try_step)
            return
        ready = [s for s in self._waiting if not s.k or s.complete_s is not None or self.now >= s.due_s]
        if not ready:
            return
        self._waiting = [s for s in self._waiting if s not in ready]
        drafted = [s.k if s.complete_s is not None else 0 for s in ready]
        num_prompt_tokens = self._prompt_tokens * sum(not slot.has_begun for slot in ready)
        num_tokens = len(ready) + sum(drafted) + num_prompt_tokens
        step_s = self.pair.step_s(len(ready), num_tokens) * self._noise()
        self._busy = True
        self._at(step_s, lambda started=self.now: self._end(ready, drafted, num_tokens, num_prompt_tokens, started))

    def _ready_s(self, key: SlotKey) -> float | None:
        """When the slot's verify could go as it should."""
        slot = next((slot for slot in self._waiting if slot.index == key[1]), None)
        if slot is None:
            return None
        if not slot.k:
            return slot.arrived_s
        return None if slot.complete_s is None else max(slot.arrived_s, slot.complete_s)

    def _end(
        self, ready: list[Slot], drafted: list[int], num_tokens: int, num_prompt_tokens: int, started_s: float
    ) -> None:
        self._busy = False
        self._num_steps += 1
        step_s = self.now - started_s
        for slot, k in zip(ready, drafted, strict=True):
            verdict = (self._num_steps, len(ready), num_tokens, num_prompt_tokens, k, step_s, started_s)
            self._at(ROUND_TRIP_S / 2, lambda slot=slot, verdict=verdict: self._verdict(slot, *verdict))
        self._cost.note(num_tokens - num_prompt_tokens, num_prompt_tokens, step_s)
        plain = [(OWNER, slot.index) for slot in ready if not slot.k and slot in self.slots]
        drafting = [(OWNER, slot.index) for slot in ready if slot.k and slot in self.slots]
        for slot in ready:
            if slot.k and slot.complete_s is None:
                self._returning.late((OWNER, slot.index))
        self._returning.answered(
            plain, drafting, self.now, step_s, self._cost.joined_saves_s(num_tokens - num_prompt_tokens)
        )
        self._try_step()

    def _verdict(
        self,
        slot: Slot,
        step: int,
        num_slots: int,
        num_tokens: int,
        num_prompt_tokens: int,
        k: int,
        step_s: float,
        started_s: float,
    ) -> None:
        accepted = 0
        while accepted < k and self._random.random() < self.pair.acceptance(accepted):
            accepted += 1
        self.num_tokens += accepted + 1
        slot.num_made += accepted + 1
        slot.num_behind += 2 if k else 1  # of drafts that were kept, all but the last are in the draft's cache
        self.num_drafted_rounds += k > 0
        if slot in self.slots and not slot.has_begun:
            slot.has_begun = True
            self.planner.num_slots += 1
        if slot.plan is not None and slot in self.slots:
            is_new_step = self.planner.note_step(step, num_slots, num_tokens, num_prompt_tokens, step_s)
            total_s = self.now - slot.began_s
            if k:
                complete_s = slot.complete_s or started_s
                wait_s = max(0.0, min(complete_s, started_s) - slot.arrived_s)
                slot.plan.verified(k, accepted, wait_s, step_s, total_s, num_prompt_tokens > 0, is_new_step)
            else:
                waited_s = max(0.0, started_s - slot.arrived_s) if slot.k and slot.due_s > slot.arrived_s else 0.0
                slot.plan.plain(total_s, step_s, num_prompt_tokens > 0, is_new_step, waited_s)
        if self.answer_tokens is not None and slot.num_made >= self.answer_tokens and slot in self.slots:
            self._end_answer(slot)
        else:
            self._at(0.0002, lambda: self._begin(slot))

    def _noise(self) -> float:
        drift = int(self.now / DRIFT_S) * 7919 % 5 / 4  # the same of every system
        noise = max(0.5, self._random.gauss(1.0, self.pair.noise)) * (1.0 + self.pair.drift * drift)
        return noise if self._random.random() > 0.002 else 5.0 * noise
