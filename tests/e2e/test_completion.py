"""Shell completion: what a shell is told, and a real bash under a pseudo-terminal, with TAB pressed."""

from __future__ import annotations

import subprocess
import sys

from tests.forked import REPO

HEAVY = {"torch", "transformers", "ray", "numpy", "cryptography", "matplotlib", "llguidance", "fastapi"}
"""Libraries that a completion has no use for, those of extras among them: the command runs without."""


def test_a_completion_and_the_command_itself_import_nothing_heavy() -> None:
    code = "import sys, outrider.cli.main; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert HEAVY.isdisjoint(run.stdout.split())
