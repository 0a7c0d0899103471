"""Progress where there is no terminal: few lines, and brackets as they are."""

import io

import pytest
from rich.console import Console

from outrider.cli import progress
from outrider.cli.progress import LINE_EVERY_S, StageProgress, StartProgress, reporting


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_stage_prints_its_beginning_a_line_now_and_then_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr(progress, "time", clock)
    with StageProgress(Console(file=out, width=80)) as shown:
        shown.show("texts", "", 0, 3)
        shown.show("texts", "too soon", 1, 3)
        shown.show("steps", "loss [2]", 1, 9, " s")
        clock.now_s += LINE_EVERY_S
        shown.show("texts", "due", 2, 3)
        shown.show("texts", "", 3, 3)
    assert out.getvalue().splitlines() == [
        *("texts: 0 of 3", "steps: 1 of 9 s, loss [2]"),
        *("texts: 2 of 3, due", "texts: 3 of 3"),
    ]


def test_parts_and_messages_are_lines() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80)
    with StartProgress(console) as shown, reporting(console, "not shown") as tell:
        shown.progress("target", "loading", "[bold]m")
        shown.progress("target", "ready", "")
        tell("[red]done")
    assert out.getvalue().splitlines() == ["target: loading [bold]m", "target: ready", "[red]done"]
