"""The recipes in docs/recipes: one form, commands that `outrider up` takes, memory that follows from the shapes."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import up
from outrider.cli.main import app
from outrider.wire.processes import StopRequested

REPO = Path(__file__).parents[2]
FOLDER = REPO / "docs/recipes"
RECIPES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
HEADINGS = ["Command", "Memory", "Expected acceptance", "K", "When not to", "Ran here"]
COMMAND = re.compile(r"^    ((?:OUTRIDER_\w+=\S+ )*outrider up\b.*)$", re.MULTILINE)
ROW = re.compile(
    r"^\| .* \| (?P<parameters>[\d,]+) \| (?P<weights>[\d.]+) (?P<unit>[GM])B \| "
    r"(?:(?P<layers>\d+), (?P<heads>\d+), (?P<size>\d+)|-) \| (?:(?P<kv>[\d,]+) B|-) \|$",
    re.MULTILINE,
)
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def section(recipe: Path, heading: str) -> str:
    return recipe.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0].strip("\n")


@each_recipe
def test_it_has_the_fixed_headings_and_is_listed(recipe: Path) -> None:
    assert re.findall(r"^## (.*)$", recipe.read_text(), re.MULTILINE) == HEADINGS
    assert all(section(recipe, heading) for heading in HEADINGS)
    assert f"]({recipe.name})" in (FOLDER / "README.md").read_text()
    assert f"docs/recipes/{recipe.name}" in (REPO / "mkdocs.yml").read_text()


@each_recipe
def test_it_says_whether_it_ran_here(recipe: Path) -> None:
    ran = section(recipe, "Ran here")
    listed = next(line for line in (FOLDER / "README.md").read_text().splitlines() if f"]({recipe.name})" in line)
    assert ran.startswith(("Yes, ", "Not run here")) and listed.endswith("| yes |") == ran.startswith("Yes")


@each_recipe
def test_outrider_up_takes_its_commands(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []

    def supervisor(settings: Any, *_: Any, **__: Any) -> Any:
        taken.append(settings)
        raise StopRequested

    monkeypatch.setattr(up, "Supervisor", supervisor)
    monkeypatch.setattr(up.StopFlag, "install", lambda self: None)
    commands = COMMAND.findall(section(recipe, "Command").replace("\\\n", " "))
    assert commands
    for command in commands:
        words = shlex.split(command)
        start = words.index("outrider")
        variables = dict(word.split("=", 1) for word in words[:start])
        result = CliRunner(env=variables).invoke(app, [os.path.expanduser(word) for word in words[start + 1 :]])
        assert result.exit_code == 0, f"{command}\n{result.output}"
        workers = {pool.role: pool.worker for pool in taken[-1].pools}
        for name, value in variables.items():
            _, role, setting = name.lower().split("_", 2)
            assert str(getattr(workers[role], setting)) == value, command
    assert len(taken) == len(commands)


@each_recipe
def test_its_memory_follows_from_the_shapes(recipe: Path) -> None:
    memory = section(recipe, "Memory")
    rows = list(ROW.finditer(memory))
    assert rows and len(rows) == len(re.findall(r"^\|", memory, re.MULTILINE)) - 2, "a row is not in the form"
    for row in rows:
        nbytes, unit = 2 * number(row["parameters"]), {"G": 1e9, "M": 1e6}[row["unit"]]
        digits = len(row["weights"].partition(".")[2])
        assert f"{nbytes / unit:.{digits}f}" == row["weights"], row[0]
        assert (row["kv"] is None) == (row["layers"] is None), row[0]
        if row["kv"] is not None:
            assert number(row["kv"]) == 4 * int(row["layers"]) * int(row["heads"]) * int(row["size"]), row[0]
