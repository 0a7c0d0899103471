"""Shows the progress of a start or a measurement: by spinners and bars on a terminal, otherwise by plain lines."""

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

ShowMessage = Callable[[str], None]
"""Callback that shows one line of text about the progress."""


@contextmanager
def reporting(console: Console, first: str) -> Iterator[ShowMessage]:
    """Context manager: yield a function that shows a message about the progress of the block. On a terminal the message
    stands behind a spinner, at first the message `first`. Elsewhere each message is printed as a line.
    """
    if not console.is_interactive:
        yield lambda text: console.print(text, markup=False)
        return
    with console.status(Text(first)) as status:
        yield lambda text: status.update(Text(text))


LINE_EVERY_S = 10.0
"""Seconds between two progress lines of one stage, if the output is not a terminal."""
_STAGE_BAR_WIDTH = 20
"""Width of a progress bar, in characters. With stage, times and text it fits a terminal of 80 columns."""


class _Shown:
    """A rich `Progress` with the given columns, which is drawn only on a terminal. Use it as `with`."""

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
    """Shows a bar with the remaining time for each stage of a long task.

    If the output is not a terminal, it prints a line when a stage begins, then every LINE_EVERY_S, and at its end.
    """

    def __init__(self, console: Console) -> None:
        stage = TextColumn("{task.fields[stage]:<10}")
        text = TextColumn("{task.description}", markup=False)
        done = TextColumn("{task.completed:.0f}/{task.total:.0f}{task.fields[unit]}")
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        super().__init__(console, stage, BarColumn(_STAGE_BAR_WIDTH), done, *times, text)
        self._printed_s: dict[str, float] = {}

    def show(self, stage: str, text: str, done: int, total: int, unit: str = "") -> None:
        """Show that `done` of `total` units of a stage are finished. text: a note on the present work. unit: the unit
        of `done` and `total`, as text to print after them, such as " s".
        """
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
    """Shows the progress of a system's start, one line for each component. It implements `Reporter` of
    `supervisor.py`.
    """

    def __init__(self, console: Console) -> None:
        component = TextColumn("{task.fields[component]:<10}")
        text = TextColumn("{task.description}", markup=False)
        super().__init__(console, SpinnerColumn(finished_text="[green]✓[/]"), component, TimeElapsedColumn(), text)

    def progress(self, component: str, state: str, detail: str) -> None:
        """Show the state of a part of the system, such as "loading", with a detail on the state."""
        text = f"{state} {detail}".rstrip()
        if not self._console.is_terminal:
            self._console.print(f"{component}: {text}", markup=False)
            return
        if component not in self._tasks:
            self._tasks[component] = self._progress.add_task(text, total=1, component=component)
        self._progress.update(self._tasks[component], description=text, completed=1 if state == "ready" else 0)
