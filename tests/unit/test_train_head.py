"""`outrider train-head`: what it refuses, a whole training of a tiny head, and one that is stopped and goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.train_head import _split, stopped
from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.families import EAGLE3, family_of
from outrider.lab.models.alpha import tokenizer_of
from outrider.training.chats import prompt_ids
from outrider.training.estimate import Sizes
from outrider.training.task import Task
from outrider.training.train_head import train
from outrider.wire.errors import ConfigError
from outrider.wire.processes.processes import StopFlag, StopRequested
from tests.tiny_models import tiny_llama


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


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("eagle", [], "KIND is 'eagle', must be one of eagle3, medusa, pass, draft"),
        ("eagle3", ["--target", "no/such/folder"], "'no/such/folder', and there is no such folder"),
        ("eagle3", ["--start", "nobody/draft"], "--start is 'nobody/draft', and there is no such folder"),
        ("eagle3", ["--loss", "mse"], "--loss is 'mse', must be one of kl, lk"),
        ("eagle3", ["--taps", "1,x"], "--taps is '1,x', must be whole numbers"),
        ("eagle3", ["--updates", "0"], "--updates is 0, must be at least 1"),
        ("eagle3", ["--temperature", "-1"], "temperature"),
        ("eagle3", ["--seconds", "0"], "--seconds is 0.0, must be above 0"),
        ("eagle3", ["--prompts", "missing.txt"], "cannot read prompts from missing.txt"),
        ("draft", [], "name it with --start"),
        ("medusa", ["--taps", "1"], "--taps says nothing to medusa"),
        ("pass", ["--start", "x"], "there is no such folder"),
    ],
)
def test_an_error_is_one_line(kind: str, more: list[str], message: str, folder: Path, tmp_path: Path) -> None:
    made = command(folder, tmp_path / "out", kind, *more)
    assert made.exit_code == 1, made.output
    assert made.stderr.startswith("error: ") and message in made.stderr and made.stderr.count("\n") == 1


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
    assert family_of(Checkpoint(str(tmp_path / "head"))) is EAGLE3
    assert "training: 3 of 3, loss " in made.stderr and "MiB of memory at most" in made.stderr


def task(folder: Path, out: Path) -> Task:
    return Task(
        kind="medusa",
        target=str(folder / "target"),
        out=str(out),
        work=str(out.parent / "work"),
        prompts=[f"the {i}" for i in range(12)],
        held_apart=["a b", "c d"],
        temperatures=[0.0, 1.0],
        start=None,
        loss="lk",
        depth=2,
        taps=None,
        draft_vocab=None,
        updates=4,
        batch_size=4,
        max_tokens=8,
        seed=0,
        seconds=None,
    )


def test_a_stopped_training_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.training.run.TELL_EVERY_S", 0.0)
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


def test_prompts_to_measure_on_are_some_of_mine_where_no_others_are_named() -> None:
    texts = [f"text {i}" for i in range(20)]
    trained_on, apart = _split(texts, None)
    assert apart == ["text 0", "text 8", "text 16"] and sorted([*trained_on, *apart]) == sorted(texts)
    with pytest.raises(ConfigError, match="--prompts has 1 prompts; two are the least"):
        _split(texts[:1], None)


def test_a_stop_promises_to_go_on_only_where_something_was_written(tmp_path: Path) -> None:
    assert "before anything was written" in stopped(tmp_path)
    (tmp_path / "text-1").mkdir()
    (tmp_path / "text-1" / "00000.npz").touch()
    assert "goes on from here" in stopped(tmp_path)


def test_a_chat_models_prompts_go_through_its_template(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "chats", hidden_size=8, num_layers=1)
    folder, raw = str(tmp_path / "chats"), prompt_ids(str(tmp_path / "chats"), ["hello"], is_raw=True)
    assert prompt_ids(folder, ["hello"], is_raw=False) == raw, "it has none"
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    (tmp_path / "chats" / "chat_template.jinja").write_text(template)
    tokenizer = tokenizer_of(folder)
    assert [tokenizer.decode(ids) for ids in prompt_ids(folder, ["hello"], is_raw=False)] == ["<user>hello<a>"]
    (long,) = prompt_ids(folder, ["hello " * 300], is_raw=False)
    text = tokenizer.decode(long)
    assert text.startswith("<user>") and text.endswith("hello <a>")
    assert prompt_ids(folder, ["hello"], is_raw=True) == raw
    (tmp_path / "chats" / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    with pytest.raises(ConfigError, match="takes no user's message alone: no system; --raw trains"):
        prompt_ids(folder, ["hello"], is_raw=False)


def test_an_estimate_counts_what_is_written_trained_and_held() -> None:
    sizes = Sizes(1_000_000, 100_000, 500, 64, 200, 56, 10, 8, 3)
    assert sizes.written_flops == 2e6 * 64 * 256
    assert sizes.trained_flops == 10 * 8 * 256 * (2e6 + 6e5 * 3)
    assert sizes.memory_bytes == 4 * (1_000_000 + 400_000 + 3 * 8 * 200 * 500)
    assert sizes.disk_bytes == 4 * (64 * 256 + 400_000)
