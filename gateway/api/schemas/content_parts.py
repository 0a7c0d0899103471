"""Reads the parts of a message's content, in the words of all three APIs: text, or what stands for it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from typing_extensions import TypedDict

from gateway.confined.template_shape import text_of_content
from outrider.wire.errors import InvalidRequest

TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
"""Types of parts whose text is under `text`."""
NO_TEXT = ("redacted_thinking",)
"""Types of parts that hold nothing that can be read here."""
OF_OTHERS = ("assistant", "tool", "function")
"""Roles whose pictures and files the caller did not choose: a line stands for each."""


class NoTextPart(ValueError):
    """A part asks to be looked at and is no text."""


class NoTextBlock(InvalidRequest):
    """As NoTextPart, where pydantic would make nothing of a ValueError."""


CONTENT: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
}
"""What a content may be, for /openapi.json."""


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


def text_of(value: Any) -> str:
    """Return a string, or the texts of parts, joined by newlines."""
    if not isinstance(value, list) or value:
        return text_of_content(read_content(value))
    raise ValueError("must be a string or a list of text parts")


PlainText = Annotated[str, BeforeValidator(text_of, json_schema_input_type=str | list[TextPart])]


def read_content(value: Any, role: str = "user") -> str | list[dict[str, str]]:
    """Return content as a text, or as a list of text parts. Nothing is an empty text. Raises ValueError for a part
    that asks to be looked at and is no text.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a string or a list of text parts")
    texts = [text for part in value if (text := text_of_part(part, role)) is not None]
    return [{"type": "text", "text": text} for text in texts] if texts else ""


def text_of_part(part: dict[str, Any], role: str) -> str | None:
    """Return the text of a part in a message of this role, None where it has none."""
    kind = part.get("type")
    if kind is None and isinstance(part.get("text"), str):
        kind = "text"
    if kind in TEXT_PARTS or kind == "refusal":
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
        raise ValueError(f"has a part of type {kind!r} whose text is {type(text).__name__}, must be a string")
    if kind in NO_TEXT:
        return None
    if kind == "tool_reference":
        return str(part.get("tool_name", ""))
    written = _written_text(part, role)
    if written is not None:
        return written
    if role in OF_OTHERS:
        return f"[{_shown_kind(kind)} left out]"
    raise NoTextPart(f"has a part of type {kind!r}; only text parts are read here")


def _written_text(part: dict[str, Any], role: str) -> str | None:
    """Return what stands in a document or a search result, None where that is no text."""
    kind = part.get("type")
    if kind == "document":
        source = part.get("source")
        found = _source_text(source) if isinstance(source, dict) else None
        heads = [part.get("title"), part.get("context")]
    elif kind == "search_result":
        found = _plain(part.get("content"))
        heads = [part.get("title"), part.get("source")]
    else:
        return None
    if found is None:
        return None
    if role not in OF_OTHERS and _asks_for_citations(part):
        raise ValueError("has citations, which are not offered; leave them out")
    return "\n".join([*(head for head in heads if isinstance(head, str) and head), found])


def _source_text(source: dict[str, Any]) -> str | None:
    if source.get("type") == "text":
        return _plain(source.get("data"))
    return _plain(source.get("content")) if source.get("type") == "content" else None


def _plain(value: Any) -> str | None:
    """Return a text, or the texts of a list of text parts; None for anything else."""
    if isinstance(value, str):
        return value
    try:
        return text_of_content(read_content(value))
    except ValueError:
        return None


def _asks_for_citations(part: dict[str, Any]) -> bool:
    asked = part.get("citations")
    return isinstance(asked, dict) and bool(asked.get("enabled"))


def _shown_kind(kind: Any) -> str:
    """Return what a part is called where it is left out."""
    name = kind if isinstance(kind, str) else "part"
    for known in ("image", "audio", "video", "file", "document"):
        if known in name:
            return known
    return name[:40]


def thinking_of(value: Any) -> tuple[Any, str]:
    """Return content without its parts of reasoning, and the text of these."""
    if not isinstance(value, list):
        return value, ""
    others = []
    texts = []
    for part in value:
        if isinstance(part, dict) and part.get("type") in ("thinking", "reasoning"):
            kind = part["type"]
            texts.append(_plain(part.get(kind, part.get("text"))) or "")
        else:
            others.append(part)
    return others, "\n".join(text for text in texts if text)
