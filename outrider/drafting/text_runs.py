"""Pieces of text between special tokens: their bytes, their characters, and the tokens that a tokenizer makes of them.
`translation` uses it to retokenize committed tokens and draft tokens.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer


class TokenBoundary(NamedTuple):
    """Position in a text at which a token of the target and a token of the draft model both begin, or at which the text
    ends.
    """

    num_committed: int
    """Number of the target's (committed) tokens before the boundary."""
    num_own: int
    """Number of the draft model's tokens before the boundary."""


class TextRun:
    """Text of consecutive committed tokens, none of them special. Bytes that are no character decode to U+FFFD."""

    def __init__(self) -> None:
        self.text = ""
        """Text of the whole characters appended so far."""
        self.ends: dict[int, int] = {}
        """Where committed tokens end in `text`: if a token ends after n characters, ends[n] is the `num_committed` that
        `add` got for it. Lengths at which no token ends have no entry."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, raw: bytes, num_committed: int) -> None:
        """Append the bytes of one token. `num_committed`: number of committed tokens up to and including this token,
        counted from the first one that is retokenized, which may lie before this run.
        """
        self.text += self._decoder.decode(raw)
        if self.is_whole:
            self.ends[len(self.text)] = num_committed

    @property
    def is_whole(self) -> bool:
        """Whether the bytes appended so far end with a whole character."""
        return not self._decoder.getstate()[0]


def bytes_of(spelling: Sequence[bytes | None], token_id: int) -> bytes | None:
    """Return `spelling[token_id]`, the token's bytes; None = a special token, or an id outside of `spelling`."""
    if token_id >= len(spelling):
        return None
    return spelling[token_id]


def piece_tokenizer(tokenizer_json: bytes) -> Tokenizer:
    """Return a tokenizer for pieces of text, made from the content of a tokenizer.json. It adds and truncates nothing,
    and takes the texts of special tokens as plain text.
    """
    document = json.loads(tokenizer_json)
    document |= dict.fromkeys(("post_processor", "truncation", "padding"))
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.encode_special_tokens = True
    return tokenizer


def start_ids_of(tokenizer_json: bytes) -> tuple[int, ...]:
    """Return the ids of the special tokens that the tokenizer in a tokenizer.json puts before a text."""
    encoding = Tokenizer.from_buffer(tokenizer_json).encode("a")
    if 0 not in encoding.special_tokens_mask:
        return ()
    return tuple(encoding.ids[: encoding.special_tokens_mask.index(0)])


def last_texts(spelling: Sequence[bytes | None], ids: Sequence[int]) -> Sequence[int]:
    """Return the `ids` after the last special token among them, or all `ids` if none is special. `spelling`: bytes of
    each token id, None for special tokens.
    """
    begin = len(ids)
    while begin and bytes_of(spelling, ids[begin - 1]) is not None:
        begin -= 1
    return ids[begin:]


def index_at(encoding: Encoding, start: int) -> int | None:
    """Return the index in `encoding` of the token that begins at the character with index `start`. None = no token
    begins there, since an earlier one reaches beyond it.
    """
    furthest = 0
    for index, (begin, end) in enumerate(encoding.offsets):
        if begin >= start:
            if furthest <= start:
                return index
            return None
        furthest = max(furthest, end)
    return None


def encode(tokenizer: Tokenizer, text: str) -> Encoding:
    """Tokenize a text without adding special tokens, and return the encoding."""
    # A batch of one: `encode_batch` releases the GIL, the tokenizer's `encode` does not.
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]
