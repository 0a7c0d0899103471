"""The seconds of a step by its number of rows, estimated from the steps themselves. Used by the budgets of both
workers.

The estimate is the product of a level and a shape. The level follows the machine (its clock, the length of contexts)
quickly. The shape, a function of the number of rows, changes slowly and never falls as rows are added, so that noise
between neighbours is averaged out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_LEVEL_WEIGHT = 0.2
"""Weight of a step in the moving mean of the level."""
_SHAPE_WEIGHT = 0.1
"""Weight of a step in the moving mean of the shape at its number of rows."""
_OUTLIER = 4.0
"""Maximum multiple of the expected seconds with which a step counts, since another process may have disturbed it."""
_EXACT_ROWS = 32
"""Number of rows up to which each number has its own mean. Above it, numbers that differ by less than an eighth share
one."""


class RowCost:
    """Estimate of the seconds that a step takes, by its number of rows.

    It is interpolated between the numbers of rows that steps have had so far, and constant beyond these. Before the
    first step it is 1 second for any number.
    """

    def __init__(self) -> None:
        self.reach = 1
        """Maximum number of rows that a worker should give to its next step: about twice the largest number that a step
        has had so far, since the time of larger steps is unknown."""
        self._level_s = 1.0
        self._shape: dict[int, float] = {}
        """Moving mean of seconds divided by the level, by number of rows, ascending."""
        self._sizes = np.ones(1)
        """Numbers of rows that were tried, [N]."""
        self._monotone = np.ones(1)
        """Values of `_shape`, replaced by the nearest sequence that never falls, [N]."""

    def note(self, num_rows: int, seconds: float) -> None:
        """Record a step of num_rows rows that took `seconds`."""
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
        """Return the expected seconds of a step of num_rows rows: shape [] for one number, [N] for N numbers."""
        return self._level_s * np.interp(num_rows, self._sizes, self._monotone)

    def min_seconds(self, num_rows: int) -> float:
        """Return the expected seconds of a step of num_rows rows. If all steps so far had more rows, the time of the
        smallest one is scaled down in proportion. The result is then too low rather than too high, so that such steps
        are tried.

            32 rows were tried, in 8 ms, and no fewer: 8 rows may take 2 ms
        """
        return float(self.seconds(num_rows) * min(1.0, num_rows / self._sizes[0]))


def _size(num_rows: int) -> int:
    # 33 -> 32, 43 -> 40, 100 -> 96: above 32 the number that stands for those within an eighth of it
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step = 1 << (num_rows.bit_length() - 4)
    return num_rows - num_rows % step


def _never_falling(values: Iterable[float]) -> NDArray[np.float64]:
    # Isotonic regression by pooling adjacent violators: [1, 3, 2, 4] -> [1, 2.5, 2.5, 4].
    means = list[float]()  # of neighbours that share their mean
    counts = list[int]()
    for value in values:
        mean = value
        count = 1
        while means and means[-1] > mean:
            total = mean * count + means.pop() * counts[-1]
            count += counts.pop()
            mean = total / count
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts)
