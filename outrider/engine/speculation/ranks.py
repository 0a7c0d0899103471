"""Acceptance probabilities of draft tokens by their rank among siblings. Draft and target order draft tokens by them.

They are counted from committed tokens. A draft model's own probabilities, even calibrated ones, ordered draft tokens no
better in simulation, and under `rejection` no drawn token may influence what is verified.
"""

from __future__ import annotations

import math

MAX_RANKS = 8
"""Number of ranks that have an acceptance probability of their own. Higher ranks share the last one's."""
_PRIOR = tuple(0.6 * 0.4**rank for rank in range(MAX_RANKS))
"""Prior probability of each rank, 0.6, 0.24, 0.096 ..: the first draft token of a small model is accepted in 50 to 70 %
of cases."""
_WEIGHT = 1 / 256
"""Weight of an observation in the moving means that all slots share."""
_PRIOR_COUNT = 16
"""Number of observations for which the prior counts."""
_SLOT_WEIGHT = 1 / 16
"""Weight of an observation in the moving mean of its own slot."""
MIN_PROB = 0.01
"""Draft tokens are made only if they and their ancestors are all accepted with at least this probability. Exceptions
are the first one after the last committed token, and all of them if the request fixes their number."""
_MIN_PROB = 1e-3
"""Lower bound of a rank's probability. It is above 0 so that the rank is tried again."""


class RankAcceptance:
    """Acceptance probabilities by rank (0 = likeliest or first child), shared by all slots that sample alike."""

    def __init__(self) -> None:
        self.probs = list(_PRIOR)
        """probs[rank]: probability that the child of this rank is the accepted one."""
        self._num_noted = _PRIOR_COUNT

    def note(self, rank: int | None) -> None:
        """Record a node whose children were tested. rank: rank of the child that was committed; None if none was."""
        self._num_noted += 1
        weight = max(_WEIGHT, 1 / self._num_noted)
        for own_rank, prob in enumerate(self.probs):
            self.probs[own_rank] = max(_MIN_PROB, prob + weight * ((own_rank == rank) - prob))


class SlotAcceptance:
    """Acceptance probabilities by rank among siblings, in one slot.

    That of rank 0 is measured in the slot. The other ranks divide the rest in the proportions measured over all slots
    that sample alike.

        all slots 0.6, 0.24, 0.096 ..; the slot's rank 0 has 0.8: rank 1 has 0.24 * (1 - 0.8) / (1 - 0.6) = 0.12
    """

    def __init__(self, probs: RankAcceptance) -> None:
        """Create the probabilities of a new slot, equal to those of all slots that sample alike."""
        self._all = probs
        self.first = probs.probs[0]
        """Acceptance probability, in this slot, of the child of rank 0."""

    def prob(self, rank: int) -> float:
        """Return the probability that the child of this rank is accepted, given that its parent is."""
        if rank == 0:
            return self.first
        probs = self._all.probs
        return probs[min(rank, MAX_RANKS - 1)] * (1.0 - self.first) / max(_MIN_PROB, 1.0 - probs[0])

    def chain_prob(self, num_tokens: int) -> float:
        """Return the probability that all num_tokens draft tokens of a chain are accepted."""
        return self.first**num_tokens

    def likely_len(self, max_tokens: int) -> int:
        """Return the length, 1 to max_tokens, of the longest chain accepted with a probability of at least MIN_PROB."""
        num_likely = int(math.log(MIN_PROB) / math.log(self.first))
        return min(max_tokens, max(1, num_likely))

    def note(self, rank: int | None) -> None:
        """Record a node of the slot whose children were tested. rank: the committed child's; None if none was."""
        self._all.note(rank)
        first = self.first + _SLOT_WEIGHT * ((rank == 0) - self.first)
        self.first = min(1.0 - _MIN_PROB, max(_MIN_PROB, first))

    def forget(self) -> None:
        """Move the slot's acceptance probability of rank 0 a little towards the mean of all slots, and that mean
        towards the value with which a worker starts.

        Call it after a step that verified no draft token of the slot. Without it, a low probability would keep draft
        tokens from ever being tried again.
        """
        self._all.probs[0] += _WEIGHT * _SLOT_WEIGHT * (_PRIOR[0] - self._all.probs[0])
        self.first += _SLOT_WEIGHT * _SLOT_WEIGHT * (self._all.probs[0] - self.first)
