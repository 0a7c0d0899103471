"""Where the commands write: answers to stdout, everything about them to stderr.

What is written comes from elsewhere, too: names of models, errors of servers. None of it styles or steers the terminal.
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
_MOST_COLUMNS = 1000
"""Most characters that a line of a table may have."""
_UNSEEN = "\ufffd"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def visible(text: str) -> str:
    """Return text that cannot steer a terminal: controls but tab and newline show as the control pictures of Unicode.
    What has none, halves of surrogate pairs included, which cannot be written, shows as U+FFFD.
    """
    return _CONTROLS.sub(lambda match: chr(0x2400 + ord(match[0])) if match[0] < " " else _UNSEEN, text)


class _Console(Console):
    """Text in brackets is text unless a call says markup=True, and controls are visible."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def answer_console() -> Console:
    """Return stdout's console as it is now: it may be another than at import. Only a terminal gets colour codes."""
    return _Console(highlight=False, soft_wrap=True, markup=False)


def note_console() -> Console:
    return _Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


class _WriterFile(io.TextIOBase):
    """A file for a console. Its writes never wait."""

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
    """Return stderr's console for a process that serves meanwhile: what nobody reads in time is dropped, with a line
    that says how much.
    """
    writer = stderr_writer(lambda num_dropped: f"{num_dropped} lines were dropped here: they were not read in time\n")
    return _Console(file=cast("IO[str]", _WriterFile(writer)), highlight=False, soft_wrap=True, markup=False)


def screen_console() -> Console:
    """Return stdout's console for what has columns: its lines are cut to the terminal's width."""
    return _Console(highlight=False, markup=False)


def widen(console: Console, shown: RenderableType) -> None:
    """Make a console wide enough that nothing of this is cut or wrapped."""
    everything = console.options.update(max_width=_MOST_COLUMNS)
    console.width = max(console.width, console.measure(shown, options=everything).maximum)


def print_error(message: str, console: Console | None = None) -> None:
    """Print one line on stderr, or on another console, whatever the message holds."""
    line = visible(" ".join(message.split()))
    (console or note_console()).print(Text.assemble(("error: ", "bold red"), line))


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Turn the error tree into a line and exit code 1, and Ctrl-C into exit code 130. Bugs keep their traceback."""
    try:
        yield
    except OutriderError as error:
        print_error(error.message)
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
