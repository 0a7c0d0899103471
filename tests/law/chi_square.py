"""Pearson's chi-square test of counted answers against a law, and its power against another law. Pure."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from scipy import stats

from tests.law.expected import Answer, Law

MIN_EXPECTED = 5.0
"""What the chi-square approximation asks of a bin."""
IMPOSSIBLE = 1e-12
"""Cells below this must stay empty: float64 rounding of the expected law is far smaller, a real cell far larger."""

Window = Callable[[Answer], Answer]


@dataclass(frozen=True)
class Fit:
    """How far counts are from a law."""

    statistic: float
    """Pearson's; infinite when an impossible cell occurred."""
    degrees: int
    """Of freedom. 0 where the law leaves one bin: there is nothing to test beyond the impossible cells."""
    p_value: float
    """Probability that counts of a sample of the law are at least this far off."""


def first_three(answer: Answer) -> Answer:
    return answer[:3]


def last_three(answer: Answer) -> Answer:
    return answer[-3:]


def seen_through(law: Law, window: Window) -> Law:
    """Law of a part of the answer."""
    cells: Law = {}
    for answer, probability in law.items():
        cell = window(answer)
        cells[cell] = cells.get(cell, 0.0) + probability
    return cells


def bins(cells: Law, num_answers: int) -> list[list[Answer]]:
    """Cells joined, rarest first, until each bin expects MIN_EXPECTED. Depends on the law alone, never on counts.

    Rare cells join rare cells, so that a fault that favours rare answers is not drowned in a common one.
    """
    found: list[list[Answer]] = [[]]
    mass = 0.0
    possible = [cell for cell in cells if cells[cell] >= IMPOSSIBLE]
    for cell in sorted(possible, key=lambda c: (cells[c], c)):
        if mass * num_answers >= MIN_EXPECTED:
            found.append([])
            mass = 0.0
        found[-1].append(cell)
        mass += cells[cell]
    if len(found) > 1 and mass * num_answers < MIN_EXPECTED:
        found[-2].extend(found.pop())
    return found


def fit(counts: Counter[Answer], cells: Law) -> Fit:
    """Of counts to the law that they should have."""
    num_answers = counts.total()
    groups = bins(cells, num_answers)
    degrees = len(groups) - 1
    if any(cells.get(cell, 0.0) < IMPOSSIBLE for cell in counts):
        return Fit(math.inf, degrees, 0.0)
    if not degrees:
        return Fit(0.0, degrees, 1.0)
    expected = [sum(cells[cell] for cell in group) * num_answers for group in groups]
    observed = [sum(counts[cell] for cell in group) for group in groups]
    scale = num_answers / sum(expected)  # the expected law sums to 1 up to rounding
    statistic = sum((o - e * scale) ** 2 / (e * scale) for o, e in zip(observed, expected, strict=True))
    return Fit(statistic, degrees, float(stats.chi2.sf(statistic, degrees)))


def p_value(counts: Counter[Answer], cells: Law) -> float:
    """0 when an impossible cell occurred, 1 for a law that leaves one bin."""
    return fit(counts, cells).p_value


def power(actual: Law, assumed: Law, num_answers: int, p_below: float) -> float:
    """Probability that `num_answers` answers of law `actual`, tested against `assumed`, give a p-value < p_below.

    From the noncentral chi-square law, noncentrality N sum (actual - assumed)^2 / assumed over the bins.
    """
    groups = bins(assumed, num_answers)
    lost = 0.0
    for group in groups:
        expected = sum(assumed[cell] for cell in group)
        lost += (sum(actual.get(cell, 0.0) for cell in group) - expected) ** 2 / expected
    threshold = stats.chi2.isf(p_below, len(groups) - 1)
    return float(stats.ncx2.sf(threshold, len(groups) - 1, num_answers * lost))
