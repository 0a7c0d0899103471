"""Bound text that another process wrote of itself: names and reasons go into logs, labels of metrics and messages."""

from __future__ import annotations

from google.protobuf.message import Message

MAX_NAME_BYTES = 256
"""Bytes of a name in UTF-8. A file system's names have 255, a hub id 96."""
MAX_REASON_BYTES = 1300
"""Bytes of a sentence that says why, as `rpc.MAX_ERROR_BYTES`."""
_REASONS = frozenset({"why", "features_refusal"})
"""Fields that hold a sentence; all others hold names."""


def one_line(text: str) -> str:
    """Return the text with each control character, line separator and invisible character escaped as in Python."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def bound_text(text: str, max_bytes: int = MAX_NAME_BYTES) -> str:
    """Return the text as one line of at most `max_bytes` bytes in UTF-8; one that is cut ends in "..."."""
    line = one_line(text[:max_bytes])
    data = line.encode()
    if len(data) <= max_bytes and len(text) <= max_bytes:
        return line
    return data[: max_bytes - 3].decode(errors="ignore") + "..."


def bound_strings(message: Message) -> None:
    """Bound every text in a peer's message, in place, those of the messages in it included."""
    for field, value in message.ListFields():
        max_bytes = MAX_REASON_BYTES if field.name in _REASONS else MAX_NAME_BYTES
        if field.type == field.TYPE_STRING and field.is_repeated:
            value[:] = [bound_text(text, max_bytes) for text in value]
        elif field.type == field.TYPE_STRING:
            setattr(message, field.name, bound_text(value, max_bytes))
        elif field.type == field.TYPE_MESSAGE and field.is_repeated:
            for item in value:
                bound_strings(item)
        elif field.type == field.TYPE_MESSAGE:
            bound_strings(value)
