"""Bound text that another process wrote of itself: names and reasons go into logs, labels of metrics and messages."""

from __future__ import annotations

from google.protobuf.message import Message

MAX_NAME_BYTES = 256
"""Bytes of a name in UTF-8. A file system's names have 255, a hub id 96."""
MAX_REASON_BYTES = 1300
"""Bytes of a sentence that says why, as `rpc.MAX_ERROR_BYTES`."""
MAX_INFO_BYTES = 1 << 16
"""Bytes of a WorkerInfo; ours have at most some hundred."""
MAX_REASONS = 8
"""Reasons why a worker is away or refused that are logged and kept; further ones are counted."""
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


def describe_excess(info: Message) -> str | None:
    """Return what is said of a worker whose WorkerInfo is too long to keep, None for one that is not."""
    if info.ByteSize() <= MAX_INFO_BYTES:
        return None
    return f"describes itself in {info.ByteSize()} bytes, must be at most {MAX_INFO_BYTES}"


class Reasons:
    """Keeps the first reasons why something that is tried for ever fails, so that each is logged once.

    Whoever gives other reasons without end is counted.
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self.num_failures = 0

    def note(self, reason: str) -> bool:
        """Count a failure. Return whether its reason is a new one, to be logged."""
        self.num_failures += 1
        is_new = reason not in self._reasons and len(self._reasons) < MAX_REASONS
        if is_new:
            self._reasons.add(reason)
        return is_new
