"""Bounds for text from other processes (names, reasons), which goes into logs, labels of metrics and error messages."""

from __future__ import annotations

from google.protobuf.message import Message

MAX_NAME_BYTES = 256
"""Bytes of a name in UTF-8. Names of a file system have up to 255, hub ids 96."""
MAX_REASON_BYTES = 1300
"""Bytes of a reason, a sentence; as `rpc.MAX_ERROR_BYTES`."""
MAX_INFO_BYTES = 1 << 16
"""Bytes of a WorkerInfo; our workers' have some hundred."""
MAX_REASONS = 8
"""Different reasons that `Reasons` reports as new."""
_REASON_FIELDS = frozenset({"why", "features_refusal"})
"""Names of fields that hold a reason; other text fields hold names."""


def one_line(text: str) -> str:
    """Return the text with each control character, line separator and invisible character escaped as in Python."""
    if text.isprintable():
        return text
    return "".join(map(_escape, text))


def _escape(char: str) -> str:
    if char.isprintable():
        return char
    return char.encode("unicode_escape").decode()


def bound_text(text: str, max_bytes: int = MAX_NAME_BYTES) -> str:
    """Return the text as one line of at most `max_bytes` bytes in UTF-8. A text that is cut ends in "..."."""
    line = one_line(text[:max_bytes])
    data = line.encode()
    if len(data) <= max_bytes and len(text) <= max_bytes:
        return line
    return data[: max_bytes - 3].decode(errors="ignore") + "..."


def bound_strings(message: Message) -> None:
    """Apply `bound_text` to every text field of a peer's message, in place, and to those of the messages in it."""
    for field, value in message.ListFields():
        max_bytes = MAX_NAME_BYTES
        if field.name in _REASON_FIELDS:
            max_bytes = MAX_REASON_BYTES
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
    """Return the reason to refuse a worker whose WorkerInfo is over MAX_INFO_BYTES, or None for one that is not."""
    if info.ByteSize() <= MAX_INFO_BYTES:
        return None
    return f"describes itself in {info.ByteSize()} bytes, must be at most {MAX_INFO_BYTES}"


class Reasons:
    """The different reasons for which an action that is repeated without end has failed, so that each is logged once.

    At most MAX_REASONS are kept: a peer that gives ever other reasons neither fills the log nor the memory.
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self.num_failures = 0

    def note(self, reason: str) -> bool:
        """Count a failure. Return whether to log its reason: it is new, and fewer than MAX_REASONS are kept."""
        self.num_failures += 1
        is_new = reason not in self._reasons and len(self._reasons) < MAX_REASONS
        if is_new:
            self._reasons.add(reason)
        return is_new
