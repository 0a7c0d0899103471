"""How a long measurement says what it is at."""

from __future__ import annotations

import io

from rich.console import Console

from outrider.cli.progress import telling


def test_without_a_terminal_every_step_is_a_line() -> None:
    """A log file is not silent for minutes."""
    console = Console(file=io.StringIO(), record=True)
    with telling(console, "starting") as tell:
        tell("1 of [2]")
        tell("2 of [2]")
    assert console.export_text().splitlines() == ["1 of [2]", "2 of [2]"]


def test_on_a_terminal_the_latest_is_behind_a_spinner() -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, force_interactive=True, _environ={"TERM": "xterm"})
    with telling(terminal, "starting") as tell:
        tell("half of it")
    assert "half of it" in screen.getvalue() and not screen.getvalue().endswith("half of it\n")
