"""Acceptance probabilities of draft tokens by their rank among their siblings, for the priorities of draft and target.

They are counted from committed tokens: the draft's own confidence, even calibrated, ordered draft tokens no better in
simulation, and under `rejection` nothing that is drawn may decide what is verified.
"""

from __future__ import annotations

import math

MAX_RANKS = 8
"""Ranks that have probabilities of their own; later ones count as the last."""
_PRIOR = tuple(0.6 * 0.4**rank for rank in range(MAX_RANKS))
"""Probabilities before any observation: a small model's first draft token is accepted in 50 to 70 % of cases."""
_WEIGHT = 1 / 256
"""Weight of an observation for all slots."""
_PRIOR_COUNT = 16
"""Observations that the prior counts as."""
_SLOT_WEIGHT = 1 / 16
"""Weight of an observation for its slot."""
LEAST_CHANCE = 0.01
"""Acceptance probability below which draft tokens are not made, unless a request names them."""
_LEAST = 1e-3
"""Least probability, so that ranks are tried again."""


class RankShares:
    """Probabilities by rank of all slots of one kind of sampling."""

    def __init__(self) -> None:
        self.shares = list(_PRIOR)
        self._num_noted = _PRIOR_COUNT

    def note(self, rank: int | None) -> None:
        """Record the rank of the child of a node that was committed; None for none of them."""
        self._num_noted += 1
        weight = max(_WEIGHT, 1 / self._num_noted)
        for each, share in enumerate(self.shares):
            self.shares[each] = max(_LEAST, share + weight * ((each == rank) - share))


class SlotShares:
    """Probabilities by rank of one slot: its own for the first rank, those of all slots for how the rest is divided."""

    def __init__(self, shares: RankShares) -> None:
        self._all = shares
        self.first = shares.shares[0]
        """Acceptance probability of a first child."""

    def share(self, rank: int) -> float:
        """Return the probability that the child of a rank is accepted after its parent."""
        if rank == 0:
            return self.first
        shares = self._all.shares
        return shares[min(rank, MAX_RANKS - 1)] * (1.0 - self.first) / max(_LEAST, 1.0 - shares[0])

    def chain_prob(self, num_tokens: int) -> float:
        """Return the acceptance probability of the last of num_tokens draft tokens of a chain."""
        return self.first**num_tokens

    def likely_len(self, max_tokens: int) -> int:
        """Return how many tokens of a chain of max_tokens reach LEAST_CHANCE, 1 at least."""
        num_likely = int(math.log(LEAST_CHANCE) / math.log(self.first))
        return min(max_tokens, max(1, num_likely))

    def note(self, rank: int | None) -> None:
        """Record the rank of the child of a node that was committed; None for none of them."""
        self._all.note(rank)
        first = self.first + _SLOT_WEIGHT * ((rank == 0) - self.first)
        self.first = min(1.0 - _LEAST, max(_LEAST, first))

    def forget(self) -> None:
        """Move a little towards the probabilities of all slots, and these towards the prior: nothing was verified here.
        What is not verified for its low probability would never be tried again.
        """
        self._all.shares[0] += _WEIGHT * _SLOT_WEIGHT * (_PRIOR[0] - self._all.shares[0])
        self.first += _SLOT_WEIGHT * _SLOT_WEIGHT * (self._all.shares[0] - self.first)
