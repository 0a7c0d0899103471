"""Pearson's chi-square test of counted answers against a law, and its power against another law. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from scipy import stats

from tests.law.expected import Answer, Law

MIN_EXPECTED = 5.0
"""What the chi-square approximation asks of a bin."""
IMPOSSIBLE = 1e-12
"""Cells below this must stay empty: float64 rounding of the expected law is far smaller, a real cell far larger."""

Window = Callable[[Answer], Answer]


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


def p_value(counts: Counter[Answer], cells: Law) -> float:
    """Probability that counts of a sample of `cells` are at least this far off. 0 when an impossible cell occurred.

    A law that leaves one bin has nothing to test beyond the impossible cells: 1.
    """
    num_answers = counts.total()
    if any(cells.get(cell, 0.0) < IMPOSSIBLE for cell in counts):
        return 0.0
    groups = bins(cells, num_answers)
    if len(groups) == 1:
        return 1.0
    expected = [sum(cells[cell] for cell in group) * num_answers for group in groups]
    observed = [sum(counts[cell] for cell in group) for group in groups]
    scale = num_answers / sum(expected)  # the expected law sums to 1 up to rounding
    statistic = sum((o - e * scale) ** 2 / (e * scale) for o, e in zip(observed, expected, strict=True))
    return float(stats.chi2.sf(statistic, len(groups) - 1))


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
