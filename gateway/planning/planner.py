"""How many tokens are drafted in a round: none where that does not pay. Pure, of the event loop's thread.

Leviathan et al. (2023), Theorem 3.8: a round of K draft tokens makes E(K) tokens in the time of a step of K + 1 and of
K draft steps. Generalised: acceptance by position, measured times, and a target that many slots share. Each step serves
all of them, so what one more draft token costs, it costs all: the target's tokens per second are maximised. A slot
drafts as far as a token's chance to be kept is worth that time at this rate (`gateway.planning.slot_plan`); alone,
it minimises its time per token.

What cannot be known without trying is tried by one slot first, within a budget of the target's time; and what comes of
drafts decides in the end: a load at which they made fewer tokens than plain rounds would have is left alone a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol
from weakref import WeakKeyDictionary

from gateway.planning.draft_costs import MAX_PLANNED, DraftSource, Pause, level_of
from gateway.planning.step_model import StepModel, Typical, class_of

CANDIDATES = (1, 2, 3, 4, 5, 6, 8, 10, 12, MAX_PLANNED)
BEGIN_MARGIN = 1.08
"""Drafts begin when they promise so many times the rate of plain decoding, since a prediction may err,"""
STAY_MARGIN = 1.02
"""and go on while they promise this."""
PLAN_DECISIONS = 4
"""That a plan is good for, at least; with more slots than that one of each."""
FIRST_TOKENS = 2
"""K at most where it is not known what the draft takes for so many slots at once."""
MOST_BEYOND = 3.0
"""Times the tokens of the largest step seen, that a plan may have in one: what it costs is guessed."""
TRIAL_S = 10.0
"""Of one slot that tries drafts; then it is over, whatever came of it."""
LEARN_SHARE = 0.005
"""Of the time, that may be lost to learning,"""
LEARN_MOST_S = 0.1
"""of which so much can be saved up,"""
LEARN_FIRST_S = 0.25
"""and that there is for the beginning,"""
LEARN_LEAST_S = -2 * LEARN_FIRST_S
"""and that is owed at most: what a machine that stood still took is not the drafts'."""
PLAIN_LIFE_S = 10.0
"""While drafts are on, all take a plain round so often: it is what drafts are held against."""
SETTLED_ROUNDS = 2
"""Of each slot without drafts, before plain rounds tell what they take when nobody drafts."""
PLAIN_ROUNDS = 3
"""At a load that nothing is known of."""
OTHERS_GAIN = 1 / 8


@dataclass(frozen=True, slots=True)
class Plan:
    """For all slots of a source at a target."""

    num_draft_tokens: int
    """K of the average slot; 0: plain."""
    rate: float
    """Tokens per second of the target under it."""
    cycle_s: float = 0.0
    """Of a round."""
    costs_s: tuple[float, ...] = (0.0,) * (MAX_PLANNED + 1)
    """What K draft tokens of one slot, by K, add to everybody's step."""
    most: int = MAX_PLANNED
    """K of any slot: for more, nothing is known of what it takes."""
    token_s: float = 0.0
    """What one takes the draft."""
    latency_s: float = 0.0
    """That a proposal takes besides."""


PLAIN_PLAN = Plan(0, 0.0)


class Trying(Protocol):
    """A slot that drafts to learn."""

    source: DraftSource

    def trial_ended(self, pays: bool) -> None: ...


