"""Consoles of the commands: models' outputs and results go to stdout, everything else to stderr.

Texts from outside, such as model names and errors of servers, cannot style or control the terminal.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, cast

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from outrider.wire.errors import OutriderError
from outrider.wire.telemetry.log import stderr_writer
from outrider.wire.telemetry.log_writer import LogWriter

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_MAX_COLUMNS = 1000
"""Maximum number of characters in a line of a table."""
_UNSEEN = "\ufffd"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def visible(text: str) -> str:
    """Return the text with all control characters except tab and newline replaced, so that it cannot control a
    terminal.

    They are replaced by Unicode's control pictures. Control characters without a picture, and halves of surrogate
    pairs, which cannot be written, become U+FFFD.
    """
    return _CONTROLS.sub(_picture, text)


def _picture(match: re.Match[str]) -> str:
    if match[0] < " ":
        return chr(0x2400 + ord(match[0]))  # "\x1b": "␛"
    return _UNSEEN


class _Console(Console):
    """A rich console that prints brackets as they are, unless a call has markup=True, and control characters as
    pictures.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def answer_console() -> Console:
    """Return a console that writes to the present sys.stdout (tests replace it). Colour codes are printed on a terminal
    only.
    """
    return _Console(highlight=False, soft_wrap=True, markup=False)


def note_console() -> Console:
    """Return a console that writes to the present sys.stderr, for messages beside the output."""
    return _Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


class _WriterFile(io.TextIOBase):
    """A text file for a console, whose writes never block."""

    encoding = "utf-8"

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._is_terminal = sys.stderr.isatty()

    def write(self, text: str) -> int:
        if text:
            self._writer.put(text)
        return len(text)

    def isatty(self) -> bool:
        return self._is_terminal


def serving_console() -> Console:
    """Return a console that writes to stderr, for a process that also serves requests: printing never blocks it. If
    stderr is not read fast enough, lines are dropped, and a later line says how many.
    """
    writer = stderr_writer(lambda num_dropped: f"{num_dropped} lines were dropped here: they were not read in time\n")
    return _Console(file=cast("IO[str]", _WriterFile(writer)), highlight=False, soft_wrap=True, markup=False)


def screen_console() -> Console:
    """Return a console of stdout for tables. It cuts lines to the terminal's width."""
    return _Console(highlight=False, markup=False)


def widen(console: Console, shown: RenderableType) -> None:
    """Make a console so wide that it neither cuts nor wraps `shown`, but at most _MAX_COLUMNS wide."""
    everything = console.options.update(max_width=_MAX_COLUMNS)
    console.width = max(console.width, console.measure(shown, options=everything).maximum)


def print_error(message: str, console: Console | None = None) -> None:
    """Print an error message as one line. console: where to print it; None = on stderr."""
    line = visible(" ".join(message.split()))
    (console or note_console()).print(Text.assemble(("error: ", "bold red"), line))


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Context manager: if the block raises an OutriderError, print its message as one line and exit with code 1. On
    Ctrl-C exit with code 130.

    Other exceptions are bugs and keep their traceback.
    """
    try:
        yield
    except OutriderError as error:
        print_error(error.message)
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
