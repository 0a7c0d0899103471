"""How fast speculation should be by Leviathan et al. 2023, with one alpha and one cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.cli.tuning.runs import Pass


def expected_tokens(alpha: float, k: int) -> float:
    """Return a round's tokens with k drafts, each kept with probability alpha (Leviathan et al. 2023, equation 1)."""
    if alpha == 1.0:
        return k + 1.0
    return (1.0 - alpha ** (k + 1)) / (1.0 - alpha)


def improvement(alpha: float, k: int, c: float) -> float:
    """Return the factor on the speed of plain decoding (Leviathan et al. 2023, Theorem 3.8).

    c: a draft token's time over a step of the target, which is taken to be as fast with k + 1 tokens as with one.
    """
    return expected_tokens(alpha, k) / (k * c + 1.0)


def best_k(alpha: float, c: float, most: int) -> int:
    """Return the k of the largest improvement, 0 to `most` (Leviathan et al. 2023, Figure 3); the smaller of equals."""
    return max(range(most + 1), key=lambda k: (improvement(alpha, k, c), -k))


@dataclass(frozen=True)
class Acceptance:
    """What became of the drafts of rounds with one K, or with several."""

    reached: tuple[int, ...]
    """By position in the proposal: rounds in which all drafts before it were kept, so that it was looked at."""
    accepted: tuple[int, ...]
    """By position: rounds in which it was kept, too."""

    @classmethod
    def of(cls, passes: Iterable[Pass], most: int) -> Acceptance:
        """Count over passes with up to `most` drafts a round."""
        reached, accepted = [0] * most, [0] * most
        for round_ in (round_ for one in passes for answer in one.answers for round_ in answer.rounds):
            for position in range(min(round_.num_accepted + 1, round_.num_drafted)):
                reached[position] += 1
                accepted[position] += position < round_.num_accepted
        return cls(tuple(reached), tuple(accepted))

    @property
    def alpha(self) -> float:
        """Return kept over looked at; 0 when nothing was drafted."""
        return sum(self.accepted) / sum(self.reached) if sum(self.reached) else 0.0

    @property
    def by_position(self) -> list[float | None]:
        """Return the same by position; None where no round came that far."""
        return [kept / seen if seen else None for kept, seen in zip(self.accepted, self.reached, strict=True)]
