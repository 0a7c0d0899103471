"""What cannot be served at start is said in one line: a draft that does not fit, a target that is away, a file."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import REPO, clean_environment, run
from tests.tiny_models import tiny_llama


def test_a_target_that_is_not_there_is_named() -> None:
    at_once = "@gateway.workers.worker_pools.START_TIMEOUT_S=1"
    made = run("gateway", "--port", "0", "--grpc-port", "0", "--log-level", "error", "--target", "127.0.0.1:9", at_once)
    assert (made.returncode, made.stdout) == (1, ""), "nothing was announced"
    assert made.stderr.splitlines() == ["gateway: no target at 127.0.0.1:9 within 1 s: is it running there?"]


@pytest.mark.parametrize(
    ("module", "missing"),
    [("target_service", "config.json"), pytest.param("draft_service", "model.safetensors", marks=pytest.mark.slow)],
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
