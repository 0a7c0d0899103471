"""What a step costs by its number of rows, learnt from the steps themselves, and how many rows are worth it.

A row is one token that a forward is fed. A step's seconds are taken as a level that follows the machine (its clock, the
contexts) times a shape by rows that changes slowly; the shape never falls as rows are added, so that noise between
neighbours is averaged out, and a cliff stays one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

_LEVEL_WEIGHT = 0.2
"""Weight of a step for the level."""
_SHAPE_WEIGHT = 0.1
"""Weight of a step for its number of rows."""
_OUTLIER = 4.0
"""Most times the expected seconds that a step counts as: the machine may have had other things to do. Doubling it
doubles what one disturbed step adds."""
_EXACT_ROWS = 32
"""Numbers of rows that are told apart; above, those within an eighth are taken together."""


class RowCost:
    """Seconds of a step by rows: between those tried on a straight line, beyond them as the most that were tried, up to
    twice as many rows, which are worth a trial.
    """

    def __init__(self) -> None:
        self._level_s = 0.0
        self._shape: dict[int, float] = {}
        self._sizes: list[int] = []
        self._monotone: list[float] = []

    def note(self, num_rows: int, seconds: float) -> None:
        """Record a step."""
        size = _size(num_rows)
        expected = self.seconds(num_rows)
        if expected is None:
            self._level_s, self._shape[size] = seconds, 1.0
        else:
            ratio = min(_OUTLIER, seconds / expected)
            if size not in self._shape:
                self._shape[size] = expected / self._level_s * ratio
            else:
                self._level_s *= 1.0 + _LEVEL_WEIGHT * (ratio - 1.0)
                self._shape[size] *= 1.0 + _SHAPE_WEIGHT * (ratio - 1.0)
        self._sizes = sorted(self._shape)
        self._monotone = _never_falling([self._shape[each] for each in self._sizes])

    def seconds(self, num_rows: int) -> float | None:
        """Return what a step of so many rows takes; None before the first."""
        if not self._sizes:
            return None
        size = _size(num_rows)
        above = bisect_right(self._sizes, size)
        if above == 0 or above == len(self._sizes):
            return self._level_s * self._monotone[max(0, above - 1)]
        low, high = self._sizes[above - 1], self._sizes[above]
        low_s, high_s = self._monotone[above - 1], self._monotone[above]
        return self._level_s * (low_s + (high_s - low_s) * (size - low) / (high - low))

    def least_seconds(self, num_rows: int) -> float | None:
        """Return the same, and for fewer rows than were tried the least that they may take: their part of the fewest.
        They are so taken for worth a trial.
        """
        seconds = self.seconds(num_rows)
        return None if seconds is None else seconds * min(1.0, num_rows / self._sizes[0])

    @property
    def reach(self) -> int:
        """Return the most rows that a step may be tried with."""
        return 2 * self._sizes[-1] + 1 if self._sizes else 1


def best_count(gains: Sequence[float], base_gain: float, base_rows: int, cost: RowCost) -> int:
    """Return how many further rows make the most tokens a second.

    gains: the chance of each further row's token to be kept, best first. base_gain, base_rows: tokens and rows of the
    step without them.
    """
    best, total = 0, base_gain
    gains = gains[: max(0, cost.reach - base_rows)]
    at_best = base_gain / (cost.seconds(max(1, base_rows)) or 1.0)
    for count, gain in enumerate(gains, start=1):
        total += gain
        rate = total / (cost.seconds(base_rows + count) or 1.0)
        if rate > at_best:
            best, at_best = count, rate
    return best


def _size(num_rows: int) -> int:
    """Return the number that stands for all within an eighth of it."""
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step = 1 << (num_rows.bit_length() - 4)
    return num_rows - num_rows % step


def _never_falling(values: Sequence[float]) -> list[float]:
    """Return the nearest sequence that never falls (isotonic regression by pooling adjacent violators)."""
    pools = list[tuple[float, int]]()  # sum and number of neighbours that share their mean
    for value in values:
        total, num = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / num:
            total_before, num_before = pools.pop()
            total += total_before
            num += num_before
        pools.append((total, num))
    means = list[float]()
    for total, num in pools:
        means += [total / num] * num
    return means
