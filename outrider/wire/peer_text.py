"""Bounds for text from other processes (names, reasons), which goes into logs, labels of metrics and error messages."""

from __future__ import annotations

from google.protobuf.message import Message

MAX_NAME_BYTES = 256
"""Maximum bytes (UTF-8) of a name in a message from another process, such as a model id; longer ones are cut. File
names have at most 255 bytes, hub ids 96."""
MAX_REASON_BYTES = 1300
"""Maximum bytes (UTF-8) of a sentence from another process that says why something failed. The same value as
`rpc.MAX_ERROR_BYTES`."""
MAX_INFO_BYTES = 1 << 16
"""Maximum bytes of a WorkerInfo message, by which a worker describes itself. Our workers' messages have a few hundred.
"""
MAX_REASONS = 8
"""Maximum number of different reasons that one `Reasons` remembers. Further new reasons are not logged."""
_REASON_FIELDS = frozenset({"reason", "features_refusal"})
"""Names of message fields that hold a reason. All other text fields hold names."""


def one_line(text: str) -> str:
    """Return the text on one line: control characters, line separators and invisible characters are escaped as in
    Python's repr.
    """
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
    """Cut every text field of a message from another process, and of the messages inside it, to one line of at most
    MAX_NAME_BYTES bytes, or MAX_REASON_BYTES for a reason.
    """
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
    """Return a text that says why a worker is refused by its peer: its WorkerInfo has more than MAX_INFO_BYTES bytes.
    None = the WorkerInfo is not too large.
    """
    if info.ByteSize() <= MAX_INFO_BYTES:
        return None
    return f"describes itself in {info.ByteSize()} bytes, must be at most {MAX_INFO_BYTES}"


class Reasons:
    """The different reasons for which a repeated action, such as connecting, has failed. A failure should be logged
    only if `note` says that its reason is new.

    At most MAX_REASONS different reasons are remembered, and further ones are not logged. So a peer that gives a new
    reason each time fills neither the log nor the memory.
    """

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self.num_failures = 0

    def note(self, reason: str) -> bool:
        """Count a failure. Return whether to log its reason: it is new, and fewer than MAX_REASONS different ones came
        before.
        """
        self.num_failures += 1
        is_new = reason not in self._reasons and len(self._reasons) < MAX_REASONS
        if is_new:
            self._reasons.add(reason)
        return is_new
