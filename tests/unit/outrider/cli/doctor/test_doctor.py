"""`outrider doctor`: each check with its trouble planted, the remedy beside it, and the sentences of the loaders."""

import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.tools import template_check
from outrider.cli.doctor import doctor
from outrider.cli.main import app
from outrider.engine import checkup
from outrider.wire.errors import ConfigError
from tests.forked import REPO
from tests.stack import DEMO_TARGET


def in_process(module: str, task: dict[str, Any], *_: Any, env: dict[str, str], **__: Any) -> Iterator[dict[str, Any]]:
    """What `events_of` does, in this process, which has torch already."""
    main = {checkup.__name__: checkup.main, template_check.__name__: template_check.main}[module]
    assert env["HF_HUB_OFFLINE"] == "1" and "PATH" in env
    before = sys.stdin, sys.stdout
    sys.stdin, sys.stdout = io.StringIO(json.dumps(task) + "\n"), io.StringIO()
    try:
        assert main() == 0
        lines = sys.stdout.getvalue().splitlines()
    finally:
        sys.stdin, sys.stdout = before
    yield from map(json.loads, lines)


@pytest.mark.parametrize(
    ("args", "code", "lines"),
    [
        ((), 0, ("ok       draft ", "ok       chat template: tool calls are ", "problems: 0, warnings: ")),
        (("--draft", "ngram"), 0, ("ok       draft ngram: needs no model", "ok       target: ")),
        (
            ("--target", DEMO_TARGET, "--draft", str(REPO / "models/translation/draft"), "--draft", "ngram"),
            1,
            ("problem  draft ", "problems: 1, warnings: ", "ok       draft ngram: "),
        ),
    ],
)
def test_the_command_prints_a_line_for_each_and_fails_where_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], code: int, lines: tuple[str, ...]
) -> None:
    monkeypatch.setattr(doctor, "run_module", in_process)
    made = CliRunner().invoke(app, ["doctor", "--port", "0", "--grpc-port", "0", *args])
    assert made.exit_code == code, made.output
    for line in (*lines, "ok       port 0: ", "ok       Python: Python 3"):
        assert any(each.startswith(line) for each in made.stdout.splitlines()), made.stdout


def test_without_the_demo_pair_the_machine_is_still_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where only the package is installed."""

    def missing(role: str) -> str:
        raise ConfigError(f"no demo {role} at /nowhere; say --{role} MODEL")

    monkeypatch.setattr(doctor, "demo_model", missing)
    made = CliRunner().invoke(app, ["doctor", "--port", "0", "--grpc-port", "0"])
    assert "cores:" in made.stdout and "warning  models: no demo target at /nowhere; say --target MODEL" in made.stdout
    assert made.stderr == ""
