"""How many tokens are drafted in a round: none where that does not pay. Pure, of the event loop's thread.

Leviathan et al. (2023), Theorem 3.8: a round of K draft tokens makes E(K) tokens in the time of a step of K + 1 and of
K draft steps. Generalised: acceptance by position, measured times, and a target that many slots share. Each step serves
all of them, so what one more draft token costs, it costs all: the target's tokens per second are maximised. A slot
drafts as far as a token's chance to be kept is worth that time at this rate; alone, it minimises its time per token.

What cannot be known without trying is tried by one slot first, within a budget of the target's time; and what comes of
drafts decides in the end: a load at which they made fewer tokens than plain rounds would have is left alone a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple
from weakref import WeakKeyDictionary

from gateway.acceptance_curve import MAX_PLANNED, SlotAcceptance
from gateway.draft_costs import FEW_FED, DraftSource, Pause
from gateway.step_model import StepModel, class_of
from gateway.typical import Typical

CANDIDATES = (1, 2, 3, 4, 5, 6, 8, 10, 12, MAX_PLANNED)
BEGIN_MARGIN = 1.05
"""Drafts begin when they promise so many times the rate of plain decoding, since a prediction may err,"""
STAY_MARGIN = 1.01
"""and go on while they promise this."""
PLAN_ROUNDS = 4
"""Of each slot, that a plan is good for, about."""
FIRST_TOKENS = 2
"""K at most where it is not known what the draft takes for so many slots at once."""
MOST_BEYOND = 3.0
"""Times the tokens of the largest step seen, that a plan may have in one: what it costs is guessed."""
TRIAL_TOKENS = 3
"""K of a round that one slot makes to learn."""
TRIAL_VERIFIED = 4
"""Such rounds that are verified, at most,"""
HOPELESS = 0.9
"""Of the rate of plain decoding: a trial that promises less is over at once."""
TRIAL_ROUNDS = 8
"""and that are asked for: proposals of some may only catch up."""
TRIAL_S = 10.0
"""Then it is over, whatever came of it."""
TRIAL_LEFT = 12.0
"""Tokens that an answer must be expected to have left for one."""
LEAST_GAIN = 0.5
"""Of what its drafts cost, that a slot must gain while others draft: plain slots among them break their steps up."""
SHORT_LEFT = 6.0
"""Who is expected to say fewer tokens than so many is not drafted for."""
MOST_STEPS_WAITED = 8.0
"""A proposal that takes longer than so many plain steps cannot pay: to learn nothing else, nobody waits for it."""
LEARN_SHARE = 0.005
"""Of the time, that may be lost to learning,"""
LEARN_MOST_S = 0.1
"""of which so much can be saved up,"""
LEARN_FIRST_S = 0.25
"""and that there is for the beginning."""
PLAIN_LIFE_S = 10.0
"""While drafts are on, all take a plain round so often: it is what drafts are held against."""
SETTLED_ROUNDS = 2
"""Of each slot without drafts, before plain rounds tell what they take when nobody drafts."""
PLAIN_ROUNDS = 3
"""At a load that nothing is known of."""
OUTLIER = 3.0
"""A round counts as at most so many times as long as was to be expected."""
OTHERS_GAIN = 1 / 8


class Choice(NamedTuple):
    num_draft_tokens: int
    """K; 0 = a plain step."""
    wait_s: float
    """The longest wait for the proposal that pays; 0: it is verified if it is there."""


PLAIN = Choice(0, 0.0)


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
    token_s: float = 0.0
    """What one takes the draft."""
    latency_s: float = 0.0
    """That a proposal takes besides."""


PLAIN_PLAN = Plan(0, 0.0)


class TargetPlanner:
    """What a gateway knows of one target, and what its slots there decide together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = StepModel()
        self.num_slots = 0
        """Requests of this gateway."""
        self.budget_s = LEARN_FIRST_S
        """Of the target's time, for learning."""
        self._clock = clock
        self._sources: dict[str, DraftSource] = {}
        self._plans: WeakKeyDictionary[DraftSource, tuple[int, int, Plan]] = WeakKeyDictionary()
        """Decisions that the plan is still good for, the load that it is for, the plan."""
        self._plain_extra: dict[int, Typical] = {}
        """What a plain round takes besides a step of all slots, by load."""
        self._plain_seen: dict[int, tuple[float, int]] = {}
        """By class of size: when steps without drafts were seen last, and how many."""
        self._plain_s = (0.0, 0.0)
        """The load that `plain_s` was worked out for last, and what it was."""
        self._num_plain_asked = 0
        self._num_plain_rounds = 0
        """Since one with drafts."""
        self._num_others = 0.0
        """Slots of other gateways, by the size of batches."""
        self._last_step: tuple[int, int, float] = (0, 0, 0.0)
        self._noted_s = 0.0
        """When its first verdict came."""
        self.is_new_step = True
        """Of the verdict that was noted last: times of the others of its step say the same, and count once."""
        self._accrued_s = clock()
        self._trial: SlotPlan | None = None
        self._trial_s = 0.0

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
        """Slots that share the target's steps, those of other gateways too."""
        return max(1.0, self.num_slots + self._num_others)

    @property
    def num_planned_tokens(self) -> int:
        return sum(source.num_planned_tokens for source in self._sources.values())

    @property
    def num_drafting(self) -> int:
        return sum(source.num_drafting for source in self._sources.values())

    # what was seen

    def note_step(self, num_slots: int, num_tokens: int, num_prompt_tokens: int, seconds: float) -> None:
        """Of each verdict: the step that it comes from. Verdicts of one step come together and count once."""
        step, now = (num_slots, num_tokens, seconds), self._clock()
        self.is_new_step = num_tokens > 0 and (step != self._last_step or now - self._noted_s > seconds / 2)
        if not self.is_new_step:
            return
        self._last_step, self._noted_s, self._plain_s = step, now, (0.0, 0.0)
        self._num_others += OTHERS_GAIN * (max(0.0, num_slots - self.num_slots) - self._num_others)
        self.steps.note(num_slots, num_tokens, seconds, num_prompt_tokens > 0)
        if num_tokens == num_slots:
            key = class_of(num_tokens)
            self._plain_seen[key] = (now, self._plain_seen.get(key, (0.0, 0))[1] + 1)
        since_s, self._accrued_s = min(now - self._accrued_s, 1.0), now
        self.budget_s = max(self.budget_s, min(LEARN_MOST_S, self.budget_s + LEARN_SHARE * since_s))

    def note_plain(self, total_s: float) -> None:
        """A plain round took so long beside which no prompt was fed. Those that began soon after others' drafts tell
        what these took.
        """
        load = self.load
        self._num_plain_rounds += 1
        if self._num_plain_rounds <= SETTLED_ROUNDS * load or not self.is_new_step:
            return
        level = int(load).bit_length()
        if level not in self._plain_extra:
            self._plain_extra[level] = Typical()
        self._plain_extra[level].observe(total_s - self.steps.seconds(load, load))

    def note_drafted(self) -> None:
        """A round with drafts begins."""
        self._num_plain_rounds = 0

    def spend(self, lost_s: float) -> None:
        """To learning; less than nothing when it paid."""
        self.budget_s = min(max(self.budget_s, LEARN_MOST_S), self.budget_s - lost_s)

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
        load, now = int(self.load), self._clock()
        key = class_of(load)
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
        load = int(self.load)
        if made is not None and made[0] > 0 and made[1] == load:
            self._plans[source] = (made[0] - 1, load, made[2])
            return made[2]
        plan = self._make_plan(source)
        self._plans[source] = (PLAN_ROUNDS * max(1, source.num_slots // 4) - 1, load, plan)
        return plan

    def _make_plan(self, source: DraftSource) -> Plan:
        """Turns drafts on or off."""
        now, num_slots = self._clock(), max(1, source.num_slots)
        level = source.level(num_slots)
        if source.is_on and level.failed(num_slots, now):
            source.is_on = False
        may_begin = source.is_known and now >= level.pause.from_s and (level.is_proven or self._may_learn(level.pause))
        plan = self._best_plan(source, num_slots) if source.is_on or may_begin else PLAIN_PLAN
        if source.is_on != (plan.num_draft_tokens > 0):
            source.is_on = not source.is_on
            for each in source.levels:
                each.begin()
        return plan

    def _best_plan(self, source: DraftSource, num_slots: int) -> Plan:
        """By what is known. That it pays is judged without what drafts were found to cost besides: that shows in what
        comes of them.
        """
        load, plain_s = self.load, self.plain_s()
        if not plain_s:
            return PLAIN_PLAN
        token_s, latency_s = source.times(num_slots)
        level, seconds = source.level(num_slots), self.steps.seconds
        besides_s = plain_s - seconds(load, load) + latency_s
        extra_s = max(0.0, level.extra_s.value) if source.is_on else 0.0
        beside = load + self.num_planned_tokens - source.num_planned_tokens
        least = load / plain_s * (STAY_MARGIN if source.is_on else BEGIN_MARGIN)
        best, best_s, best_rate, pays = 0, plain_s, 0.0, False
        most = MAX_PLANNED if source.own or level.token_s.num_seen >= num_slots else FIRST_TOKENS
        for k in CANDIDATES:
            if k > most or (k > 1 and beside + num_slots * k > MOST_BEYOND * self.steps.most_tokens):
                break
            cycle_s = seconds(load, beside + num_slots * k) + besides_s + token_s * k
            num_tokens = load - num_slots + source.sum_tokens[k]
            pays = pays or num_tokens > least * cycle_s
            rate = num_tokens / (cycle_s + extra_s)
            if rate > best_rate:
                best, best_s, best_rate = k, cycle_s + extra_s, rate
            elif rate < 0.9 * best_rate:
                break
        if not pays:
            return PLAIN_PLAN
        planned = beside + num_slots * best
        without_s = seconds(load, planned - best)
        added_s = (seconds(load, planned - best + k) - without_s for k in range(MAX_PLANNED + 1))
        return Plan(best, best_rate, best_s, tuple(accumulate(added_s, max)), token_s, latency_s)

    def _plain_extra_s(self) -> float:
        level = int(self.load).bit_length()
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
        now = self._clock()
        if self._trial is not None and now - self._trial_s > TRIAL_S:
            self.end_trial(self._trial)
        return (
            self._trial is None
            and source.may_be_tried(self.load, now)
            and self._may_learn(source.level(int(self.load)).trials)
        )

    def begin_trial(self, slot: SlotPlan) -> None:
        self._trial, self._trial_s = slot, self._clock()

    def tries(self, slot: SlotPlan) -> bool:
        """It drafts to learn."""
        if self._trial is not slot:
            return False
        in_time = self._clock() - self._trial_s <= TRIAL_S
        if in_time and self._may_learn(slot.source.level(int(self.load)).trials):
            return True
        self.end_trial(slot)
        return False

    def cut_trial(self, slot: SlotPlan) -> None:
        """Its answer is over: that says nothing of drafts."""
        if self._trial is slot:
            self._trial = None

    def end_trial(self, slot: SlotPlan) -> None:
        if self._trial is not slot:
            return
        self._trial = None
        source = slot.source
        self._plans.pop(source, None)
        pays = source.is_known and self.plan(source).num_draft_tokens > 0
        source.tried(self.load, self._clock(), pays)
        slot.trial_ended(pays)

    def lost_s(self, total_s: float, num_tokens: int, step_s: float) -> float:
        """Of the target's time, by a round that took so long, a step of `step_s` in it, and made so many tokens. What
        drafts add to the step, all others wait for.
        """
        load = self.load
        own_s = total_s - num_tokens * self.plain_s()
        others_s = (load - 1.0) * max(0.0, step_s - self.steps.seconds(load, load)) / max(1, self.num_drafting)
        return (own_s + others_s) / load


class SlotPlan:
    """One request's part, for one drafter: asked before each round, told after it. `leave` when it is over."""

    def __init__(self, planner: TargetPlanner, source: DraftSource, kind: object) -> None:
        """kind: of sampling, for which acceptance is alike."""
        self.source = source
        self._planner = planner
        self._pair = source.acceptance(kind)
        self._own = SlotAcceptance(self._pair)
        self._planned = 0
        self._num_tried = self._num_verified = 0
        """Rounds of its trial, and of these those that were verified."""
        self._num_seen = 0
        self._is_slow = False
        self._tokens = self._own.tokens()
        source.num_slots += 1
        sums = source.sum_tokens
        for k, tokens in enumerate(self._tokens):
            sums[k] += tokens

    def choose(self, room: int, num_behind: int, num_left: Callable[[], float]) -> Choice:
        """Of the next round. room: draft tokens that it may have, at least 1; num_behind: committed tokens that the
        drafter has not seen; num_left: tokens that the answer is expected to have still.
        """
        choice = self._choose(room, num_behind, num_left)
        self._set_planned(choice.num_draft_tokens)
        return choice

    def skip(self) -> None:
        """The round is plain whatever would pay: its last proposal is still on its way, or there is no room for one."""
        self._set_planned(0)

    def takes_too_long(self) -> bool:
        """A trial has ended, and found a proposal of one token to take longer than a plain round. Says so once."""
        found, self._is_slow = self._is_slow, False
        return found

    def trial_ended(self, pays: bool) -> None:
        token_s, latency_s = self.source.times(1)
        self._is_slow = not pays and not self.source.own and token_s + latency_s > self._planner.plain_s()

    def verified(
        self, num_drafted: int, num_accepted: int, wait_s: float, step_s: float, total_s: float, fed_prompts: bool
    ) -> None:
        """A round with drafts took `total_s`, `wait_s` of it waiting, and a step of `step_s`; fed_prompts: in which
        prompts were fed, too.
        """
        planner, source = self._planner, self.source
        if not fed_prompts:
            self._came(num_accepted + 1, total_s, step_s)
        self._pair.observe(num_drafted, num_accepted)
        self._own.observe(num_drafted, num_accepted)
        self._num_seen += 1
        if self._num_seen <= TRIAL_VERIFIED or not self._num_seen % PLAN_ROUNDS:
            self._refresh()
        if planner.is_new_step and not fed_prompts:
            self._learn(num_drafted, wait_s, total_s)
        if planner.tries(self):
            self._num_verified += 1
            source.is_known = source.is_known or self._num_verified >= TRIAL_VERIFIED
            if self._num_verified >= TRIAL_VERIFIED or self._is_hopeless():
                planner.end_trial(self)

    def plain(self, total_s: float, step_s: float, fed_prompts: bool, wait_s: float = 0.0) -> None:
        """A round without drafts took `total_s`, a step of `step_s` in it; wait_s: waiting for drafts in vain."""
        planner = self._planner
        self._own.plain()
        if wait_s and not self.source.is_on:
            planner.spend(wait_s / planner.load)
        if fed_prompts:
            return
        if self.source.is_on:
            self._came(1, total_s, step_s)
        elif not wait_s:
            planner.note_plain(total_s)

    def leave(self) -> None:
        self._set_planned(0)
        self._planner.cut_trial(self)
        sums = self.source.sum_tokens
        for k, tokens in enumerate(self._tokens):
            sums[k] -= tokens
        self.source.num_slots -= 1

    def _learn(self, num_drafted: int, wait_s: float, total_s: float) -> None:
        """What a round with drafts takes."""
        planner, source = self._planner, self.source
        if not source.own:
            level = source.level(source.num_drafting)
            level.latency_s.observe(max(0.0, wait_s - level.token_s.value * num_drafted))
        if source.num_drafting >= source.num_slots:
            load = planner.load
            step_of_all_s = planner.steps.seconds(load, load + planner.num_planned_tokens)
            plain_extra_s = planner.plain_s() - planner.steps.seconds(load, load)
            source.level(source.num_slots).extra_s.observe(total_s - wait_s - step_of_all_s - plain_extra_s)

    def _came(self, num_tokens: int, total_s: float, step_s: float) -> None:
        """A round while drafts were on, or of a trial."""
        planner, source = self._planner, self.source
        plain_s = planner.plain_s()
        level = source.level(source.num_slots)
        if source.is_on and plain_s:
            most_s = OUTLIER * max(planner.plan(source).cycle_s, plain_s)
            level.came(num_tokens, min(total_s, most_s) / plain_s, source.num_slots)
        if not (source.is_on and level.is_proven):
            planner.spend(planner.lost_s(total_s, num_tokens, step_s))

    def _is_hopeless(self) -> bool:
        """Proposals take so long that they would not pay even if to verify them took no time."""
        plain_s, (token_s, latency_s) = self._planner.plain_s(), self.source.times(1)
        rounds = ((self._tokens[k], plain_s + latency_s + k * token_s) for k in CANDIDATES)
        return all(num_tokens * plain_s < HOPELESS * round_s for num_tokens, round_s in rounds)

    def _choose(self, room: int, num_behind: int, num_left: Callable[[], float]) -> Choice:
        planner, source = self._planner, self.source
        if planner.wants_plain():
            return PLAIN
        if planner.tries(self):
            self._num_tried += 1
            if self._num_tried <= TRIAL_ROUNDS:
                return self._waiting(planner.plan(source), min(TRIAL_TOKENS, room), num_behind)
            planner.end_trial(self)
        plan = planner.plan(source)
        if not plan.num_draft_tokens:
            if not planner.may_try(source) or num_left() < TRIAL_LEFT:
                return PLAIN
            planner.begin_trial(self)
            self._pair.fade()
            self._num_tried, self._num_verified = 1, 0
            return self._waiting(plan, min(TRIAL_TOKENS, room), num_behind)
        k = min(room, plan.num_draft_tokens if source.num_slots == 1 else self._best(plan))
        if not k or (num_behind > FEW_FED and not self._is_long_enough(plan, k, num_behind, num_left())):
            return PLAIN
        return self._waiting(plan, k, num_behind)

    def _is_long_enough(self, plan: Plan, k: int, num_behind: int, num_left: float) -> bool:
        """What drafts will save is more than it takes the drafter to catch up."""
        saved_s = num_left * (self._planner.plain_s() - plan.cycle_s / self._tokens[k])
        return num_left >= SHORT_LEFT and saved_s > self.source.feed_s.value * num_behind

    def _best(self, plan: Plan) -> int:
        """K by the marginal rule: tokens are drafted as far as their chance to be kept is worth their time."""
        load, rate, tokens = self._planner.load, plan.rate, self._tokens
        best, best_gain = 1, -inf
        for k in range(1, MAX_PLANNED + 1):
            gain = tokens[k] - rate * (plan.costs_s[k] + k * plan.token_s / load)
            if gain > best_gain:
                best, best_gain = k, gain
        cost_s = plan.costs_s[best] + (plan.latency_s + best * plan.token_s) / load
        return best if tokens[best] - 1.0 > LEAST_GAIN * rate * cost_s else 0

    def _waiting(self, plan: Plan, k: int, num_behind: int) -> Choice:
        """How long its proposal is worth waiting for; one that takes longer is not waited for at all, and is there in
        time for a later round.
        """
        planner, source = self._planner, self.source
        if source.own:
            return Choice(k, 0.0)
        token_s, latency_s = (plan.token_s, plan.latency_s) if plan.num_draft_tokens else source.times(1)
        takes_s = latency_s + token_s * k + source.feed_s.value * max(0, num_behind - k - 1)
        load, plain_s = planner.load, planner.plain_s()
        worth_s = (self._tokens[k] - 1.0) * plain_s - load * plan.costs_s[k]
        if not source.is_on:  # what it loses is counted
            worth_s = max(worth_s, min(load * planner.budget_s, MOST_STEPS_WAITED * plain_s))
        is_unknown = num_behind > FEW_FED and not source.feed_s.num_seen
        return Choice(k, 0.0 if is_unknown or takes_s > worth_s else worth_s)

    def _set_planned(self, num_tokens: int) -> None:
        self.source.num_planned_tokens += num_tokens - self._planned
        self.source.num_drafting += (num_tokens > 0) - (self._planned > 0)
        self._planned = num_tokens
        if num_tokens:
            self._planner.note_drafted()

    def _refresh(self) -> None:
        sums, before = self.source.sum_tokens, self._tokens
        self._tokens = self._own.tokens()
        for k, tokens in enumerate(self._tokens):
            sums[k] += tokens - before[k]
