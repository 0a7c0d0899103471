"""What a step costs by its number of rows, learnt from the steps themselves, and how many rows are worth it.

A row is one token that a forward is fed. A step's seconds are taken as a level that follows the machine (its clock, the
contexts) times a shape by rows that changes slowly; the shape never falls as rows are added, so that noise between
neighbours is averaged out, and a cliff stays one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_LEVEL_WEIGHT = 0.2
"""Weight of a step for the level."""
_SHAPE_WEIGHT = 0.1
"""Weight of a step for its number of rows."""
_OUTLIER = 4.0
"""Most times the expected seconds that a step counts as: the machine may have had other things to do."""
_EXACT_ROWS = 32
"""Numbers of rows that are told apart; above, those within an eighth are learnt together."""


class RowCost:
    """Seconds of a step by rows: between those tried on a straight line, beyond them as the most that were tried.
    Before the first step all take one second.
    """

    def __init__(self) -> None:
        self.reach = 1
        """Most rows that a step may be tried with: about twice as many as were tried."""
        self._level_s = 1.0
        self._shape: dict[int, float] = {}
        """By number of rows, ascending."""
        self._sizes = np.ones(1)
        """Numbers of rows that were tried, [N]."""
        self._monotone = np.ones(1)
        """The nearest shape of these that never falls, [N]."""

    def note(self, num_rows: int, seconds: float) -> None:
        """Record a step."""
        size = _size(num_rows)
        expected = float(self.seconds(num_rows))
        ratio = min(_OUTLIER, seconds / expected)
        if not self._shape:
            self._level_s = seconds
            self._add(size, 1.0)
        elif size not in self._shape:
            self._add(size, expected / self._level_s * ratio)
        else:
            self._level_s *= 1.0 + _LEVEL_WEIGHT * (ratio - 1.0)
            self._shape[size] *= 1.0 + _SHAPE_WEIGHT * (ratio - 1.0)
        self._monotone = _never_falling(self._shape.values())

    def _add(self, size: int, shape: float) -> None:
        self._shape = dict(sorted([*self._shape.items(), (size, shape)]))
        self._sizes = np.array(list(self._shape))
        self.reach = 2 * max(self._shape) + 1

    def seconds(self, num_rows: int | Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Return what steps of so many rows take: of one number, or of several, [N]."""
        return self._level_s * np.interp(num_rows, self._sizes, self._monotone)

    def least_seconds(self, num_rows: int) -> float:
        """Return the same, and for fewer rows than were tried the least that they may take: their part of the fewest.
        They are so taken for worth a trial.
        """
        return float(self.seconds(num_rows) * min(1.0, num_rows / self._sizes[0]))


def _size(num_rows: int) -> int:
    """Return the number that stands for all within an eighth of it."""
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step = 1 << (num_rows.bit_length() - 4)
    return num_rows - num_rows % step


def _never_falling(values: Iterable[float]) -> NDArray[np.float64]:
    """Return the nearest sequence that never falls (isotonic regression by pooling adjacent violators)."""
    means, counts = list[float](), list[int]()  # of neighbours that share their mean
    for value in values:
        mean, count = value, 1
        while means and means[-1] > mean:
            total = mean * count + means.pop() * counts[-1]
            count += counts.pop()
            mean = total / count
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts)
