"""A pair that does not fit is refused at start: exit code 1 and one line that names the first difference."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import REPO, clean_environment, run
from tests.stack import Process
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process("target_service", ["--model", tiny_llama(tmp_path_factory.mktemp("target"), 320)])
    yield process
    process.stop()


def start_gateway(*args: str) -> tuple[int, list[str]]:
    """(exit code, lines on stderr that are no log)."""
    made = run("gateway", "--port", "0", "--grpc-port", "0", "--log-level", "error", *args)
    assert made.stdout == ""  # nothing was announced
    return made.returncode, made.stderr.splitlines()


def refusal(target: Process, draft_folder: Path) -> str:
    """What the gateway says of this draft, in one line; its exit code is 1."""
    draft = Process("draft_service", ["--model", str(draft_folder)])
    try:
        code, lines = start_gateway("--target", target.address, "--draft", draft.address)
    finally:
        draft.stop()
    assert code == 1
    assert len(lines) == 1, lines
    return lines[0]


def test_a_target_that_is_not_there_is_named() -> None:
    code, lines = start_gateway("--target", "127.0.0.1:9", "@gateway.workers.pools.START_TIMEOUT_S=1")
    assert code == 1
    assert lines == ["gateway: no target at 127.0.0.1:9 within 1 s: is it running there?"]


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("target_service", "config.json"),
        pytest.param("draft_service", "model.safetensors", marks=pytest.mark.slow),
    ],
)
def test_a_missing_model_file_is_one_line(tmp_path: Path, module: str, missing: str) -> None:
    """The command as a user starts it: what it imports has nothing to say either."""
    folder = tmp_path / "model"
    tiny_llama(folder, 320)
    (folder / missing).unlink()
    made = subprocess.run(
        [sys.executable, "-m", module, "--model", str(folder), "--log-level", "error"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=REPO,
        env=clean_environment(),
        check=False,
    )
    lines = made.stderr.splitlines()
    assert made.returncode == 1
    assert made.stdout == ""
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"{module.partition('_')[0]}: ")
    assert str(folder) in lines[0]
    assert missing in lines[0]
