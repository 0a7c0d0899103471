"""The map between a target's tokens and the tokens of a draft with another vocabulary. The target's committed tokens
are retokenized for the draft, and the draft's tokens are mapped to the target's.

A token of the target and a token of the draft are the same if they have the same bytes, which must be whole characters.
Special tokens are never the same, however they are spelled. A draft's distribution is restricted to the tokens that are
in both vocabularies, and renormalised (token-level intersection, Timor et al. 2025, arXiv 2502.05202, algorithm 4). So
every draft token has an id in the target's vocabulary, and is drawn from a distribution over such ids. If only few
tokens are in both vocabularies, draft tokens at temperature 0 are instead the text that the draft writes, retokenized
for the target (string-level exact match, algorithm 2).

For the draft's context, committed tokens are decoded to bytes and encoded by the draft's tokenizer. This context need
not be exact: where it is not, fewer draft tokens are accepted, but outputs stay the same.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.text_runs import (
    TextRun,
    TokenBoundary,
    bytes_of,
    encode,
    index_at,
    last_texts,
    piece_tokenizer,
    start_ids_of,
)
from outrider.drafting.token_bytes import Spelling, read_spelling
from outrider.wire.errors import ConfigError
from outrider.wire.models.fingerprint import first_difference, tokenizer_fingerprint

LOOK_BEHIND = 16
"""Number of committed tokens before the first new one that are retokenized again, because new text may merge with them.
A token of the draft model that would reach further back stays split, so that fewer draft tokens are accepted."""

SMALL_OVERLAP = 0.4
"""Minimum fraction of the target's tokens that must be in both vocabularies. Below it, draft tokens at temperature 0
come from the text that the draft model writes, retokenized, and not from its logits, mapped to the target's ids.
Measured (benchmarks/results/tokenizers-2026-11-26.md): at 44 % both methods have equally many draft tokens accepted,
and retokenizing takes the draft model 1.4 times as many steps; at 20 % it has 1.2 times as many accepted."""

Logits = NDArray[np.float32]


class Retokenization(Protocol):
    """Committed tokens of one slot, retokenized for a draft model whose vocabulary differs from the target's."""

    ids: list[int]
    """Token ids of the draft model's vocabulary that are fed to it; never empty."""
    is_whole: bool
    """Whether the text of the committed tokens ends with a whole character. If not, no draft token can be proposed."""

    def commit(self, committed: Sequence[int], num_same: int) -> int:
        """Retokenize the committed tokens and update `ids`. Return the number of leading `ids` that are unchanged.

        `committed`: all committed tokens of the slot, as ids of the target. `num_same`: number of leading committed
        tokens that are unchanged since the last call.
        """

    def num_ids_within(self, num_committed: int) -> int:
        """Return how many of the draft model's `ids` lie in the text of the target's first `num_committed` tokens."""


class Translation(Protocol):
    """Map between a draft model's and a target's vocabulary, for token ids, logits and texts."""

    def logits(self, row: Logits) -> Logits:
        """Map the draft model's logits at one position [draft model's V] to logits over the target's ids [target's V].
        Target ids without a token of the draft model get -inf.
        """

    by_strings: bool
    """Whether draft tokens at temperature 0 should come from the text that the draft model writes, retokenized for the
    target, because the vocabularies share few tokens."""

    def draft_id(self, token_id: int) -> int:
        """Return the draft model's id of the token that has `token_id` in the target. Only for tokens of both."""

    def read(self, committed: Sequence[int], own_ids: Sequence[int]) -> tuple[list[int], bool]:
        """Retokenize for the target the text that the draft model has generated after the committed tokens. Return (ids
        of the target, whether the draft model's text has ended, with a special token or an invalid byte).

        `committed`: committed tokens, as ids of the target. `own_ids`: tokens that the draft model has generated after
        them, as its ids. While its text has not ended, the last id of the result is left out if the tokenizers differ,
        since further text may change it.
        """

    def retokenization(self) -> Retokenization:
        """Return a new retokenization for a slot that has no committed tokens yet."""


