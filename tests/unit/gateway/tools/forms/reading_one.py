"""One call, read by its form alone."""

from collections.abc import Mapping
from typing import Any

from gateway.tools.cursor import Cursor
from gateway.tools.forms.form import CallForm, CallText
from gateway.tools.parts import Arguments, CallStart, Part

ANY = {"type": "object", "properties": {}}


def parts_of(form: CallForm, text: str, schema: Mapping[str, Any] = ANY) -> list[Part]:
    """Return what the form reads in a whole output: a call of `weather`. Raises NotACall."""
    cursor = Cursor()
    cursor.append(text)
    cursor.is_final = True
    return [part for part in form.read(CallText(cursor, {"weather": schema}, 0)) if part is not None]


def call_of(form: CallForm, text: str, schema: Mapping[str, Any] = ANY) -> str:
    """Return the arguments of that call. Raises NotACall."""
    start, *pieces = parts_of(form, text, schema)
    assert start == CallStart(0, "weather")
    return "".join(piece.text for piece in pieces if isinstance(piece, Arguments))
