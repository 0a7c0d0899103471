"""Shows the progress of a start or of a measurement: with spinners and bars on a terminal, else in plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Tell = Callable[[str], None]
"""Called with a line of progress."""


@contextmanager
def reporting(console: Console, first: str) -> Iterator[Tell]:
    """Yield a function that shows a message: behind a spinner, at first with `first`, or as a line off a terminal."""
    if not console.is_interactive:
        yield lambda text: console.print(text, markup=False)
        return
    with console.status(Text(first)) as status:
        yield lambda text: status.update(Text(text))


LINE_EVERY_S = 10.0
"""Seconds between two lines of a stage off a terminal."""
_STAGE_BAR_WIDTH = 20
"""Columns of a bar: beside stage, times and text it fits a terminal of 80."""


class _Shown:
    """A `Progress` of rich with these columns, drawn on a terminal alone. Use as `with`."""

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()


class StageProgress(_Shown):
    """Shows a bar for each stage of long work, with the remaining time.

    Off a terminal it prints a line when a stage begins, every LINE_EVERY_S, and when it is through.
    """

    def __init__(self, console: Console) -> None:
        stage, text = TextColumn("{task.fields[stage]:<10}"), TextColumn("{task.description}", markup=False)
        done = TextColumn("{task.completed:.0f}/{task.total:.0f}{task.fields[unit]}")
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        super().__init__(console, stage, BarColumn(_STAGE_BAR_WIDTH), done, *times, text)
        self._printed_s: dict[str, float] = {}

    def tell(self, stage: str, text: str, done: int, total: int, unit: str = "") -> None:
        """Show that `done` of `total` of a stage is through, with a text. unit: what both count, such as " s"."""
        if not self._console.is_terminal:
            now_s = time.monotonic()
            if done >= total or now_s - self._printed_s.get(stage, -LINE_EVERY_S) >= LINE_EVERY_S:
                line = ", ".join(filter(None, (f"{stage}: {done} of {total}{unit}", text)))
                self._console.print(line, markup=False)
                self._printed_s[stage] = now_s
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(text, total=total, stage=stage, unit=unit)
        self._progress.update(self._tasks[stage], description=text, completed=done, total=total)


class StartProgress(_Shown):
    """Shows the progress of a system's start, a line for each part: a `Reporter` of `supervisor.py`."""

    def __init__(self, console: Console) -> None:
        part, text = TextColumn("{task.fields[part]:<10}"), TextColumn("{task.description}", markup=False)
        super().__init__(console, SpinnerColumn(finished_text="[green]✓[/]"), part, TimeElapsedColumn(), text)

    def progress(self, part: str, state: str, detail: str) -> None:
        """Show the state of a part, such as "loading", and a detail."""
        text = f"{state} {detail}".rstrip()
        if not self._console.is_terminal:
            self._console.print(f"{part}: {text}", markup=False)
            return
        if part not in self._tasks:
            self._tasks[part] = self._progress.add_task(text, total=1, part=part)
        self._progress.update(self._tasks[part], description=text, completed=1 if state == "ready" else 0)
