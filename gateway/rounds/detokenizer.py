"""Detokenizes one choice as its tokens arrive, and finds the stops that end it. Pure. Each `Session` holds one.

Work per token does not grow with the output: a token's text depends on at most the previous token.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from gateway.generation import GenerationRequest
from gateway.tokenizer import Tokenizer
from gateway.tools.reasoning import AnswerFinder

NO_REASONING = AnswerFinder(None, in_reasoning=False)
"""Finder of the answer (the text after the reasoning) for outputs without reasoning: their whole text is the answer. It
has no state, so all choices share it."""


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """Result of adding tokens to an output's text: the text that the client may get now, and the stop, if any."""

    text_delta: str
    """Text that the client may get now. It never ends within a character or within what may become a stop string."""
    num_kept: int
    """Number of the added tokens that belong to the output: all, or those up to and including the token that completed
    the stop."""
    stop: str | int | None
    """Stop string or stop token id that ended the output; None if the output goes on."""
    tokens: tuple[tuple[str, int], ...]
    """Pairs (text, offset) of the kept tokens, in order. The offset is the number of characters of the output before
    the token."""


class Detokenizer:
    """An incremental detokenizer that also finds stops. After a stop or `finish` nothing more may be pushed.

    The concatenated deltas equal `tokenizer.decode` of all ids, with the special tokens in `shown_ids` written by name,
    cut where the first stop string starts. The first is the one whose last character comes first; of two with the same
    last character, the longer. One difference: where an invalid byte ends a run of byte tokens, `tokenizer.decode` may
    replace the whole run by U+FFFD. Here the characters before that byte stay, because they were sent.

    Stops count only after the reasoning: a stop string if all of it comes after the reasoning, a stop id if its token
    does.

        # stop "END", tokens "a E", "N", "D": the deltas are "a ", "", "", and the last one stops
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        shown_ids: Set[int] = frozenset(),
        keeps_stop: bool = False,
        answer: AnswerFinder = NO_REASONING,
        stop_ids: Set[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        """Create a detokenizer of one output.

        stop: stop strings. shown_ids: ids of special tokens that are part of the text. keeps_stop: whether the stop is
        part of the text. answer: finder of the end of the reasoning. stop_ids: token ids that end the output after the
        reasoning and after at least `min_tokens` tokens. The target ends the output at further ids by itself.
        """
        assert all(stop), "an empty stop string would end every answer; requests are checked before"
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._keeps_stop = keeps_stop
        self._answer = answer
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stops = [_StopMatch(text) for text in stop]
        self._utf8 = tokenizer.utf8_decoder()
        self._bytes_ids: list[int] = []
        """Token ids since the last whole character."""
        self._before: list[int] = []
        """Last token id that added text; empty before the first."""
        self._held = ""
        """Text that is not final, because it may be the start of a stop string."""
        self._num_chars = 0
        """Number of characters of the text so far, including held text."""

    @property
    def num_chars(self) -> int:
        """Number of characters of the text so far, including text that is held back."""
        return self._num_chars

    def push(self, ids: Sequence[int]) -> TextUpdate:
        """Add the next tokens of the output, in order, and return the text that the client may get now."""
        text = self._held
        tokens: list[tuple[str, int]] = []
        for token_id in ids:
            offset = self._num_chars
            self._num_tokens += 1
            may_stop = token_id in self._stop_ids and self._num_tokens > self._min_tokens
            if may_stop and self._answer.is_found and not self._keeps_stop:
                tokens.append(("", offset))
                return TextUpdate(text + self._flushed(), len(tokens), token_id, tuple(tokens))
            added = self._add(token_id)
            begins_behind = self._answer.is_behind
            answer = self._answer.push(added)
            self._num_chars += len(added)
            tokens.append((self._shown(token_id, added), offset))
            text += added
            found = self._first_stop(answer)
            if found is not None:
                stop, num_after = found
                self._held = ""
                return TextUpdate(self._ended(text, stop, num_after), len(tokens), stop, tuple(tokens))
            is_behind = begins_behind or len(answer) >= len(added)
            if may_stop and is_behind and self._answer.is_found:
                end = len(text)
                if not self._keeps_stop:
                    end -= len(added)
                return TextUpdate(text[:end] + self._flushed(), len(tokens), token_id, tuple(tokens))
        num_held = max((stop.num_matched for stop in self._stops), default=0)
        if self._stops:
            num_held = max(num_held, self._answer.num_undecided_chars)
        certain = len(text) - num_held
        self._held = text[certain:]
        return TextUpdate(text[:certain], len(ids), None, tuple(tokens))

    def finish(self) -> tuple[str, str | None]:
        """Return the text that was held back so far, and the stop string found in it (None without one).

        Call it at the end of an output that ends without a stop. Incomplete bytes become U+FFFD.
        """
        held = self._held
        self._held = ""
        cut_off = self._flushed()
        text = held + cut_off
        # Complete only here: a stop string with U+FFFD in it, and one in text that might have become reasoning.
        found = self._first_stop(self._answer.push(cut_off) + self._answer.finish())
        if found is None:
            return text, None
        stop, num_after = found
        return self._ended(text, stop, num_after), stop

    def _flushed(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _ended(self, text: str, stop: str, num_after: int) -> str:
        end = len(text) - num_after
        if not self._keeps_stop:
            end -= len(stop)
        return text[:end]

    def _first_stop(self, added: str) -> tuple[str, int] | None:
        """Add text, and return the first complete stop string with the number of characters of `added` after it.

        # stops "ab" and "b", text "xabyz": ("ab", 2), the longer one of two that end at the same character
        """
        if self._stops:
            for num_chars, char in enumerate(added, 1):
                complete = [stop.text for stop in self._stops if stop.push(char)]
                if complete:
                    return max(complete, key=len), len(added) - num_chars
        return None

    def _add(self, token_id: int) -> str:
        piece = self._tokenizer.piece(token_id)
        if piece is None:
            if token_id not in self._shown_ids:
                return ""
            return self._cut_off() + self._tokenizer.token_text(token_id)
        if isinstance(piece, bytes):
            return self._add_bytes(token_id, piece)
        cut_off = self._cut_off()
        known = self._tokenizer.decode(self._before)
        text = self._tokenizer.decode([*self._before, token_id])[len(known) :]
        self._before = [token_id]
        return cut_off + text

    def _cut_off(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        if text:
            self._before = self._bytes_ids[-1:] or self._before
        self._bytes_ids.clear()
        return text

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
        if isinstance(piece, bytes):
            return piece.decode("utf-8", "replace")
        return text


def detokenizer_of(request: GenerationRequest, tokenizer: Tokenizer) -> Detokenizer:
    """Return a new detokenizer for the output of a request, with the stops that the request names."""
    shown_ids: frozenset[int] = frozenset()
    answer = NO_REASONING
    if request.reading is not None:
        shown_ids = request.reading.shown_ids
        if not request.stops_in_reasoning:
            answer = AnswerFinder(request.reading.marks, request.reading.in_reasoning)
    if request.shows_special:
        shown_ids |= tokenizer.special_ids
    return Detokenizer(
        tokenizer,
        request.stop,
        shown_ids,
        keeps_stop=request.keeps_stop,
        answer=answer,
        stop_ids=request.answer_stop_ids,
        min_tokens=request.params.min_tokens,
    )


class _StopMatch:
    """An automaton that finds a stop string in a growing text (Knuth, Morris and Pratt 1977).

    It takes O(1) amortised a character. Borders are computed only as far as the text has ever matched, so that a long
    stop string costs nothing beforehand.

        # stop "aab", text "aaab": num_matched is 1, 2, 2, 3 (the third "a" falls back to the border "a" of "aa")
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = [0, 0]
        """Length of the longest border of each prefix of the stop string, by the prefix's length."""

    def push(self, char: str) -> bool:
        """Add the text's next character. Return whether the stop string is complete. Nothing may be added then."""
        size = self._extended(self.num_matched, char)
        if size == len(self._borders):
            self._borders.append(self._extended(self._borders[-1], char))
        self.num_matched = size
        return size == len(self.text)

    def _extended(self, size: int, char: str) -> int:
        while size and self.text[size] != char:
            size = self._borders[size]
        return size + (self.text[size] == char)
