"""Commands typed to a scripted gateway."""

import sys

from typer.testing import CliRunner

from outrider.cli.main import app

RUN = [sys.executable, "-c", "from outrider.cli.main import main; main()"]


def outrider(*args: str, stdin: str | None = None, colour: bool = False):
    env = {"FORCE_COLOR": "1" if colour else None, "NO_COLOR": None, "TERM": "xterm-256color", "COLUMNS": "80"}
    return CliRunner(env=env).invoke(app, list(args), input=stdin)
