"""Reads a JSON object as it is written, for the forms whose arguments are JSON."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.tools.cursor import NotACall, Parsing
from gateway.tools.forms.form import CallText
from gateway.tools.json_scan import JsonScan


def read_object(call: CallText) -> Parsing[None]:
    """Generator, for `yield from`: read the JSON object at the cursor, and yield it as the call's arguments in pieces.

    Raises NotACall if the text is not a JSON object.
    """
    cursor = call.cursor
    if not (yield from cursor.matches("{")):
        raise NotACall
    yield from scan_object(call, cursor.at - 1, is_arguments=True)


def scan_object(call: CallText, begin: int, *, is_arguments: bool) -> Parsing[None]:
    """Generator, for `yield from`: move the cursor behind the JSON object whose `{` is at index `begin` of the text.

    `is_arguments`: whether to yield the object in pieces as the call's arguments. Raises NotACall if the text is not a
    JSON object.
    """
    cursor = call.cursor
    scan = JsonScan(begin)
    sent = begin
    while True:
        scan.scan(cursor.text)
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
    """Return the object that a JSON text contains. None for a text that is not JSON, or is JSON of another type."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return None
    if isinstance(value, dict):
        return value
    return None
