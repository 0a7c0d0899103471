"""What is known of one drafter at one target: what its proposals take and bring by load, how many are kept. Pure.

How many tokens a round of K draft tokens makes: acceptance by position, of a pair of models and of one answer. Pure.

Leviathan et al. (2023), Theorem 3.8, takes every draft token to be kept with the same probability alpha. Here each
position has its own: the share of its tokens that were kept where all before them were.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from gateway.planning.step_model import FORGET_S, Typical

MAX_PLANNED = 16
"""Draft tokens that a planned round has at most."""
FIRST_GUESS = 0.6
"""Of a pair that nothing is known of."""
GUESS_WEIGHT = 2.0
"""Of that guess, in tokens."""
NEIGHBOUR_WEIGHT = 4.0
"""Of the position before, for one of which little is known."""
PAIR_MEMORY = 1 - 1 / 256
"""What a token's weight becomes with each later one at its position."""
FADED = 8.0
"""Weight of the past, in tokens, where it is looked at again."""
SLOT_MEMORY = 1 - 1 / 24
PLAIN_MEMORY = 1 - 1 / 64
"""And with each round of the slot without drafts: its text goes on and becomes another."""
PAIR_WEIGHT = 6.0
"""Of the pair's rate in a slot's own, in tokens."""


class PairAcceptance:
    """Running rates of all slots of a pair, under one kind of sampling."""

    def __init__(self, like: PairAcceptance | None = None) -> None:
        """like: what to begin from; it counts for little."""
        self._tried = [0.0] * MAX_PLANNED
        self._kept = [0.0] * MAX_PLANNED
        self._guess = FIRST_GUESS if like is None else like.rates()[0]
        self._rates: list[float] | None = None
        self.num_rounds = 0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """A verify of so many draft tokens kept the first `num_accepted`."""
        self.num_rounds += 1
        self._rates = None
        _count(self._tried, self._kept, num_drafted, num_accepted, PAIR_MEMORY)

    def fade(self) -> None:
        """It is looked at again after a while: what comes now counts for more than what was."""
        most = max(self._tried)
        if most > FADED:
            self._tried = [tried * FADED / most for tried in self._tried]
            self._kept = [kept * FADED / most for kept in self._kept]
            self._rates = None

    def rates(self) -> Sequence[float]:
        """[MAX_PLANNED]: probability that a position's token is kept if all before it were."""
        if self._rates is None:
            rates, guess, weight = [], self._guess, GUESS_WEIGHT
            for tried, kept in zip(self._tried, self._kept, strict=True):
                guess = (kept + weight * guess) / (tried + weight)
                weight = NEIGHBOUR_WEIGHT
                rates.append(guess)
            self._rates = rates
        return self._rates


class SlotAcceptance:
    """Of one answer: the pair's, until it has shown what its own text does."""

    def __init__(self, pair: PairAcceptance) -> None:
        self._pair = pair
        self._tried = [0.0] * MAX_PLANNED
        self._kept = [0.0] * MAX_PLANNED
        self._trust = 1.0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        if self._trust < 1.0:
            self._tried = [self._trust * tried for tried in self._tried]
            self._kept = [self._trust * kept for kept in self._kept]
            self._trust = 1.0
        _count(self._tried, self._kept, num_drafted, num_accepted, SLOT_MEMORY)

    def plain(self) -> None:
        """A round had no drafts."""
        self._trust *= PLAIN_MEMORY

    def tokens(self) -> list[float]:
        """[MAX_PLANNED + 1]: expected tokens of a round with K draft tokens, its own one included."""
        expected, survival, trust = 1.0, 1.0, self._trust
        tokens = [expected]
        for rate, tried, kept in zip(self._pair.rates(), self._tried, self._kept, strict=True):
            survival *= (trust * kept + PAIR_WEIGHT * rate) / (trust * tried + PAIR_WEIGHT)
            expected += survival
            tokens.append(expected)
        return tokens


