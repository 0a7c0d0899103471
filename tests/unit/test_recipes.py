"""docs/recipes.md: every command is one that `outrider up` takes, and the page says of each pair whether it ran."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.up import up
from outrider.wire.processes.processes import StopRequested

PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
COMMAND = re.compile(r"^    ((?:OUTRIDER_\w+=\S+ )*outrider up\b.*)$", re.MULTILINE)


def test_outrider_up_takes_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []

    def supervisor(settings: Any, *_: Any, **__: Any) -> Any:
        taken.append(settings)
        raise StopRequested

    monkeypatch.setattr(up, "Supervisor", supervisor)
    monkeypatch.setattr(up.StopFlag, "install", lambda self: None)
    commands = COMMAND.findall(PAGE.replace("\\\n", " "))
    assert len(commands) == 15
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


def test_every_pair_says_whether_it_ran() -> None:
    rows = re.findall(r"^\| .* \| .* \| .* \| (.*) \|$", PAGE, re.MULTILINE)[1:]
    assert set(rows) == {"no", "on a CPU"} and rows.count("no") == 10
