"""Phases of a worker's start, such as "reading weights": lines of its log, which `outrider up` shows as progress."""

from __future__ import annotations

import json
import re

from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

_IN_TEXT = re.compile(r" INFO \S+ outrider\.wire\.telemetry\.phases: (.*)$")
"""A phase in a line of a text log."""
_OF_MEMBER = re.compile(r"\[([\w.-]+)\] (.*)")
"""A phase with the name of its worker."""
_member = ""
"""Beginning of this process's phases: its name in brackets, or nothing."""


def name_member(name: str) -> None:
    """Put a name before this process's phases, for a worker whose log lines are mixed with those of others."""
    global _member
    _member = f"[{name}] "


def log_phase(text: str) -> None:
    """Log the beginning of a phase, such as "reading weights, 270 MB"."""
    log.info("%s%s", _member, text)


def phase_in(part: str, line: str) -> tuple[str, str] | None:
    """Return (worker, phase) of a log line that reports a phase; None for any other line.

    part: the process whose log it is, which is the worker where the phase names none. Reads text and JSON logs.
    """
    text = _phase_text(line)
    if text is None:
        return None
    named = _OF_MEMBER.fullmatch(text)
    if named is None:
        return part, text
    return named[1], named[2]


def _phase_text(line: str) -> str | None:
    found = _IN_TEXT.search(line)
    if found is not None:
        return found[1]
    if f'"logger": "{__name__}"' in line:
        return _message_of(line[line.index("{") :])
    return None


def _message_of(text: str) -> str | None:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, LookupError, TypeError):
        return None