def create_translation(
    target_json: bytes, draft_json: bytes, target_size: int, draft_size: int, end_ids: Sequence[int]
) -> Translation | None:
    """Return the map between a draft's and a target's vocabulary; None if both vocabularies are the same and no map is
    needed.

    `target_json`, `draft_json`: contents of the files tokenizer.json. `target_size`, `draft_size`: numbers of logits
    per row. `end_ids`: end-of-text ids of the draft. Raises `ConfigError` if no token is in both vocabularies, or if
    the text of a tokenizer's tokens is not the concatenation of their bytes.
    """
    if tokenizer_fingerprint(target_json) == tokenizer_fingerprint(draft_json):
        if target_size == draft_size:
            return None
        return PaddedTranslation(target_size, draft_size)
    difference = first_difference(target_json, draft_json)
    try:
        found = Intersection(target_json, draft_json, target_size, draft_size, end_ids)
    except ConfigError as error:
        raise ConfigError(
            f"{difference}, and no text is told between them: {error.message}; use two models of one tokenizer"
        ) from None
    if not found.num_shared:
        raise ConfigError(
            f"{difference}, and none of the {found.num_texts} tokens of the smaller vocabulary is one token in both; "
            "use two models of one tokenizer, or of two that have something in common"
        )
    return found


class PaddedTranslation:
    """Translation for a draft and a target of one tokenizer, one of which has more logits per row than the other. The
    additional logits are padding and stand for no token.
    """

    by_strings = False

    def __init__(self, target_size: int, draft_size: int) -> None:
        self._target_size = target_size
        self._draft_size = draft_size

    def logits(self, row: Logits) -> Logits:
        out = np.full(self._target_size, -np.inf, dtype=np.float32)
        num_shared = min(self._target_size, self._draft_size)
        out[:num_shared] = row[:num_shared]
        return out

    def draft_id(self, token_id: int) -> int:
        if token_id >= self._draft_size:
            return 0
        return token_id

    def read(self, committed: Sequence[int], own_ids: Sequence[int]) -> tuple[list[int], bool]:
        return list(own_ids), False

    def retokenization(self) -> Retokenization:
        return _SameIds(self)


class _SameIds:
    def __init__(self, padded: PaddedTranslation) -> None:
        self.ids: list[int] = []
        self.is_whole = True
        self._padded = padded

    def commit(self, committed: Sequence[int], num_same: int) -> int:
        self.ids[num_same:] = map(self._padded.draft_id, committed[num_same:])
        return num_same

    def num_ids_within(self, num_committed: int) -> int:
        return num_committed


