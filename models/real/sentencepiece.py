"""How SentencePiece's BPE cuts a text by the scores in a GGUF file, to hold a converted tokenizer against.

Written for what the file says: tokens of the users' own and control tokens are cut out first, the longest at each
place; in what is between, the pair whose joint token has the best score is joined until none is left; characters
without a token are their UTF-8 bytes.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from enum import IntEnum

SPACE = "\u2581"


class Kind(IntEnum):
    """Kind of a token, by its number in GGUF files."""

    NORMAL = 1
    CONTROL = 3
    USERS = 4
    BYTE = 6


class SentencePiece:
    """SentencePiece's BPE with the vocabulary of a GGUF file. It puts no space before a text."""

    def __init__(self, tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], bos_id: int) -> None:
        texts = [token.replace(" ", SPACE) for token in tokens]
        self._ids = {text: token_id for token_id, text in enumerate(texts)}
        self._scores = {t: s for t, s, kind in zip(texts, scores, kinds, strict=True) if kind == Kind.NORMAL}
        self._bytes = {int(t[3:5], 16): i for i, (t, k) in enumerate(zip(tokens, kinds, strict=True)) if k == Kind.BYTE}
        self._whole = {t for t, kind in zip(texts, kinds, strict=True) if kind in (Kind.CONTROL, Kind.USERS)}
        longest_first = sorted(self._whole, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._bos_id = bos_id

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, after the id that begins a sequence."""
        ids = [self._bos_id]
        for part in self._cut.split(text.replace(" ", SPACE)):
            ids += [self._ids[part]] if part in self._whole else self._joined(part)
        return ids

    def _joined(self, text: str) -> list[int]:
        symbols = list(text)
        after = list(range(1, len(symbols) + 1))
        before = list(range(-1, len(symbols) - 1))
        waiting: list[tuple[float, int, str, str]] = []

        def offer(place: int) -> None:
            if place >= 0 and (following := after[place]) < len(symbols):
                pair = symbols[place], symbols[following]
                if (score := self._scores.get("".join(pair))) is not None:
                    heapq.heappush(waiting, (-score, place, *pair))

        for place in range(len(symbols)):
            offer(place)
        while waiting:
            _, place, left, right = heapq.heappop(waiting)
            following = after[place]
            if symbols[place] != left or following == len(symbols) or symbols[following] != right:
                continue  # one of them has been joined to another since
            symbols[place] = left + right
            symbols[following] = ""
            after[place] = after[following]
            if after[place] < len(symbols):
                before[after[place]] = place
            offer(place)
            offer(before[place])
        token_ids = list[int]()
        for symbol in symbols:
            if symbol:
                token_ids += self._ids_of(symbol)
        return token_ids

    def _ids_of(self, symbol: str) -> list[int]:
        token_id = self._ids.get(symbol)
        if token_id is not None:
            return [token_id]
        return [self._bytes[byte] for byte in symbol.encode()]
