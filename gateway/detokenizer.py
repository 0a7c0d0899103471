"""Text of one answer as its tokens arrive, and the stop strings that end it. Pure; the decode loop holds one each.

Work per token does not grow with the answer: a token's text depends on at most the token before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Pushed:
    """What some tokens did to the text."""

    text_delta: str
    """Text that became certain: never half a character, never the start of a stop string."""
    num_kept: int
    """Tokens used, up to and including the one that completed a stop string."""
    stop: str | None
    """The stop string that ended the answer; it is not part of the text."""
    tokens: tuple[tuple[str, int], ...]
    """Of each kept token, its own text and the characters of output before it."""


class Detokenizer:
    """After a stop string or `finish` nothing more may be pushed.

    The concatenated deltas equal `tokenizer.decode` of all ids, cut where the first stop string starts. First is the
    one that is complete first (of two, the longer): that depends on the text alone, never on how tokens split it. Only
    byte-fallback runs that turn invalid after a whole character differ: the character, once sent, stays.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        assert all(stop), "an empty stop string would end every answer; requests are checked before"
        self._tokenizer = tokenizer
        self._stop = stop
        self._utf8 = tokenizer.utf8_decoder()
        self._bytes_ids: list[int] = []
        """Ids since the last whole character."""
        self._before: list[int] = []
        """The last id that added text, or none yet."""
        self._held = ""
        """Text that may be the start of a stop string."""
        self._num_chars = 0
        """Characters so far, held ones included."""

    @property
    def num_chars(self) -> int:
        """Characters of all text so far, held-back text included."""
        return self._num_chars

    def push(self, ids: Sequence[int]) -> Pushed:
        """Take the next tokens of the answer, in order."""
        texts: list[str] = []
        tokens: list[tuple[str, int]] = []
        for token_id in ids:
            offset = self._num_chars
            texts.append(self._add(token_id))
            self._num_chars += len(texts[-1])
            tokens.append((self._shown(token_id, texts[-1]), offset))
        held = self._held
        text = held + "".join(texts)
        found = first_stop(text, self._stop)
        if found is None:
            certain = len(text) - _stop_overlap(text, self._stop)
            self._held = text[certain:]
            return Pushed(text[:certain], len(ids), None, tuple(tokens))
        self._held = ""
        start, stop = found
        ends = [len(held) + chars for chars in accumulate(map(len, texts))]
        num_kept = bisect_left(ends, start + len(stop)) + 1
        return Pushed(text[:start], num_kept, stop, tuple(tokens[:num_kept]))

    def finish(self) -> str:
        """What was held back, when the answer ends without a stop string; incomplete bytes show as U+FFFD."""
        text = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        found = first_stop(text, self._stop)  # only a stop string with U+FFFD in it can be complete here
        return text if found is None else text[: found[0]]

    def _add(self, token_id: int) -> str:
        """The text that this token makes certain, stop strings aside."""
        piece = self._tokenizer.piece(token_id)
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            return self._add_bytes(token_id, piece)
        cut_off = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        if cut_off:
            self._before = self._bytes_ids[-1:] or self._before
        self._bytes_ids.clear()
        known = self._tokenizer.decode(self._before)
        text = self._tokenizer.decode([*self._before, token_id])[len(known) :]
        self._before = [token_id]
        return cut_off + text

    def _add_bytes(self, token_id: int, piece: bytes) -> str:
        self._bytes_ids.append(token_id)
        text = self._utf8.decode(piece)
        if text:
            if not self._before and not self._utf8.getstate()[0]:
                text = self._tokenizer.decode(self._bytes_ids)  # at the start some decoders drop a space
            self._before = [token_id]
            self._bytes_ids.clear()
        return text

    def _shown(self, token_id: int, text: str) -> str:
        piece = self._tokenizer.piece(token_id)
        return piece.decode("utf-8", "replace") if isinstance(piece, bytes) else text


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(start, stop string) of the one that is complete first; of those that end together, the longest."""
    found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def _stop_overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that starts a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
