"""The code of the round before this one, to be run beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import REPO, WORK, earlier_checkout


@dataclass(frozen=True)
class Checkout:
    """A tree of Outrider and what runs it."""

    tree: Path
    python: str
    note: str
    """For the report: which environment it has."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its processes: its own modules come first, and no setting of ours reaches them."""
        bare = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
        return bare | {"PYTHONPATH": str(self.tree)}

    def check(self) -> None:
        """Fail where another tree's code would run."""
        command = [self.python, "-c", "import outrider; print(outrider.__file__)"]
        made = subprocess.run(command, cwd="/", env=self.environment, check=True, stdout=subprocess.PIPE, text=True)
        if not Path(made.stdout.strip()).is_relative_to(self.tree):
            sys.exit(f"the code of {self.tree} was to run, and {made.stdout.strip()} is what is imported")


def this_checkout() -> Checkout:
    return Checkout(REPO, sys.executable, "this one")


def checkout_of(commit: str) -> Checkout:
    """Return a worktree of an earlier commit, made when it is missing.

    It runs in this environment where it asks for the same packages, else in one of its own.
    """
    tree = WORK / f"before-{commit}"
    if not tree.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), commit], cwd=REPO, check=True)
    if _packages(tree) == _packages(REPO):
        return Checkout(tree, sys.executable, "in this environment, for it asks for the same packages")
    own = earlier_checkout(commit)
    return Checkout(own, str(own / ".venv/bin/python"), "in an environment of its own")


def _packages(tree: Path) -> tuple[Any, ...]:
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    constraints = (tree / "constraints.txt").read_text()
    return project["dependencies"], project["optional-dependencies"], project["requires-python"], constraints
