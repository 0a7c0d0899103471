"""How often what comes next is a draft's guess of a rank: what priorities of draft and target are made of.

Chances go by rank alone, counted from what was committed: the draft's own confidence, even calibrated, orders guesses
no better in simulation, and under `rejection` nothing that is drawn may decide what is verified.
"""

from __future__ import annotations

MAX_RANKS = 8
"""Ranks that are told apart; later ones count as the last. Doubling it doubles the children of a node at most."""
_PRIOR = tuple(0.6 * 0.4**rank for rank in range(MAX_RANKS))
"""Chances of a pair that nobody has seen: a small model's guess comes in 50 to 70 % of cases."""
_WEIGHT = 1 / 256
"""Weight of an observation for all slots. Doubling it forgets twice as fast."""
_PRIOR_COUNT = 16
"""Observations that the chances before any count as. Doubling it drafts twice as long for a pair that does badly."""
_SLOT_WEIGHT = 1 / 16
"""Weight of an observation for its slot. Doubling it follows an answer twice as fast, and chance, too."""
_LEAST = 1e-3
"""Chance that is never fallen below, so that what turns good again is seen."""


class RankShares:
    """Chances by rank of all slots of one kind of sampling."""

    def __init__(self) -> None:
        self.shares = list(_PRIOR)
        self._num_noted = _PRIOR_COUNT

    def note(self, rank: int | None) -> None:
        """Record which child of a node came; None for none of them."""
        self._num_noted += 1
        weight = max(_WEIGHT, 1 / self._num_noted)
        for each, share in enumerate(self.shares):
            self.shares[each] = max(_LEAST, share + weight * ((each == rank) - share))


class SlotShares:
    """Chances by rank of one slot: its own for the first guess, all slots' for how the rest is shared out."""

    def __init__(self, shares: RankShares) -> None:
        self._all = shares
        self.first = shares.shares[0]
        """Chance that the first guess comes."""

    def share(self, rank: int) -> float:
        """Return the chance that the child of a rank comes after its parent."""
        if rank == 0:
            return self.first
        shares = self._all.shares
        return shares[min(rank, MAX_RANKS - 1)] * (1.0 - self.first) / max(_LEAST, 1.0 - shares[0])

    def chain_prob(self, num_tokens: int) -> float:
        """Return the acceptance probability of the last of num_tokens draft tokens of a chain."""
        return self.first**num_tokens

    def note(self, rank: int | None) -> None:
        """Record which child of a node came; None for none of them."""
        self._all.note(rank)
        first = self.first + _SLOT_WEIGHT * ((rank == 0) - self.first)
        self.first = min(1.0 - _LEAST, max(_LEAST, first))

    def forget(self) -> None:
        """Move a little towards what all slots see: nothing was tried here."""
        self.first += _SLOT_WEIGHT * _SLOT_WEIGHT * (self._all.shares[0] - self.first)
