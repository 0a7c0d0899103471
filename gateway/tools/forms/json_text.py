"""Reads a JSON object as it is written, for the forms whose arguments are JSON."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.tools.cursor import NotACall, Steps
from gateway.tools.forms.form import CallText
from gateway.tools.json_scan import JsonScan


def read_object(call: CallText) -> Steps[None]:
    """Yield the arguments of a call as they come: a JSON object at the cursor. Raises NotACall for another text."""
    cursor = call.cursor
    if not (yield from cursor.matches("{")):
        raise NotACall
    yield from scan_object(call, cursor.at - 1, is_arguments=True)


def scan_object(call: CallText, begin: int, *, is_arguments: bool) -> Steps[None]:
    """Move the cursor behind the JSON object whose brace is at `begin`. Raises NotACall for another text.

    is_arguments: whether the object is the call's arguments, which are yielded as they come.
    """
    cursor = call.cursor
    scan = JsonScan(begin)
    sent = begin
    while True:
        scan.scan(cursor.text, None)
        end = scan.end or scan.at
        if is_arguments and end > sent:
            yield call.arguments(cursor.text[sent:end])
            sent = end
        if scan.end is not None:
            break
        if not (yield from cursor.more()):
            raise NotACall
    if parse_object(cursor.text[begin : scan.end]) is None:
        raise NotACall
    cursor.at = scan.end


def parse_object(text: str) -> dict[str, Any] | None:
    """Return the object of a JSON text, None for other texts."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return None
    if isinstance(value, dict):
        return value
    return None