def _count(tried: list[float], kept: list[float], num_drafted: int, num_accepted: int, memory: float) -> None:
    for position in range(min(num_drafted, num_accepted + 1, MAX_PLANNED)):
        tried[position] = memory * tried[position] + 1.0
        kept[position] = memory * kept[position] + (position < num_accepted)


NUM_LEVELS = 12
FEW_FED = MAX_PLANNED + 2
"""A proposal that fed no more tokens than these says what drafting takes; one that fed more, what catching up takes."""
FIRST_PAUSE_S = 8.0
LONGEST_PAUSE_S = 300.0
"""Between two trials of what did not pay, each twice as long as the one before."""
FIRST_ROUNDS = 2
"""Of each slot, that do not count: they are still mixed with plain ones."""
JUDGED_ROUNDS = 10
"""Of each slot, before a load is judged by what came of it; before that only by what can be no accident, unless it has
failed there before."""
MEMORY_ROUNDS = 64
"""Of each slot, that the judgement looks back on; of all together at least four times as many."""
ROUND_SPREAD = 0.5
"""Of the tokens of a round, over their mean: by as much over the square root of the rounds a judgement may be wrong."""
LEAST_WON = 1.02
"""Times the tokens of plain rounds, that must be possible within that doubt."""


def level_of(load: float) -> int:
    """0 for 1 slot, 1 for 2, 2 for 3 to 5, 3 for 6 to 11, 12 to 23 and so on: one slot more or less than a power of two
    is no other load.
    """
    return min((max(1, int(load)) * 4 // 3).bit_length(), NUM_LEVELS) - 1


class Pause:
    """Between two trials."""

    __slots__ = ("from_s", "pause_s")

    def __init__(self) -> None:
        self.pause_s = FIRST_PAUSE_S
        self.from_s = 0.0
        """When the next one may be."""

    @property
    def is_new(self) -> bool:
        """Nothing has failed."""
        return self.pause_s == FIRST_PAUSE_S

    def failed(self, now: float) -> None:
        self.from_s = now + self.pause_s
        self.pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s)

    def reset(self) -> None:
        self.pause_s, self.from_s = FIRST_PAUSE_S, 0.0


class Level:
    """Of a load: so many slots that may draft at once, about a power of two."""

    def __init__(self) -> None:
        self.token_s = Typical()
        """Of the draft, for a token of a proposal."""
        self.latency_s = Typical()
        """That the target waits for a proposal besides."""
        self.seen_s = 0.0
        """When a proposal was timed last."""
        self.pause = Pause()
        self.trials = Pause()
        """Of one slot, while so many slots are at the target, drafting or not."""
        self._tokens = self._plain_tokens = 0.0
        """Made while drafts were on, and what plain rounds would have made in that time."""
        self._num_rounds = 0.0
        self._num_first = 0
        self.is_proven = False

    def begin(self) -> None:
        """Drafts go on or off."""
        self._tokens = self._plain_tokens = self._num_rounds = 0.0
        self._num_first = 0

    def came(self, num_tokens: int, plain_tokens: float, num_slots: int) -> None:
        """Of a round while drafts are on, with drafts or without."""
        self._num_first += 1
        if self._num_first <= FIRST_ROUNDS * num_slots:
            return
        memory = 1.0 - 1.0 / (MEMORY_ROUNDS * max(4, num_slots))
        self._tokens = memory * self._tokens + num_tokens
        self._plain_tokens = memory * self._plain_tokens + plain_tokens
        self._num_rounds = memory * self._num_rounds + 1.0

    def has_failed(self, num_slots: int, now: float) -> bool:
        """Judges what came of drafts: whether they did not pay here; then they are to be off for a while."""
        num_rounds = self._num_rounds
        if num_rounds < JUDGED_ROUNDS:
            return False
        is_judged = num_rounds >= JUDGED_ROUNDS * num_slots
        doubt = (1.0 if is_judged or not self.pause.is_new else 2.5) * ROUND_SPREAD / sqrt(num_rounds)
        has_failed = self._tokens < min(1.0, LEAST_WON - doubt) * self._plain_tokens
        self.is_proven = is_judged and self._tokens >= self._plain_tokens
        if has_failed:
            self.pause.failed(now)
        elif self.is_proven:
            self.pause.reset()
        return has_failed


class DraftSource:
    """A draft worker in one of its lives, or a drafter in the target itself, which nobody waits for."""

    def __init__(self, name: str, epoch: int = 0, own: bool = False) -> None:
        self.name = name
        self.epoch = epoch
        self.own = own
        self.levels = [Level() for _ in range(NUM_LEVELS)]
        self.feed_s = Typical()
        """Of the draft, for a token that it catches up by."""
        self.is_known = False
        """Proposals of it were verified."""
        self.is_on = False
        """All its slots may draft; else at most one does, to learn."""
        self.num_slots = 0
        """That may be given drafts by it."""
        self.num_first = 0
        """That will be such slots, and are in their first rounds."""
        self.joined_s = self.wanted_s = 0.0
        """When the last one became one, and since when drafts are to begin; 0: they are not."""
        self.fed_s = 0.0
        """When it caught up last."""
        self.num_drafting = 0
        """Whose last round had some."""
        self.num_planned_tokens = 0
        """Of their last rounds together."""
        self.sum_tokens = [0.0] * (MAX_PLANNED + 1)
        """Expected tokens of a round by K, summed over its slots."""
        self._kinds: dict[object, PairAcceptance] = {}

    def acceptance(self, kind: object) -> PairAcceptance:
        """kind: of sampling; there are few."""
        if kind not in self._kinds:
            like = max(self._kinds.values(), key=lambda pair: pair.num_rounds, default=None)
            self._kinds[kind] = PairAcceptance(like)
        return self._kinds[kind]

    def level(self, num_slots: float) -> Level:
        return self.levels[level_of(num_slots)]

    def may_be_tried(self, load: float, now: float) -> bool:
        """By one slot, while so many are at the target. What did not pay at a load seldom does at a larger one."""
        return all(level.trials.from_s <= now for level in self.levels[: level_of(load) + 1])

    def tried(self, load: float, now: float, pays: bool) -> None:
        """A trial at that load has ended."""
        if not pays:
            self.level(load).trials.failed(now)
            return
        for level in self.levels:
            level.trials.reset()

    def times(self, num_slots: int) -> tuple[float, float]:
        """(token_s, latency_s) while so many draft: of the nearest load known, a smaller one first; 0 while none is.
        What was seen long before the rest is not believed any more.
        """
        at = level_of(num_slots)
        least_s = max(level.seen_s for level in self.levels) - FORGET_S
        for nearest in (*range(at, -1, -1), *range(at + 1, NUM_LEVELS)):
            level = self.levels[nearest]
            if level.token_s.num_seen and level.seen_s >= least_s:
                return level.token_s.value, level.latency_s.value
        return 0.0, 0.0

    def is_timed(self, num_slots: int) -> bool:
        """What the draft takes is known while so many draft, or at least half of them."""
        levels = self.levels[level_of((num_slots + 1) // 2) : level_of(num_slots) + 1]
        return any(level.token_s.num_seen >= num_slots for level in levels)

    def replied(self, took_s: float, compute_s: float, num_tokens: int, num_fed: int, now: float) -> None:
        """A proposal was made, whether anybody waited for it or not.

        took_s: from the gateway's request to the reply; compute_s: of this the draft's own work, queue and all.
        """
        level = self.level(self.num_drafting)
        if not num_tokens:
            return
        if num_fed > FEW_FED:
            self.fed_s = now
            drafting_s = level.token_s.value * num_tokens
            self.feed_s.observe(max(0.0, compute_s - drafting_s) / num_fed)
            return
        if now - level.seen_s > FORGET_S:
            level.token_s, level.latency_s = Typical(), Typical()
        level.seen_s = now
        level.token_s.observe(compute_s / num_tokens)
        level.latency_s.observe(max(0.0, took_s - compute_s))
