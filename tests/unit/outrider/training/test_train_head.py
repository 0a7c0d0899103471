"""A whole training of a tiny head, one that is stopped and goes on, and what cannot be trained."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.kinds import EAGLE3, kind_of
from outrider.training.train_head import default_taps, exclude_overlaps, train
from outrider.wire.errors import ConfigError
from outrider.wire.processes.stop_flag import StopFlag, StopRequested
from tests.tiny_models import tiny_llama
from tests.unit.outrider.training.tiny_training import task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("train-head")
    tiny_llama(made / "target", seed=4, hidden_size=16, num_layers=2, context=64, sharpness=2.0)
    tiny_llama(made / "draft", seed=3, hidden_size=8, num_layers=1, context=64)
    (made / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"the {i}"}) for i in range(12)))
    (made / "apart.jsonl").write_text("\n".join(json.dumps({"prompt": f"a {i}"}) for i in range(3)))
    return made


def command(folder: Path, out: Path, kind: str, *more: str) -> Any:
    needed = {"target": folder / "target", "out": out, "work": out.parent / "work", "prompts": folder / "prompts.jsonl"}
    flags = [part for name, value in needed.items() for part in (f"--{name}", str(value))]
    return CliRunner().invoke(app, ["train-head", kind, *flags, "--held-apart", str(folder / "apart.jsonl"), *more])


@pytest.mark.slow
def test_a_head_is_trained_in_a_process_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    short = ("--updates", "3", "--batch-size", "4", "--max-tokens", "8", "--depth", "2", "--json")
    made = command(folder, tmp_path / "head", "eagle3", "--start", str(folder / "draft"), *short)
    assert made.exit_code == 0, made.stderr
    report = json.loads(made.stdout)
    assert report == json.loads((tmp_path / "head" / "training.json").read_text())
    assert report["updates_done"] == 3 and report["taps"] == [1] and 12 <= report["num_tokens"] <= 12 * 8
    rows = {(row["drafter"], row["temperature"], row["depth"]) for row in report["acceptance"]}
    assert rows == {(d, t, n) for d in ("draft", "before", "after") for t in (0.0, 0.7, 1.0) for n in (1, 2, 3)}
    assert kind_of(Checkpoint(str(tmp_path / "head"))) is EAGLE3
    assert "training: 3 of 3, loss " in made.stderr and "MiB of memory at most" in made.stderr


def test_a_stopped_training_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.training.run.REPORT_EVERY_S", 0.0)
    stop, told = StopFlag(), list[int]()

    def stops(stage: str, text: str, done: int, total: int) -> None:
        if stage == "training" and done == 2:
            stop.set()

    def tells(stage: str, text: str, done: int, total: int) -> None:
        if stage == "training":
            told.append(done)

    with pytest.raises(StopRequested):
        train(task(folder, tmp_path / "head"), stop, stops)
    assert not (tmp_path / "head").exists()
    report = train(task(folder, tmp_path / "head"), StopFlag(), tells)
    assert told == [3, 4] and report["updates_done"] == 4
    assert {row["drafter"] for row in report["acceptance"]} == {"before", "after"}  # the first as it was measured then


def test_what_cannot_be_trained_is_refused(folder: Path, tmp_path: Path) -> None:
    def fails(message: str, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            train(replace(task(folder, tmp_path / "head"), **changes), StopFlag(), lambda *told: None)

    tiny_llama(tmp_path / "other", vocab_size=330, hidden_size=8, num_layers=1)
    fails("tokenizers of .* differ", kind="draft", start=str(tmp_path / "other"))
    fails("which holds something else than an earlier training", out=str(folder))
    fails("12 prompts, of which 12 share no .* at least --batch-size, 13, are needed", batch_size=13)
    other = tmp_path / "other" / "tokenizer.json"  # the same tokens, but more logits
    other.write_bytes((folder / "target" / "tokenizer.json").read_bytes())
    fails(
        "has logits for 330 ids and the target for 320",
        kind="draft",
        start=str(tmp_path / "other"),
        out=str(tmp_path / "a"),
    )
    (tmp_path / "empty").mkdir()
    fails("has no config.json", target=str(tmp_path / "empty"))


def test_prompts_that_overlap_with_one_held_apart_are_left_out() -> None:
    apart = "x" * 20 + "the quick brown fox jumps over the lazy dog, and then it sleeps" + "y" * 20
    shares, shares_less = apart[15:65] + "z", apart[15:64] + "z"
    assert exclude_overlaps([shares, "fox", shares_less], [apart]) == ["fox", shares_less]
    assert exclude_overlaps(["short", "shorter"], ["short"]) == ["shorter"]


def test_taps_are_the_published_ones_where_there_are_layers_enough() -> None:
    assert default_taps(32) == [2, 16, 29] and default_taps(6) == [1, 3, 5]
    assert default_taps(1) == [0] and default_taps(2) == [1]