class Intersection:
    """Translation for a draft model and a target of different tokenizers. It maps the ids of tokens with the same text
    to one another. A target's token that the draft model does not have gets the logit -inf; logits of the draft model's
    tokens that the target does not have are left out.
    """

    def __init__(
        self,
        target_json: bytes,
        draft_json: bytes,
        target_size: int,
        draft_size: int,
        end_ids: Sequence[int],
    ) -> None:
        """Compare two vocabularies. This takes about a second for vocabularies of 128,000 tokens.

        `target_json`, `draft_json`: contents of the files tokenizer.json. `target_size`, `draft_size`: numbers of
        logits per row. `end_ids`: end-of-text ids of the draft. The first of them is put before a text if the draft's
        tokenizer puts nothing there.

        Raises `ConfigError` if the text of a tokenizer's tokens is not the concatenation of their bytes.
        """
        target = read_spelling(target_json)
        draft = read_spelling(draft_json)
        self.spelling = target.of
        self._own_spelling = draft.of
        self._target_tokenizer = piece_tokenizer(target_json)
        self.tokenizer = piece_tokenizer(draft_json)
        self.start_ids = start_ids_of(draft_json) or tuple(end_ids[:1]) or (0,)
        self._size = target_size
        self._draft_of = _shared(_by_text(target, target_size), draft, draft_size)
        shared = sorted(self._draft_of)
        columns = list[int]()
        more = list[tuple[int, int]]()
        for token_id in shared:
            first, *others = self._draft_of[token_id]
            columns.append(first)
            for other in others:
                more.append((token_id, other))
        self._shared = np.array(shared, dtype=np.int64)
        """The target's ids of the tokens that are in both vocabularies, ascending [N]."""
        self._columns = np.array(columns, dtype=np.int64)
        """The draft's id with the same text for each id in `_shared` [N]."""
        self._more = np.array(more, dtype=np.int64).reshape(-1, 2).T
        """Further ids of the draft with the same text as a shared token: rows of target ids and of draft ids [2, M]."""
        self.num_shared = len(shared)
        self.num_texts = min(target.num_texts, draft.num_texts)
        """Number of text tokens (no special ones) of the target or of the draft model, whichever has fewer."""
        self.by_strings = self.num_shared < SMALL_OVERLAP * target.num_texts

    @property
    def shared_fraction(self) -> float:
        """Fraction of the smaller vocabulary's text tokens that the other vocabulary has, too."""
        return self.num_shared / max(1, self.num_texts)

    def logits(self, row: Logits) -> Logits:
        out = np.full(self._size, -np.inf, dtype=np.float32)
        out[self._shared] = row[self._columns]
        if self._more.size:
            np.logaddexp.at(out, self._more[0], row[self._more[1]])  # the same text in another way
        return out

    def draft_id(self, token_id: int) -> int:
        return self._draft_of[token_id][0]

    def read(self, committed: Sequence[int], own_ids: Sequence[int]) -> tuple[list[int], bool]:
        before = TextRun()
        for token_id in last_texts(self.spelling, committed[-LOOK_BEHIND:]):
            before.add(self.spelling[token_id] or b"", 0)
        text, has_ended = self._text_of(own_ids)
        if not text:
            return [], has_ended
        encoding = encode(self._target_tokenizer, before.text + text)
        index = index_at(encoding, len(before.text))
        if index is None:
            ids = encode(self._target_tokenizer, text).ids
        else:
            ids = encoding.ids[index:]
        if has_ended:
            return ids, True
        return ids[:-1], False

    def _text_of(self, own_ids: Sequence[int]) -> tuple[str, bool]:
        # The text up to the first special token or invalid byte, and whether there is one.
        raws = list[bytes]()
        for own_id in own_ids:
            raw = bytes_of(self._own_spelling, own_id)
            if raw is None:
                break
            raws.append(raw)
        written = b"".join(raws)
        try:
            return codecs.getincrementaldecoder("utf-8")().decode(written), len(raws) < len(own_ids)
        except UnicodeDecodeError as error:
            return written[: error.start].decode(), True

    def retokenization(self) -> Retokenization:
        return _RetokenizedText(self)

    def retokenize(self, committed: Sequence[int]) -> tuple[list[int], list[TokenBoundary], bool]:
        """Retokenize committed tokens for the draft model. Return (the draft model's token ids, the boundaries where
        tokens of both vocabularies begin, whether the text ends with a whole character).

        A special token splits the text: no token spans it, and the draft model gets no token for it.

        Example: the target commits "un", "able", "!" and the draft model has the tokens "unable" and "!". The ids are
        those of "unable" and "!". The boundaries, with the numbers of the target's and of the draft model's tokens
        before each, are (0, 0), (2, 1), (3, 2); there is none after "un".
        """
        ids = list[int]()
        marks = [TokenBoundary(0, 0)]
        run = TextRun()
        for index, token_id in enumerate(committed):
            raw = bytes_of(self.spelling, token_id)
            if raw is None:
                self._retokenize_run(run, ids, marks)
                marks.append(TokenBoundary(index + 1, len(ids)))
                run = TextRun()
            else:
                run.add(raw, index + 1)
        is_whole = run.is_whole
        self._retokenize_run(run, ids, marks)
        return ids, marks, is_whole

    def _retokenize_run(self, run: TextRun, ids: list[int], marks: list[TokenBoundary]) -> None:
        if not run.text:
            return
        start = len(ids)
        furthest = 0
        encoding = encode(self.tokenizer, run.text)
        for index, (begin, end) in enumerate(encoding.offsets):
            if furthest <= begin and begin in run.ends and index:
                marks.append(TokenBoundary(run.ends[begin], start + index))
            furthest = max(furthest, end)
        ids += encoding.ids
        if len(run.text) in run.ends:
            marks.append(TokenBoundary(run.ends[len(run.text)], len(ids)))


