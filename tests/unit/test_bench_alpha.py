"""What `make bench-alpha` takes for a fault."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.alpha import NEAR, Row, less, text_of, violations
from benchmarks.common import REPO
from outrider.engine.alpha import Estimate


def row(drafter: str, alpha: float, coupled: float | None = None, error: float = 0.02) -> Row:
    """By default coupled is in the middle of its bounds."""
    bound = alpha / (2 - alpha)
    middle = (alpha + bound) / 2 if coupled is None else coupled
    means = {"alpha": alpha, "coupled": middle, "bound": bound, "greedy": alpha}
    estimates = {name: Estimate(mean, error) for name, mean in means.items()}
    return Row(1.0, drafter, drafted=1.0, num_tokens=3072, **estimates)


MODEL, BIGRAM, UNIGRAM = row("model", 0.6), row("bigram", 0.18), row("unigram", 0.11)


def test_the_papers_order_is_none() -> None:
    assert violations([MODEL, BIGRAM, UNIGRAM, row("ngram", 0.4), row("lookup", 0.5)]) == []


def test_another_order_is_one_and_so_is_what_the_interval_hides() -> None:
    assert "bigram at T = 1 is not above unigram" in violations([MODEL, BIGRAM, row("unigram", 0.2)])[0]
    assert "differs by 0.020±0.028" in violations([MODEL, BIGRAM, row("unigram", 0.16)])[0]
    assert "model at T = 1 is not above bigram" in violations([row("model", 0.1), BIGRAM, UNIGRAM])[0]


def test_every_temperature_counts() -> None:
    cold = [replace(each, temperature=0.0) for each in (row("model", 0.1), BIGRAM, UNIGRAM)]
    assert [found[:14] for found in violations([MODEL, *cold, BIGRAM, UNIGRAM])] == ["model at T = 0"]


@pytest.mark.parametrize(
    ("coupled", "words"),
    [
        (0.63, "is above 1 - TV"),
        (0.39, "is below its bound"),
        (0.6 - NEAR - 0.01, "is not within"),
        (math.nan, "is below its bound"),
    ],
)
def test_coupled_is_between_its_bounds_and_near_the_upper_one(coupled: float, words: str) -> None:
    assert any(words in found for found in violations([row("model", 0.6, coupled), BIGRAM, UNIGRAM]))


def test_an_interval_s_width_is_forgiven() -> None:
    assert violations([row("model", 0.6, 0.615), BIGRAM, UNIGRAM]) == []
    assert violations([row("model", 0.18, 0.085), row("bigram", 0.1), row("unigram", 0.03)]) == []


def test_too_few_guesses_are_one() -> None:
    unknown = replace(row("lookup", 0.5), coupled=Estimate(None, None))
    assert violations([MODEL, BIGRAM, UNIGRAM, unknown]) == ["lookup at T = 1: too few guesses to tell"]
    alone = replace(MODEL, alpha=Estimate(0.6, None))
    assert "differs by 0.420" in violations([alone, BIGRAM, UNIGRAM])[0]


def test_the_interval_of_a_difference() -> None:
    found = less(Estimate(0.5, 0.03), Estimate(0.2, 0.04))
    assert found.mean == pytest.approx(0.3) and found.error == pytest.approx(0.05)


def test_a_row_is_what_the_command_says() -> None:
    values = {name: {"mean": 0.5, "error": 0.1} for name in ("alpha", "coupled", "bound", "greedy")}
    said = {"drafter": "bigram:/tmp/x", "setting": {"temperature": 0.0}, "num_tokens": 7, "drafted": {"mean": 0.25}}
    made = Row.of(values | said)
    assert (made.temperature, made.drafter, made.drafted, made.num_tokens) == (0.0, "bigram", 0.25, 7)
    assert made.bound == Estimate(0.5, 0.1)


def test_the_text_is_the_python_of_folders_in_order(tmp_path: Path) -> None:
    for name, text in (("b.py", "bee"), ("a/c.py", "sea"), ("a/d.txt", "dee")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert text_of([tmp_path, tmp_path / "a" / "d.txt"]) == ("sea\nbee\ndee", 3)
    assert text_of([REPO / "outrider"])[1] > 100
