"""Phases of a worker's start, such as "reading weights": lines of its log, which `outrider up` shows as progress."""

from __future__ import annotations

import json
import re

from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

_IN_TEXT = re.compile(r" INFO \S+ outrider\.wire\.telemetry\.phases: (.*)$")
"""Matches a line of a text log that reports a phase; the group is the phase."""
_OF_MEMBER = re.compile(r"\[([\w.-]+)\] (.*)")
"""Matches a phase with a worker's name before it; the groups are name and phase."""
_member = ""
"""Text before each phase of this process: the worker's name in brackets, or empty."""


def name_member(name: str) -> None:
    """Put the name of this worker before every phase (a part of its start, such as reading weights) that it logs from
    now on. The name tells workers apart whose log lines come in one stream.
    """
    global _member
    _member = f"[{name}] "


def log_phase(text: str) -> None:
    """Log that a phase begins. text: the phase, such as "reading weights, 270 MB"."""
    log.info("%s%s", _member, text)


def phase_in(process: str, line: str) -> tuple[str, str] | None:
    """Return (worker name, phase) if a log line, in text or JSON, reports that a phase of a worker's start begins. None
    = the line reports anything else.

    process: name of the process that wrote the log, which is returned as the worker's name if the line names no worker.
    """
    text = _phase_text(line)
    if text is None:
        return None
    named = _OF_MEMBER.fullmatch(text)
    if named is None:
        return process, text
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
