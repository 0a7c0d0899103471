"""Reads the content of messages, in the forms of all three APIs: a text, or a list of parts, each with a type.

Text parts are read. Other parts (images, files) are refused in a user's message. In messages that the caller did not
write they are replaced by a line of text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from typing_extensions import TypedDict

from gateway.confined.template_shape import text_of_content
from outrider.wire.errors import InvalidRequest

TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
"""Types of content parts of a message that have their text in the field `text`."""
SKIPPED_PARTS = ("redacted_thinking",)
"""Types of content parts of a message that are skipped, because their content is encrypted."""
ROLES_OF_OTHERS = ("assistant", "tool", "function")
"""Roles of messages that the caller did not write. In such a message a line of text replaces an image or a file."""


class NoTextPart(ValueError):
    """A message of the caller has a part that is no text, such as an image.

    It is a ValueError, so that pydantic reports it as an error of the field.
    """


class NoTextBlock(InvalidRequest):
    """A block of a message has a type that this server does not read, such as image.

    Unlike NoTextPart it is no ValueError: it is raised while pydantic chooses the class of the block. At that moment
    pydantic cannot report a ValueError as the error of a field.
    """


CONTENT: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
}
"""JSON schema of a message's content."""


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


def read_text(value: Any) -> str:
    """Return a string unchanged, or the texts of a list of parts joined by newlines.

    Raises ValueError for an empty list or any other value, and NoTextPart for a part that is no text.
    """
    if value == []:
        raise ValueError("must be a string or a list of text parts")
    return text_of_content(read_content(value))


PlainText = Annotated[str, BeforeValidator(read_text, json_schema_input_type=str | list[TextPart])]


def read_content(value: Any, role: str = "user") -> str | list[dict[str, str]]:
    """Return the content of a message as a text or as a list of text parts.

    None and a list without text become an empty text. role: role of the message. Raises ValueError for a value that is
    no content, and NoTextPart for a part that is no text, such as an image, in a message that the caller wrote.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a string or a list of text parts")
    parts = []
    for part in value:
        text = text_of_part(part, role)
        if text is not None:
            parts.append({"type": "text", "text": text})
    return parts or ""


def text_of_part(part: dict[str, Any], role: str) -> str | None:
    """Return the text of one part of a message; None for a part that is skipped.

    role: role of the message. Raises NoTextPart for a part that is no text, in a message that the caller wrote.
    """
    kind = part.get("type")
    if kind is None and isinstance(part.get("text"), str):
        kind = "text"
    if kind in TEXT_PARTS:
        return _text_field(part, "text", kind)
    if kind == "refusal":
        return _text_field(part, "refusal", kind)
    if kind in SKIPPED_PARTS:
        return None
    if kind == "tool_reference":
        return str(part.get("tool_name", ""))
    document = _document_text(part, role)
    if document is not None:
        return document
    if role in ROLES_OF_OTHERS:
        return f"[{_shown_kind(kind)} left out]"
    raise NoTextPart(f"has a part of type {kind!r}; only text parts are read here")


def _text_field(part: dict[str, Any], name: str, kind: Any) -> str:
    text = part.get(name)
    if not isinstance(text, str):
        raise ValueError(f"has a part of type {kind!r} whose text is {type(text).__name__}, must be a string")
    return text


def _document_text(part: dict[str, Any], role: str) -> str | None:
    """Return the heads and the text of a document or a search result; None for another part, and without text."""
    kind = part.get("type")
    if kind == "document":
        text = _source_text(part.get("source"))
        heads = [part.get("title"), part.get("context")]
    elif kind == "search_result":
        text = _text_or_none(part.get("content"))
        heads = [part.get("title"), part.get("source")]
    else:
        return None
    if text is None:
        return None
    if role not in ROLES_OF_OTHERS and _needs_citations(part):
        raise ValueError("has citations, which are not offered; leave them out")
    lines = [head for head in heads if isinstance(head, str) and head]
    return "\n".join([*lines, text])


def _source_text(source: Any) -> str | None:
    if not isinstance(source, dict):
        return None
    if source.get("type") == "text":
        return _text_or_none(source.get("data"))
    if source.get("type") == "content":
        return _text_or_none(source.get("content"))
    return None


def _text_or_none(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    try:
        return text_of_content(read_content(value))
    except ValueError:
        return None


def _needs_citations(part: dict[str, Any]) -> bool:
    citations = part.get("citations")
    return isinstance(citations, dict) and bool(citations.get("enabled"))


def _shown_kind(kind: Any) -> str:
    # "input_image": image
    if not isinstance(kind, str):
        return "part"
    for known in ("image", "audio", "video", "file", "document"):
        if known in kind:
            return known
    return kind[:40]


def split_thinking(value: Any) -> tuple[Any, str]:
    """Return (content, reasoning) of a message: its content without the reasoning parts, and the texts of these parts,
    joined by newlines.

    value: the message's content.
    """
    if not isinstance(value, list):
        return value, ""
    others = []
    texts = []
    for part in value:
        if isinstance(part, dict) and part.get("type") in ("thinking", "reasoning"):
            kind = part["type"]
            texts.append(_text_or_none(part.get(kind, part.get("text"))))
        else:
            others.append(part)
    return others, "\n".join(text for text in texts if text)
