"""`outrider train-head`: what it says of what it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
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