class TargetPlanner:
    """What a gateway knows of one target, and what its slots there decide together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_slots = 0
        """Requests of this gateway that are in its steps."""
        self._clock = clock
        self._plans: WeakKeyDictionary[DraftSource, tuple[int, int, Plan]] = WeakKeyDictionary()
        """Decisions that the plan is still good for, the class of the load that it is for, the plan."""
        self._num_plain_asked = 0
        self._num_plain_rounds = 0
        """Since one with drafts."""
        self._num_others = 0.0
        """Slots of other gateways, by the size of batches."""
        self._accrued_s = clock()
        self._trial_s = 0.0
        self.restarted()

    def restarted(self) -> None:
        """The target is another process, maybe on another machine: only who is in its steps is still true."""
        self.steps = StepModel()
        self.budget_s = LEARN_FIRST_S
        """Of the target's time, for learning."""
        self._sources: dict[str, DraftSource] = {}
        self._plain_extra: dict[int, Typical] = {}
        """What a plain round takes besides a step of all slots, by load."""
        self._plain_seen: dict[int, tuple[float, int]] = {}
        """By class of size: when steps without drafts were seen last, and how many."""
        self._plain_s = (0.0, 0.0)
        """The load that `plain_s` was worked out for last, and what it was."""
        self._last_step = self._last_num_slots = 0
        self._trial: Trying | None = None

    def source(self, name: str, epoch: int = 0, own: bool = False) -> DraftSource:
        """A drafter that has another epoch than before is learnt anew."""
        known = self._sources.get(name)
        if known is None or known.epoch != epoch:
            known = self._sources[name] = DraftSource(name, epoch, own)
        return known

    def forget(self, name: str) -> None:
        """The drafter is gone."""
        self._sources.pop(name, None)

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def load(self) -> float:
        """Slots that share the target's steps, those of other gateways too, and those of the last step whose verdicts
        are still on their way: answers that begin together are one load from the first.
        """
        return max(1.0, self.num_slots + self._num_others, self._last_num_slots)

    @property
    def load_class(self) -> int:
        """Of many slots, one more or less is no other load."""
        return class_of(int(self.load))

    @property
    def num_planned_tokens(self) -> int:
        return sum(source.num_planned_tokens for source in self._sources.values())

    @property
    def num_drafting(self) -> int:
        return sum(source.num_drafting for source in self._sources.values())

    # what was seen

    def note_step(self, step: int, num_slots: int, num_tokens: int, num_prompt_tokens: int, seconds: float) -> bool:
        """Note the step that a verdict comes from, by its number in the target's life. True for its first verdict."""
        if step == self._last_step:
            return False
        now = self._clock()
        self._last_step, self._last_num_slots, self._plain_s = step, num_slots, (0.0, 0.0)
        self._num_others += OTHERS_GAIN * (max(0.0, num_slots - self.num_slots) - self._num_others)
        self.steps.note(num_slots, num_tokens, seconds, num_prompt_tokens > 0, now)
        if num_tokens == num_slots:
            key = class_of(num_tokens)
            self._plain_seen[key] = (now, self._plain_seen.get(key, (0.0, 0))[1] + 1)
        since_s, self._accrued_s = min(now - self._accrued_s, 1.0), now
        self.budget_s = max(self.budget_s, min(LEARN_MOST_S, self.budget_s + LEARN_SHARE * since_s))
        return True

    def note_plain(self, total_s: float, is_new_step: bool) -> None:
        """A plain round took so long beside which no prompt was fed. Those that began soon after others' drafts tell
        what these took.
        """
        self._num_plain_rounds += 1
        if not is_new_step or self._num_plain_rounds <= SETTLED_ROUNDS * self.load:
            return
        load = self.load
        level = level_of(load)
        if level not in self._plain_extra:
            self._plain_extra[level] = Typical()
        self._plain_extra[level].observe(total_s - self.steps.seconds(load, load))

    def note_drafted(self) -> None:
        """A round with drafts begins."""
        self._num_plain_rounds = 0

    def spend(self, lost_s: float) -> None:
        """To learning; less than nothing when it paid."""
        self.budget_s = max(LEARN_LEAST_S, min(max(self.budget_s, LEARN_MOST_S), self.budget_s - lost_s))

    # what follows

    def plain_s(self) -> float:
        """A plain round at this load; 0 while nothing is known."""
        load = self.load
        if self._plain_s[0] != load:
            step_s = self.steps.seconds(load, load)
            self._plain_s = (load, step_s and max(0.5 * step_s, step_s + self._plain_extra_s()))
        return self._plain_s[1]

    def wants_plain(self) -> bool:
        """What a plain round takes at this load is not known, or was measured long ago."""
        load, now, key = int(self.load), self._clock(), self.load_class
        seen_s, num_seen = self._plain_seen.get(key, (0.0, 0))
        if num_seen >= PLAIN_ROUNDS and now - seen_s <= PLAIN_LIFE_S:
            self._num_plain_asked = 0
            return False
        self._num_plain_asked += 1
        if self._num_plain_asked > 4 * load + 8:  # somebody drafts whatever we do: it will not be seen
            self._plain_seen[key] = (now, PLAIN_ROUNDS)
            self._num_plain_asked = 0
        return True

    def plan(self, source: DraftSource) -> Plan:
        """For the slots that may be given drafts by it; looked at anew every few rounds."""
        made = self._plans.get(source)
        load_class = self.load_class
        if made is not None and made[0] > 0 and made[1] == load_class:
            self._plans[source] = (made[0] - 1, load_class, made[2])
            return made[2]
        plan = self._make_plan(source)
        self._plans[source] = (max(PLAN_DECISIONS, source.num_slots) - 1, load_class, plan)
        return plan

    def last_plan(self, source: DraftSource) -> Plan:
        made = self._plans.get(source)
        return PLAIN_PLAN if made is None else made[2]

    def _make_plan(self, source: DraftSource) -> Plan:
        """Turns drafts on or off."""
        now, num_slots = self._clock(), max(1, source.num_slots)
        level = source.level(num_slots)
        if source.is_on and (now < level.pause.from_s or level.has_failed(num_slots, now)):
            source.is_on = False
        may_begin = source.is_known and now >= level.pause.from_s and (level.is_proven or self._may_learn(level.pause))
        plan = self._best_plan(source, num_slots) if source.is_on or may_begin else PLAIN_PLAN
        if not source.is_on and not self._may_begin(source, plan, now):
            plan = PLAIN_PLAN
        if source.is_on != (plan.num_draft_tokens > 0):
            source.is_on = not source.is_on
            for each in source.levels:
                each.begin()
        return plan

    def _may_begin(self, source: DraftSource, plan: Plan, now: float) -> bool:
        """Answers that begin together join one after another: what pays for those that have is begun only if it still
        does half a round later.
        """
        if not plan.num_draft_tokens:
            source.wanted_s = 0.0
            return False
        source.wanted_s = source.wanted_s or now
        if now - min(source.wanted_s, source.joined_s) < self.plain_s() / 2:
            return False
        source.wanted_s = 0.0
        return True

    def _best_plan(self, source: DraftSource, num_slots: int) -> Plan:
        """By what is known. What drafts cost besides shows in what comes of them."""
        load, plain_s = self.load, self.plain_s()
        if not plain_s:
            return PLAIN_PLAN
        token_s, latency_s = source.times(num_slots)
        seconds = self.steps.seconds
        besides_s = plain_s - seconds(load, load) + latency_s
        beside = load + self.num_planned_tokens - source.num_planned_tokens
        least = load / plain_s * (STAY_MARGIN if source.is_on else BEGIN_MARGIN)
        best, best_s, best_rate = 0, plain_s, 0.0
        known = int((MOST_BEYOND * self.steps.most_tokens - beside) / num_slots)
        most = max(1, min(known, MAX_PLANNED if source.own or source.is_timed(num_slots) else FIRST_TOKENS))
        for k in CANDIDATES:
            if k > most:
                break
            cycle_s = seconds(load, beside + num_slots * k) + besides_s + token_s * k
            rate = (load - num_slots + source.sum_tokens[k]) / cycle_s
            if rate > best_rate:
                best, best_s, best_rate = k, cycle_s, rate
            elif rate < 0.9 * best_rate:
                break
        if best_rate <= least:
            return PLAIN_PLAN
        planned = beside + num_slots * best
        without_s = seconds(load, planned - best)
        added_s = (seconds(load, planned - best + k) - without_s for k in range(MAX_PLANNED + 1))
        return Plan(best, best_rate, best_s, tuple(accumulate(added_s, max)), most, token_s, latency_s)

    def _plain_extra_s(self) -> float:
        level = level_of(self.load)
        known = self._plain_extra.get(level)
        if known is not None:
            return known.value
        nearest = min(self._plain_extra, key=lambda other: abs(other - level), default=None)
        return 0.0 if nearest is None else self._plain_extra[nearest].value

    def _may_learn(self, pause: Pause) -> bool:
        """What never failed at its load may begin on credit: what was lost at another load says nothing of it."""
        return self.budget_s > (-LEARN_FIRST_S if pause.is_new else 0.0)

    # trials by one slot

    def may_try(self, source: DraftSource) -> bool:
        now, pause = self._clock(), source.level(max(1, source.num_slots)).pause
        if self._trial is not None and now - self._trial_s > TRIAL_S:
            self.end_trial(self._trial)
        return (
            self._trial is None
            and now >= pause.from_s
            and (not source.is_known or self._may_learn(pause))  # else drafts could not begin whatever it finds
            and source.may_be_tried(self.load, now)
            and self._may_learn(source.level(self.load).trials)
        )

    def begin_trial(self, slot: Trying) -> None:
        self._trial, self._trial_s = slot, self._clock()

    def tries(self, slot: Trying) -> bool:
        """It drafts to learn."""
        if self._trial is not slot:
            return False
        in_time = self._clock() - self._trial_s <= TRIAL_S
        if in_time and self._may_learn(slot.source.level(self.load).trials):
            return True
        self.end_trial(slot)
        return False

    def cut_trial(self, slot: Trying) -> None:
        """Its answer is over: that says nothing of drafts."""
        if self._trial is slot:
            self._trial = None

    def end_trial(self, slot: Trying) -> None:
        if self._trial is not slot:
            return
        self._trial = None
        source = slot.source
        self._plans.pop(source, None)
        pays = source.is_known and self._best_plan(source, max(1, source.num_slots)).num_draft_tokens > 0
        source.tried(self.load, self._clock(), pays)
        slot.trial_ended(pays)

    def lost_s(self, source: DraftSource, total_s: float, num_tokens: int, step_s: float) -> float:
        """Of the target's time, by a round that took so long, a step of `step_s` in it, and made so many tokens. What
        drafts add to the step, all others wait for: those, that is, whose own rounds are not counted.
        """
        load = self.load
        own_s = total_s - num_tokens * self.plain_s()
        num_others = load - (source.num_slots if source.is_on else 1.0)
        others_s = max(0.0, num_others) * max(0.0, step_s - self.steps.seconds(load, load)) / max(1, self.num_drafting)
        return (own_s + others_s) / load
