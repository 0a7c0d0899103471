"""Shell completion: what a shell is told, and a real bash under a pseudo-terminal, with TAB pressed."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from tests.forked import REPO

HEAVY = {"torch", "transformers", "ray", "numpy", "cryptography", "matplotlib", "llguidance", "fastapi"}
"""Libraries that a completion has no use for, those of extras among them: the command runs without."""


def test_a_completion_and_the_command_itself_import_nothing_heavy() -> None:
    code = "import sys, outrider.cli.main; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert HEAVY.isdisjoint(run.stdout.split())


@pytest.mark.parametrize(
    ("typed", "completed"), [("doc", "doctor"), ("up --drafte", "--drafter"), ("up --drafter unig", "unigram")]
)
def test_commands_options_and_their_values_are_completed(typed: str, completed: str) -> None:
    """What the shell is told, as it asks."""
    words = f"outrider {typed}"
    asked = {"_OUTRIDER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    assert CliRunner().invoke(app, prog_name="outrider", env=asked).stdout.split() == [completed]