class _RetokenizedText:
    def __init__(self, translation: Intersection) -> None:
        self.ids = list(translation.start_ids)
        self.is_whole = True
        self._translation = translation
        self._marks = [TokenBoundary(0, len(self.ids))]

    def commit(self, committed: Sequence[int], num_same: int) -> int:
        marks = self._marks
        del marks[self._last_mark(num_same) + 1 :]  # later marks are outdated
        look_behind = LOOK_BEHIND
        while True:
            kept = self._last_mark(num_same - look_behind)  # index of the mark from which the text is encoded again
            first = marks[kept].num_committed
            ids, marks_behind, self.is_whole = self._translation.retokenize(committed[first:])
            new_marks = [TokenBoundary(first + mark.num_committed, mark.num_own) for mark in marks_behind]
            if not kept:
                meeting = 0
                break
            # A text encoded from here may begin otherwise than where it continues: keep up to the next mark in both.
            found = _first_common(marks, kept + 1, new_marks)
            if found is not None:
                kept, meeting = found
                break
            look_behind *= 2
        num_kept = marks[kept].num_own
        num_skipped = new_marks[meeting].num_own
        previous_ids = self.ids[num_kept:]
        new_ids = ids[num_skipped:]
        self.ids[num_kept:] = new_ids
        del marks[kept:]
        for mark in new_marks[meeting:]:
            marks.append(TokenBoundary(mark.num_committed, mark.num_own - num_skipped + num_kept))
        return num_kept + num_alike(previous_ids, new_ids)

    def num_ids_within(self, num_committed: int) -> int:
        return self._marks[self._last_mark(num_committed)].num_own

    def _last_mark(self, num_committed: int) -> int:
        # Index of the last mark at or before a number of committed tokens; 0 where there is none.
        return max(0, bisect_right(self._marks, num_committed, key=lambda mark: mark.num_committed) - 1)


def _first_common(
    marks: Sequence[TokenBoundary], start: int, new_marks: Sequence[TokenBoundary]
) -> tuple[int, int] | None:
    # Indices, in both lists, of the first mark at the same committed token: in `marks` from `start` on, in `new_marks`
    # behind the first.
    index_of = {marks[index].num_committed: index for index in range(start, len(marks))}
    for index, mark in enumerate(new_marks[1:], 1):
        if mark.num_committed in index_of:
            return index_of[mark.num_committed], index
    return None


def num_alike(previous: Sequence[int], ids: Sequence[int]) -> int:
    """Return the length of the common prefix of `previous` and `ids`, two lists of token ids."""
    num_same = 0
    while num_same < min(len(previous), len(ids)) and previous[num_same] == ids[num_same]:
        num_same += 1
    return num_same


def _by_text(target: Spelling, size: int) -> dict[bytes, int]:
    found = dict[bytes, int]()
    for token_id, raw in enumerate(target.of[:size]):
        if raw and _is_whole(raw) and (raw not in found or found[raw] in target.fallback_ids):
            found[raw] = token_id
    return found


def _shared(by_text: Mapping[bytes, int], draft: Spelling, size: int) -> dict[int, list[int]]:
    """Return the draft's ids with the same text, by target id. The id that the draft's tokenizer uses comes first."""
    found = dict[int, list[int]]()
    for draft_id, raw in enumerate(draft.of[:size]):
        if raw is None:
            continue
        token_id = by_text.get(raw)
        if token_id is not None:
            found.setdefault(token_id, []).append(draft_id)
    for ids in found.values():
        ids.sort(key=lambda draft_id: draft_id in draft.fallback_ids)
    return found


def _is_whole(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
