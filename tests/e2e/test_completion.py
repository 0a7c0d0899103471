"""Shell completion as a person has it: a real bash under a pseudo-terminal, and TAB pressed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_tab_completes_commands_options_drafters_and_folders(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "models" / "target").mkdir(parents=True)
    bash = ("bash", "--norc", "--noprofile", "-i")
    with terminal(*bash, env=environment, columns=120, cwd=str(tmp_path)) as shown:
        shown.press('eval "$(outrider --show-completion)"; echo re""ady\n')
        shown.wait_for("ready\n")
        for typed, completed in (
            ("outrider doc", "outrider doctor "),
            ("outrider up --drafte", "outrider up --drafter "),
            ("outrider up --drafter unig", "outrider up --drafter unigram "),
            ("outrider up --draft look", "outrider up --draft lookup "),
            ("outrider doctor --target mod", "outrider doctor --target models/target/"),
        ):
            shown.press(f"{typed}\t{'tar' + chr(9) if completed.endswith('/') else ''}")
            shown.wait_for(f"> {completed}".rstrip())
            shown.press("\x15")  # which clears the line
        shown.press("outrider s\t\t")
        assert "Traceback" not in shown.wait_for("> outrider scale")


def test_a_completion_and_the_command_itself_import_nothing_heavy() -> None:
    code = "import sys, outrider.cli.main; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert HEAVY.isdisjoint(run.stdout.split())
