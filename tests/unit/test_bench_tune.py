"""What the benchmark of `outrider tune` calls wrong."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.common import Report
from benchmarks.tune import FAR_OFF, NEAR, add_study, speedups, violations


def ratio(median: float) -> dict[str, float]:
    return {"median": median, "low": median - 0.1, "high": median + 0.1}


def study(met: float = 1.0, chosen: float = 2.0) -> dict[str, Any]:
    """Chains of 0 and 1, `ngram` the fastest of all, and what is recommended."""
    return {
        "temperature": 1.0,
        "unsteady": None,
        "alpha": 0.6,
        "c": 0.02,
        "speeds": [
            {
                "k": k,
                "paper_speedup": 1.5,
                "expected_speedup": 1.4,
                "speedup": ratio(1.0 + 0.5 * k),
                "tokens_per_s": 30.0,
                "measured_over_expected": met if k else 1.0,
                "in_tokens_per_s": 0.9 * met if k else 0.9,
            }
            for k in (0, 1)
        ],
        "alternatives": [
            {"name": name, "tokens_per_pass": 1.5, "speedup": ratio(speedup)}
            for name, speedup in (("plain", 1.0), ("ngram", 2.0))
        ],
        "recommendation": {"name": "one of them", "speedup": ratio(chosen), "reason": "It is fast."},
    }


@pytest.mark.parametrize("met", [1 - FAR_OFF + 0.01, 1.0, 1 + FAR_OFF - 0.01])
@pytest.mark.parametrize("chosen", [2.0 * NEAR + 0.01, 2.0])
def test_near_enough_is_well(met: float, chosen: float) -> None:
    assert violations(study(met, chosen)) == []


@pytest.mark.parametrize("met", [1 - FAR_OFF - 0.01, 1 + FAR_OFF + 0.01, float("nan")])
def test_a_speed_that_was_not_foreseen_is_a_violation(met: float) -> None:
    (found,) = violations(study(met=met))
    assert found.startswith("T = 1: K = 1 is ")


def test_a_machine_that_changed_its_speed_is_a_violation() -> None:
    assert violations(study() | {"unsteady": "Plain decoding was twice as fast later."}) == [
        "T = 1: Plain decoding was twice as fast later."
    ]


def test_a_recommendation_that_something_else_outruns_is_a_violation() -> None:
    (found,) = violations(study(chosen=2.0 * NEAR - 0.01))
    assert "one of them is recommended, 1.89 times plain decoding, and ngram is 2.00 times" in found


def test_all_that_was_measured_is_told() -> None:
    report = Report("x", "X", _machine={})
    add_study(report, study(met=1.1))
    assert speedups(study()) == {"K = 0, every K": 1.0, "K = 1, every K": 1.5, "plain": 1.0, "ngram": 2.0}
    assert (
        "Measured over expected is 1.10 to 1.10; in tokens per second instead of speeds over plain decoding 0.90 to "
        "0.99. Recommended: one of them. It is fast."
    ) in report._parts[-1]
