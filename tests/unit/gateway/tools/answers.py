"""Answers with calls: as a family writes them, and what is read in them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.api.openai_responses import message_of
from gateway.tools.call_families import CallFamily
from gateway.tools.parts import Part
from gateway.tools.reader import CallReader
from gateway.tools.reasoning import THINK

TEMPLATES = Path(__file__).parents[3] / "data/templates"
ANY = {"type": "object", "properties": {}}
SCHEMAS = {"weather": ANY, "add-2": ANY}
Call = tuple[str, str]


def written(family: CallFamily, calls: Sequence[Call]) -> str:
    """The calls as the family writes them."""
    texts = [family.form.write(name, json.loads(text), index) for index, (name, text) in enumerate(calls)]
    if family.is_bare and len(calls) == 1 and not family.lists_one:
        return texts[0]
    return family.opening + family.between.join(texts) + family.closing


def read(
    family: CallFamily | None,
    pieces: Sequence[str],
    *,
    reasons: bool = False,
    begun: bool = False,
    max_calls: int | None = None,
    is_cut: bool = False,
    schemas: dict[str, Any] = SCHEMAS,
) -> list[Part]:
    reader = CallReader(
        family, schemas, THINK if reasons or begun else None, begun, max_calls, family.silent if family else ()
    )
    parts = [part for piece in pieces for part in reader.push(piece)]
    return parts + reader.finish(is_cut)


def told(parts: Sequence[Part]) -> tuple[str | None, str, list[Call]]:
    """Content, reasoning and calls of a whole answer."""
    message = message_of(parts, lambda index, name: "id")
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message["content"], message.get("reasoning_content", ""), calls


def one(family: CallFamily | None, text: str, **options: Any) -> tuple[str | None, str, list[Call]]:
    return told(read(family, [text], **options))


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "rate": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "is_set": {"type": "boolean"},
        "where": {"type": "object"},
        "note": {"type": ["string", "null"]},
    },
}
TYPED = {"weather": SCHEMA, "add-2": SCHEMA}


def objects(found: Sequence[Call]) -> list[tuple[str, Any]]:
    """Calls with their arguments as values: forms that are not JSON are written as JSON in their own spacing."""
    return [(name, json.loads(text)) for name, text in found]
