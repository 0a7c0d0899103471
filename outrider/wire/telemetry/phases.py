"""What a worker does while it starts, as lines of its log, which `outrider up` shows as progress."""

from __future__ import annotations

import json
import re

from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

_IN_TEXT = re.compile(r" INFO \S+ outrider\.wire\.telemetry\.phases: (.*)$")
_OF_MEMBER = re.compile(r"\[([\w.-]+)\] (.*)")
_member = ""


def name_member(name: str) -> None:
    """Have this process's phases say whose they are, where its lines come among those of others."""
    global _member
    _member = f"[{name}] "


def log_phase(text: str) -> None:
    """Log what begins now, such as "reading weights, 270 MB"."""
    log.info("%s%s", _member, text)


def phase_in(part: str, line: str) -> tuple[str, str] | None:
    """Return (worker, what it does now) of a line in the log of `part`, in either form; None for any other line."""
    found = _IN_TEXT.search(line)
    text = None if found is None else found[1]
    if found is None and f'"logger": "{__name__}"' in line:
        text = _message_of(line[line.index("{") :])
    if text is None:
        return None
    named = _OF_MEMBER.fullmatch(text)
    return (part, text) if named is None else (named[1], named[2])


def _message_of(text: str) -> str | None:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, LookupError, TypeError):
        return None
