"""Where the commands write: answers to stdout, everything about them to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from outrider.wire.errors import OutriderError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_MOST_COLUMNS = 1000
"""Most characters that a line of a table may have."""


def answer_console() -> Console:
    """Return stdout's console as it is now: it may be another than at import. Only a terminal gets colour codes."""
    return Console(highlight=False, soft_wrap=True)


def note_console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def widen(console: Console, shown: RenderableType) -> None:
    """Make a console wide enough that nothing of this is cut or wrapped."""
    everything = console.options.update(max_width=_MOST_COLUMNS)
    console.width = max(console.width, console.measure(shown, options=everything).maximum)


def print_error(message: str) -> None:
    """Print one line on stderr, whatever the message holds."""
    line = " ".join(message.split())
    note_console().print(Text.assemble(("error: ", "bold red"), line))


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
