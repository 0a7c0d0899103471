"""How many tokens a round of K draft tokens makes: acceptance by position, of a pair of models and of one answer. Pure.

Leviathan et al. (2023), Theorem 3.8, takes every draft token to be kept with the same probability alpha. Here each
position has its own: the share of its tokens that were kept where all before them were.
"""

from __future__ import annotations

from collections.abc import Sequence

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
