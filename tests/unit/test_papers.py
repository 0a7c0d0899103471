"""`make papers`: the paper's formulas against its own numbers, and what is written of a stored measurement."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.papers import __main__ as command
from benchmarks.papers.measure import arm
from benchmarks.papers.published import LENIENCES, TABLE_1, TABLE_4, Speed, Theory
from benchmarks.papers.stored import Arm, Law, Measured, PairSpeeds, Study, TaskLaws
from outrider.lab.tuning.costs import Cost
from outrider.lab.tuning.theory import best_k, expected_tokens, improvement, operations
from tests.unit.outrider.lab.tuning.simulated_pair import MAX_TOKENS, one_pass, round_s, verify_s

# ---- the paper


@pytest.mark.parametrize("row", TABLE_1, ids=str)
def test_what_free_drafts_gain_and_cost_is_the_papers(row: Theory) -> None:
    assert f"{improvement(row.alpha, row.gamma, 0.0):.2f}" == f"{row.speed:.2f}"
    assert f"{operations(row.alpha, row.gamma, 0.0):.2f}" == f"{row.operations:.2f}"


@pytest.mark.parametrize("row", TABLE_4, ids=str)
def test_the_improvement_is_the_papers(row: Speed) -> None:
    """alpha has two digits there."""
    assert improvement(row.alpha, row.gamma, row.c) == pytest.approx(row.expected, abs=0.07)


def test_a_draft_that_is_always_right_gains_all_it_can() -> None:
    assert expected_tokens(1.0, 4) == 5.0 and operations(1.0, 4, 0.5) == pytest.approx(7 / 5)
    assert best_k(1.0, 0.1, 8) == 8
    assert best_k(0.3, 0.5, 8) == 0  # alpha below c: Corollary 3.9 promises nothing


# ---- what is measured


def test_an_arm_is_the_sum_of_its_answers() -> None:
    texts = [[True, True, True, False] * 6, [True] * 24]
    found = arm(3, 1.0, [one_pass(3, texts), one_pass(3, texts)], MAX_TOKENS)
    assert [len(own) for own in found.answers] == [2, 2]
    assert found.num_tokens == 2 * 48 and found.num_passes == 2 * 12 and found.num_drafted == 3 * found.num_passes
    assert found.full_round == 4.0
    assert found.decoded_per_s == pytest.approx(4 / round_s(3))  # the prompt is in the first round
    assert found.operations(0.5) == pytest.approx((1 + 3 + 1.5) / 4)
    assert found.cost.round_s == pytest.approx(round_s(3)) and found.cost.verify_s == pytest.approx(verify_s(3))
    plain = arm(0, 1.0, [one_pass(0, texts)], MAX_TOKENS)
    assert plain.full_round is None and plain.operations(0.5) == 1.0


# ---- what is written


def an_arm(gamma: int, speeds: Sequence[float], lenience: float = 1.0) -> Arm:
    """speeds: in tokens per second, of its answers of 50 tokens each. Its round waits 1 ms for drafts, verifies in
    10 + gamma ms, and takes 2 ms besides.
    """
    wait_ms, verify_ms, rest_ms = (1.0 if gamma else 0.0), 10.0 + gamma, 2.0
    round_ms = wait_ms + verify_ms + rest_ms
    cost = Cost(*(ms / 1e3 for ms in (round_ms + 60.0, round_ms, wait_ms, verify_ms, rest_ms)), plain_share=0.0)
    return Arm(
        gamma,
        lenience,
        [[(50, 50 / speed)] for speed in speeds],
        2.0 + gamma,
        40,
        40 * gamma,
        2.5 if gamma else None,
        cost,
    )


def measured() -> Measured:
    """Two tasks; drafts take 1 ms where their targets take 10."""

    def law(drafter: str, temperature: float, alpha: float) -> Law:
        return Law(drafter, temperature, alpha, 0.01, {l: 1 - (1 - alpha) * l for l in LENIENCES})

    alphas = {"unigram": 0.1, "bigram": 0.2, "tiny": 0.8}
    laws = [law(drafter, t, alpha - 0.05 * t) for t in (0.0, 1.0) for drafter, alpha in alphas.items()]
    alphas |= {"tiny": 0.5}
    other = [law(drafter, t, alpha) for t in (0.0, 1.0) for drafter, alpha in alphas.items()]
    studies = [
        Study(
            temperature,
            0.001,
            [
                an_arm(0, [10.0, 20.0]),
                an_arm(3, [20.0, 44.0]),
                an_arm(7, [15.0, 30.0]),
                *(an_arm(7, [30.0, 60.0], lenience) for lenience in LENIENCES[1:]),
            ],
        )
        for temperature in (0.0, 1.0)
    ]
    tasks = [
        TaskLaws("Python", "target", "2 files of a, 99 characters", {0.0: 96, 1.0: 90}, laws),
        TaskLaws("words", "wordy", "3 texts", {0.0: 50, 1.0: 40}, other),
    ]
    pairs = [("Python", "target", "tiny"), ("words", "wordy", "tiny")]
    return Measured(tasks, [PairSpeeds(*names, 1000, 100, studies) for names in pairs])


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[list[str]]]:
    """The folder, and the cells of every line of a table."""
    names = ("command", "date", "took", "cpu", "cores", "software", "commit")
    stored = {name: f"the {name}" for name in names} | measured().to_json()
    (tmp_path / "papers-2026-01-02.json").write_text(json.dumps(stored))
    (tmp_path / "papers-2026-01-01.json").write_text("an older one")
    monkeypatch.setattr(sys, "argv", ["papers", "--results", str(tmp_path), "--docs", str(tmp_path / "docs")])
    assert command.main() == 0
    lines = (tmp_path / "docs" / "papers.md").read_text().splitlines()
    return tmp_path / "docs", [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]


def test_a_stored_measurement_is_written_beside_the_paper(written: tuple[Path, list[list[str]]]) -> None:
    folder, rows = written
    assert ["0.9", "10", "1.60", "1.60", "6.86", "6.86"] in rows
    assert ["English to German", "T5-small (77M)", "paper", "0", "7", "0.75", "0.02", "3.2", "3.4", "", "1.06"] in rows
    own = ["Python, target", "tiny", "ours", "0", "3", "0.80", "0.100", "2.27", "2.06 (2.00-2.20)", "2.50", "0.91"]
    assert own in rows  # (1 - 0.8^4) / 0.2 / 1.3, and 100 tokens in 3.6 seconds, plain in 7.5
    assert ["words, wordy", "tiny", "ours", "1", "7", "0.50", "0.100"] in [row[:7] for row in rows]
    assert ["target, tiny", "0", "3", "2.95 → 2.50", "0.30 → 0.10", "1.00 → 1.30", "0.00 → 0.20", "2 %"] in rows
    assert ["Python, target", "tiny", "ours", "0.800±0.010", "0.750±0.010"] in rows
    assert ["tiny, Python", "ours", "1", "alpha", "0.75", "0.88", "0.93", "0.97"] in rows
    assert ["tiny, target", "ours", "1", "speed", "1.50", "3.00", "3.00", "3.00"] in rows
    text = (folder / "papers.md").read_text()
    assert "papers-2026-01-02.json" in text and "`the command`" in text
    assert "target, tiny, T = 0, gamma 3: 2.06 times plain decoding, 0.91 of what was expected, and 2.50 times" in text
    assert "Python 96 and 90; words 50 and 40" in text and "counted in 2 files of a, 99 characters." in text
    assert "unigram below bigram below models, holds everywhere" in text


def test_the_figures_are_drawn_where_the_text_shows_them(written: tuple[Path, list[list[str]]]) -> None:
    folder, _ = written
    text = (folder / "papers.md").read_text()
    for number in (2, 3, 4):
        path = f"images/papers-{number}.png"
        assert f"]({path})" in text and (folder / path).read_bytes().startswith(b"\x89PNG")


def test_without_a_measurement_it_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["papers", "--results", str(tmp_path), "--docs", str(tmp_path)])
    with pytest.raises(SystemExit, match="make bench-papers"):
        command.main()
