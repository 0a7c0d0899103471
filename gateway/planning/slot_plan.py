"""K of one request's next round, by what all slots at its target decided together (`gateway.planning.planner`). Pure,
of the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from gateway.planning.draft_costs import FEW_FED, DraftSource, SlotAcceptance
from gateway.planning.planner import CANDIDATES, Plan, TargetPlanner

TRIAL_TOKENS = 3
"""K of a round that one slot makes to learn."""
TRIAL_VERIFIED = 4
"""Such rounds that are verified, at most,"""
TRIAL_ROUNDS = 8
"""and that are asked for: proposals of some may only catch up."""
HOPELESS = 0.9
"""Of the rate of plain decoding: a trial that promises less is over at once."""
TRIAL_LEFT = 12.0
"""Tokens that an answer must be expected to have left for one."""
LEAST_GAIN = 0.5
"""Of what its drafts cost, that a slot must gain while others draft: plain slots among them break their steps up."""
FIRST_SHARE = 1 / 4
"""Of those who decided: so many that begin are drafted for at once; more will be another load."""
SHORT_LEFT = 6.0
"""A draft worker begins no answer that is expected to have fewer tokens left than so many."""
MOST_STEPS_WAITED = 8.0
"""A proposal that takes longer than so many plain steps cannot pay: to learn nothing else, nobody waits for it."""
REST_ROUNDS = 4
"""Without a look at whether drafts would pay, after they were found not to."""
REFRESH_ROUNDS = 4
"""Between two looks at what its drafts are expected to bring,"""
REFRESH_PLAIN_ROUNDS = 16
"""and where it has none: what is known of its own text grows old."""
FED_ANYWAY_S = 5.0
"""If the draft has not caught up for so long, an answer that seems too short for it is given to it all the same: else
what that takes would be believed for ever.
"""
OUTLIER = 3.0
"""A round counts as at most so many times as long as was to be expected."""


class DraftChoice(NamedTuple):
    num_draft_tokens: int
    """K; 0 = a plain step."""
    wait_s: float
    """The longest wait for the proposal that pays; 0: it is verified if it is there."""


PLAIN = DraftChoice(0, 0.0)


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
        self._num_seen = self._num_plain = 0
        self._is_slow = False
        self._may_wait_s = 0.0
        """In the round under way."""
        self._tokens = self._own.tokens()
        self._is_first = self._has_joined = False
        """Its first round is under way; it is one of the source's slots, as it is one of the target's load."""
        self._rest = (0.0, 0)
        """Until when it need not ask again, and the class of the load at which it asked."""

    def choose(self, room: int, num_behind: int, num_left: Callable[[], float], is_first: bool = False) -> DraftChoice:
        """Of the next round. room: draft tokens that it may have, at least 1; num_behind: committed tokens that the
        drafter has not seen; num_left: tokens that the answer is expected to have still; is_first: the target has not
        begun the answer yet: it may be drafted for if the others are, and decides nothing.
        """
        if is_first:
            choice = self._first(room, num_behind, num_left)
        else:
            self._join()
            choice = self._choose(room, num_behind, num_left)
        self._set_planned(choice.num_draft_tokens)
        self._may_wait_s = choice.wait_s
        return choice

    @property
    def rests(self) -> bool:
        """Drafts did not pay a few rounds ago, and nothing has changed: the round is plain, there is nothing to choose.
        A gateway of many slots has better things to do.
        """
        until_s, load = self._rest
        return not self.source.is_on and load == self._planner.load_class and self._planner.now < until_s

    def expected_tokens(self, num_draft_tokens: int) -> float:
        """Of a round, its own one included."""
        return self._tokens[num_draft_tokens]

    def skip(self) -> None:
        """The round is plain whatever would pay: its last proposal is still on its way, or there is no room for one."""
        self._set_planned(0)

    def replied(self, took_s: float, compute_s: float, num_tokens: int, num_fed: int) -> None:
        """As `DraftSource.replied`."""
        self.source.replied(took_s, compute_s, num_tokens, num_fed, self._planner.now)

    def takes_too_long(self) -> bool:
        """A trial has ended, and found a proposal of one token to take longer than a plain round. Says so once."""
        found, self._is_slow = self._is_slow, False
        return found

    def trial_ended(self, pays: bool) -> None:
        token_s, latency_s = self.source.times(1)
        self._is_slow = not pays and not self.source.own and token_s + latency_s > self._planner.plain_s()

    def verified(
        self,
        num_drafted: int,
        num_accepted: int,
        wait_s: float,
        step_s: float,
        total_s: float,
        fed_prompts: bool,
        is_new_step: bool,
    ) -> None:
        """A round with drafts took `total_s`, `wait_s` of it waiting, and a step of `step_s`; fed_prompts: in which
        prompts were fed, too; is_new_step: of which no other verdict has told.
        """
        planner, source = self._planner, self.source
        if not fed_prompts:
            self._came(num_accepted + 1, total_s, step_s)
        self._pair.observe(num_drafted, num_accepted)
        self._own.observe(num_drafted, num_accepted)
        self._num_seen += 1
        if self._num_seen <= TRIAL_VERIFIED or not self._num_seen % REFRESH_ROUNDS:
            self._refresh()
        if is_new_step and not fed_prompts and not source.own:
            level = source.level(source.num_drafting)
            level.latency_s.observe(max(0.0, wait_s - level.token_s.value * num_drafted))
        if planner.tries(self):
            self._num_verified += 1
            source.is_known = source.is_known or self._num_verified >= TRIAL_VERIFIED
            if self._num_verified >= TRIAL_VERIFIED or self._is_hopeless():
                planner.end_trial(self)

    def plain(self, total_s: float, step_s: float, fed_prompts: bool, is_new_step: bool, wait_s: float = 0.0) -> None:
        """A round without drafts took `total_s`, a step of `step_s` in it; wait_s: waiting for drafts in vain."""
        planner = self._planner
        self._own.plain()
        self._num_plain += 1
        if not self._num_plain % REFRESH_PLAIN_ROUNDS:
            self._refresh()
        if wait_s and not self.source.is_on:
            planner.spend(min(wait_s, self._may_wait_s) / planner.load)
        if fed_prompts:
            return
        if self.source.is_on:
            self._came(1, total_s, step_s)
        elif not wait_s:
            planner.note_plain(total_s, is_new_step)

    def leave(self) -> None:
        self._set_planned(0)
        self._planner.cut_trial(self)
        self._set_first(False)
        if self._has_joined:
            self._has_joined = False
            self.source.num_slots -= 1
            self._add(-1.0)

    def _join(self) -> None:
        self._set_first(False)
        if not self._has_joined:
            self._has_joined = True
            self.source.num_slots += 1
            self.source.joined_s = self._planner.now
            self._add(1.0)

    def _set_first(self, is_first: bool) -> None:
        self.source.num_first += is_first - self._is_first
        self._is_first = is_first

    def _add(self, times: float) -> None:
        """To what the source's slots expect together."""
        sums = self.source.sum_tokens
        for k, tokens in enumerate(self._tokens):
            sums[k] += times * tokens

    def _came(self, num_tokens: int, total_s: float, step_s: float) -> None:
        """A round while drafts were on, or of a trial."""
        planner, source = self._planner, self.source
        plain_s = planner.plain_s()
        level = source.level(source.num_slots)
        if plain_s:
            waited_s = 0.0 if source.is_on else MOST_STEPS_WAITED * plain_s
            total_s = min(total_s, waited_s + OUTLIER * max(planner.last_plan(source).cycle_s, plain_s))
        if source.is_on and plain_s:
            level.came(num_tokens, total_s / plain_s, source.num_slots)
        if not (source.is_on and level.is_proven):
            planner.spend(planner.lost_s(source, total_s, num_tokens, step_s))

    def _is_hopeless(self) -> bool:
        """Proposals take so long that they would not pay even if to verify them took no time."""
        plain_s, (token_s, latency_s) = self._planner.plain_s(), self.source.times(1)
        rounds = ((self._tokens[k], plain_s + latency_s + k * token_s) for k in CANDIDATES)
        return all(num_tokens * plain_s < HOPELESS * round_s for num_tokens, round_s in rounds)

    def _choose(self, room: int, num_behind: int, num_left: Callable[[], float]) -> DraftChoice:
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
                return self._plain_for_a_while()
            planner.begin_trial(self)
            self._pair.fade()
            self._num_tried, self._num_verified = 1, 0
            return self._waiting(plan, min(TRIAL_TOKENS, room), num_behind)
        return self._by(plan, room, num_behind, num_left)

    def _plain_for_a_while(self) -> DraftChoice:
        self._rest = (self._planner.now + REST_ROUNDS * self._planner.plain_s(), self._planner.load_class)
        return PLAIN

    def _first(self, room: int, num_behind: int, num_left: Callable[[], float]) -> DraftChoice:
        self._set_first(True)
        source, planner = self.source, self._planner
        if not source.is_on or source.num_first > max(1, FIRST_SHARE * source.num_slots) or planner.wants_plain():
            return PLAIN
        return self._by(planner.last_plan(source), room, num_behind, num_left)

    def _by(self, plan: Plan, room: int, num_behind: int, num_left: Callable[[], float]) -> DraftChoice:
        """Its part of what all decided."""
        if not plan.num_draft_tokens:
            return PLAIN
        k = min(room, plan.num_draft_tokens if self.source.num_slots <= 1 else self._best(plan))
        if not k:
            return PLAIN
        is_begun, is_behind = self.source.own or self._num_seen > 0, num_behind > FEW_FED
        if is_behind or not is_begun:
            left = num_left()
            if left < SHORT_LEFT or (is_behind and not self._is_long_enough(plan, k, num_behind, left)):
                return PLAIN
        return self._waiting(plan, k, num_behind)

    def _is_long_enough(self, plan: Plan, k: int, num_behind: int, num_left: float) -> bool:
        """What drafts will save is more than it takes the drafter to catch up."""
        source = self.source
        saved_s = num_left * (self._planner.plain_s() - plan.cycle_s / self._tokens[k])
        if saved_s > source.feed_s.value * num_behind:
            return True
        now = self._planner.now
        if now - source.fed_s <= FED_ANYWAY_S:
            return False
        source.fed_s = now
        return True

    def _best(self, plan: Plan) -> int:
        """K by the marginal rule: tokens are drafted as far as their chance to be kept is worth their time."""
        load, rate, tokens = self._planner.load, plan.rate, self._tokens
        best, best_gain = 1, -inf
        for k in range(1, plan.most + 1):
            gain = tokens[k] - rate * (plan.costs_s[k] + k * plan.token_s / load)
            if gain > best_gain:
                best, best_gain = k, gain
        cost_s = plan.costs_s[best] + (plan.latency_s + best * plan.token_s) / load
        return best if tokens[best] - 1.0 > LEAST_GAIN * rate * cost_s else 0

    def _waiting(self, plan: Plan, k: int, num_behind: int) -> DraftChoice:
        """How long its proposal is worth waiting for; one that takes longer is not waited for at all, and is there in
        time for a later round.
        """
        planner, source = self._planner, self.source
        if source.own:
            return DraftChoice(k, 0.0)
        is_planned = plan.num_draft_tokens > 0
        token_s, latency_s = (plan.token_s, plan.latency_s) if is_planned else source.times(1)
        takes_s = latency_s + token_s * k + source.feed_s.value * max(0, num_behind - k - 1)
        load, plain_s = planner.load, planner.plain_s()
        # By a token. Among many it is worth what `_best` has it draft for.
        saved_s = load / (LEAST_GAIN * plan.rate) if is_planned and source.num_slots > 1 else plain_s
        worth_s = (self._tokens[k] - 1.0) * saved_s - load * plan.costs_s[k]
        if not source.is_on:  # what it loses is counted
            worth_s = max(worth_s, min(load * planner.budget_s, MOST_STEPS_WAITED * plain_s))
        is_unknown = num_behind > FEW_FED and not source.feed_s.num_seen
        return DraftChoice(k, 0.0 if is_unknown or takes_s > worth_s else worth_s)

    def _set_planned(self, num_tokens: int) -> None:
        self.source.num_planned_tokens += num_tokens - self._planned
        self.source.num_drafting += (num_tokens > 0) - (self._planned > 0)
        self._planned = num_tokens
        if num_tokens:
            self._planner.note_drafted()

    def _refresh(self) -> None:
        if self._has_joined:
            self._add(-1.0)
        self._tokens = self._own.tokens()
        if self._has_joined:
            self._add(1.0)
