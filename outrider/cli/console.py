"""Consoles of the commands: answers go to stdout, everything about them to stderr.

Texts from elsewhere, such as names of models and errors of servers, neither style nor steer the terminal.
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
"""Most characters of a table's line."""
_UNSEEN = "\ufffd"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def visible(text: str) -> str:
    """Return text that cannot steer a terminal: controls but tab and newline become control pictures of Unicode.

    Controls without a picture, and halves of surrogate pairs, which cannot be written, become U+FFFD.
    """
    return _CONTROLS.sub(_picture, text)


def _picture(match: re.Match[str]) -> str:
    if match[0] < " ":
        return chr(0x2400 + ord(match[0]))  # "\x1b": "␛"
    return _UNSEEN


class _Console(Console):
    """A console that shows brackets as text, unless a call has markup=True, and controls as pictures."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def answer_console() -> Console:
    """Return a console of the present stdout, which tests replace. Only a terminal gets colour codes."""
    return _Console(highlight=False, soft_wrap=True, markup=False)


def note_console() -> Console:
    """Return a console of the present stderr."""
    return _Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


class _WriterFile(io.TextIOBase):
    """A file for a console whose writes never block."""

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
    """Return a console of stderr for a process that serves meanwhile: lines that are not read in time are dropped, and
    a line counts them.
    """
    writer = stderr_writer(lambda num_dropped: f"{num_dropped} lines were dropped here: they were not read in time\n")
    return _Console(file=cast("IO[str]", _WriterFile(writer)), highlight=False, soft_wrap=True, markup=False)


def screen_console() -> Console:
    """Return a console of stdout that cuts lines to the terminal's width. For tables."""
    return _Console(highlight=False, markup=False)


def widen(console: Console, shown: RenderableType) -> None:
    """Make a console wide enough that it neither cuts nor wraps this."""
    everything = console.options.update(max_width=_MAX_COLUMNS)
    console.width = max(console.width, console.measure(shown, options=everything).maximum)


def print_error(message: str, console: Console | None = None) -> None:
    """Print the message as one line, on stderr unless a console is given."""
    line = visible(" ".join(message.split()))
    (console or note_console()).print(Text.assemble(("error: ", "bold red"), line))


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Turn an error of the error tree into a line and exit code 1, and Ctrl-C into exit code 130.

    Other exceptions are bugs and keep their traceback.
    """
    try:
        yield
    except OutriderError as error:
        print_error(error.message)
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
