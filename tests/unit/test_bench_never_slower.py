"""What the benchmark of K that adapts tells of its passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common import Report
from benchmarks.never_slower import AUTO, LEAST_RATIO, OFF, Cell, add_cells
from benchmarks.passes import Sample
from outrider.client import Round, RoundTimings


def sample(tokens_per_s: float, num_drafted: int) -> Sample:
    timings = RoundTimings(0.0, 0.0, 0.0, 0.0, 0.0)
    rounds = [Round("r", 0, (), "", each, 0, timings) for each in (num_drafted, 0)]
    return Sample([[1] * 100], rounds, 100 / tokens_per_s)


def cell(off: list[float], auto: list[float], num_drafted: int) -> Cell:
    made = Cell(LEAST_RATIO)
    made.samples[OFF] += [sample(rate, 0) for rate in off]
    made.samples[AUTO] += [sample(rate, num_drafted) for rate in auto]
    return made


def test_a_ratio_is_that_of_two_passes_of_one_repetition() -> None:
    """The machine was twice as fast in the second."""
    made = cell([50.0, 100.0, 50.0], [60.0, 110.0, 65.0], num_drafted=4)
    assert made.ratio.median == pytest.approx(1.2)
    assert made.ratio.low == pytest.approx(1.1) and made.ratio.high == pytest.approx(1.3)
    assert made.drafted_per_round == 2.0


@pytest.mark.parametrize(
    ("auto", "is_settled"), [([49.0, 52.0], True), ([47.0, 48.0], True), ([47.0, 52.0], False)], ids=str
)
def test_a_cell_is_settled_once_its_interval_is_on_one_side_of_what_is_wanted(
    auto: list[float], is_settled: bool
) -> None:
    assert cell([50.0, 50.0], auto, 0).is_settled is is_settled


def test_a_cell_below_the_least_ratio_is_a_violation_by_name(tmp_path: Path) -> None:
    report = Report("never-slower", "K that adapts")
    cells = {1: cell([50.0], [60.0], 4), 64: cell([100.0], [100.0 * LEAST_RATIO - 1], 0)}
    (wrong,) = add_cells(report, {"poor": cells}, {1: 80.0})
    assert wrong.startswith("poor draft, 64 at once: 0.960")
    report.write(tmp_path)
    (text,) = [path.read_text() for path in tmp_path.glob("*.md")]
    assert "| 1 | 1 | 50.0 | 60.0 | 1.200 (1.200-1.200) | 2.00 | 80.0 | 0.75 |" in text
    assert "| 64 | 1 | 100.0 | 96.0 | 0.960 (0.960-0.960) | 0.00 |  |  |" in text
