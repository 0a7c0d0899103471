"""Shell completion: what a shell is told, and a real bash under a pseudo-terminal, with TAB pressed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from tests.forked import REPO, clean_environment
from tests.terminal import terminal

HEAVY = {"torch", "transformers", "ray", "numpy", "cryptography", "matplotlib", "llguidance", "fastapi"}
"""Libraries that a completion has no use for, those of extras among them: the command runs without."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With the command `outrider` of this checkout, and a home that has nothing to say."""
    command = tmp_path / "bin" / "outrider"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom outrider.cli.__main__ import main\nmain()\n")
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return {**clean_environment(), "PATH": path, "PYTHONPATH": str(REPO), "HOME": str(tmp_path), "PS1": "> "}


def test_a_completion_and_the_command_itself_import_nothing_heavy() -> None:
    code = "import sys, outrider.cli.main; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert HEAVY.isdisjoint(run.stdout.split())


@pytest.mark.slow
def test_tab_completes_what_the_command_says_and_folders_by_itself(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    bash = ("bash", "--norc", "--noprofile", "-i")
    with terminal(*bash, env=environment, columns=120, cwd=str(tmp_path)) as shown:
        shown.press('eval "$(outrider --show-completion)"; echo re""ady\n')
        shown.wait_for("ready\n")
        for typed, completed in (
            ("outrider up --draft look", "outrider up --draft lookup "),
            ("outrider doctor --target mod", "outrider doctor --target models/"),
        ):
            shown.press(f"{typed}\t")
            shown.wait_for(f"> {completed}".rstrip())
            shown.press("\x15")  # which clears the line
        assert b"Traceback" not in shown.output


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("doc", "doctor"),
        ("up --drafte", "--drafter"),
        ("up --drafter unig", "unigram"),
    ],
)
def test_commands_options_and_their_values_are_completed(typed: str, completed: str) -> None:
    """What the shell is told, as it asks."""
    words = f"outrider {typed}"
    asked = {"_OUTRIDER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    assert CliRunner().invoke(app, prog_name="outrider", env=asked).stdout.split() == [completed]
