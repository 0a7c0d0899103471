"""The comparison on a published model: what it says without the model, what it measures, and the rows of its report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.passes import Sample
from benchmarks.peers.__main__ import main
from benchmarks.peers.wire import COLUMNS, Sent, arms, drafts
from models.real.make import VARIABLE
from outrider.client import AcceptanceRule, DraftLogprobs, Round, RoundTimings
from outrider.wire.settings.system import SystemConfig


def test_without_the_model_the_command_says_how_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["peers", "--real"])
    assert main() == 3
    assert capsys.readouterr().err == f"no real model in {tmp_path}; say make real-model ({VARIABLE})\n"


def test_a_row_has_bytes_a_token_and_shares_of_rounds_with_drafts() -> None:
    drafted = Round("", 0, (), "", 4, 3, RoundTimings(0.2, 0.1, 0.08, 0.02))
    plain = Round("", 0, (), "", 0, 0, RoundTimings(9.0, 0.0, 9.0, 0.0))
    sample = Sample([[1, 2, 3, 4], [5]], [drafted, plain], 2.0)
    row = Sent(sample, {"ids": 1000.0, "topk": 0.0, "full": 7000.0}, 0).row
    assert row == ["2.5", "75 %", "ids, full", "2.00", "1.60", "200", "50 %", "40 %", "10 %", "0"]
    assert len(row) == len(COLUMNS)


def test_laws_travel_under_rejection_alone_each_way_that_there_is() -> None:
    by_rejection = [arm for arm in arms(4).values() if arm.speculation.acceptance is AcceptanceRule.REJECTION]
    assert {arm.speculation.draft_logprobs for arm in by_rejection} == set(DraftLogprobs)
    assert {arm.temperature for arm in by_rejection} == {1.0}


@pytest.mark.parametrize("has_head", [True, False])
def test_the_head_drafts_where_there_is_one_and_else_a_table(tmp_path: Path, has_head: bool) -> None:
    if has_head:
        (tmp_path / "config.json").touch()
    first, itself = drafts(tmp_path / "target", tmp_path).values()
    given = {"target": {"model": str(tmp_path / "target")}, "ray": None, "gateway": {}}
    for settings, model in ((first, tmp_path if has_head else tmp_path / "target"), (itself, tmp_path / "target")):
        pool = next(each for each in SystemConfig.read({**given, "draft": settings}).pools if each.role == "draft")
        assert pool.worker.model == str(model)
    assert ("drafter" in first) is not has_head
