"""Map between a target's tokens and those of a draft with another vocabulary. The target's committed tokens are
retokenized for the draft, and the draft's tokens are mapped to the target's.

Two tokens are the same where they are the same bytes, of whole characters. Special tokens are never the same, however
they are spelled. A draft's distribution is restricted to the tokens that are in both vocabularies and renormalised
(token-level intersection, Timor et al. 2025, arXiv 2502.05202, algorithm 4). So every draft token has an id of the
target's, and is drawn from a distribution over those ids. Where few tokens are in both, draft tokens at temperature 0
are instead the draft's own text, retokenized for the target (string-level exact match, algorithm 2).

The draft's context need not match exactly: committed tokens are decoded to bytes and encoded by the draft's tokenizer.
Where that is inexact, only acceptance suffers.
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
"""Number of committed tokens before the first new one that are retokenized again: new text may merge with them. A
draft's token that reaches further back stays split, which costs acceptance."""

SMALL_OVERLAP = 0.4
"""Fraction of the target's tokens that are shared, below which draft tokens at temperature 0 are retokenized text of
the draft. Measured (`make bench-tokenizers`): at 44 % both ways have as many tokens accepted, and text takes the draft
1.4 times the steps; at 20 % text has 1.2 times as many accepted."""

Logits = NDArray[np.float32]


class Retokenization(Protocol):
    """The committed tokens of one slot as tokens of the draft."""

    ids: list[int]
    """Token ids that the draft is fed; never empty."""
    is_whole: bool
    """Whether the text ends with a whole character. If not, the next draft token cannot be predicted."""

    def commit(self, committed: Sequence[int], num_same: int) -> int:
        """Retokenize the committed tokens; return how many of `ids` are unchanged.

        `num_same`: how many committed tokens are unchanged since the last call.
        """

    def num_of(self, num_committed: int) -> int:
        """Return how many of `ids` stand for the first `num_committed` committed tokens alone."""


class Translation(Protocol):
    """Map between a draft's vocabulary and that of a target."""

    def logits(self, row: Logits) -> Logits:
        """Return logits [target's V] for a draft's logits [draft's V]; -inf for ids that the draft has no token for."""

    by_strings: bool
    """Whether so few tokens are shared that draft tokens at temperature 0 had better be retokenized text."""

    def draft_id(self, token_id: int) -> int:
        """Return the draft's id for a target id that has a finite logit."""

    def read(self, committed: Sequence[int], own_ids: Sequence[int]) -> tuple[list[int], bool]:
        """Retokenize the draft's output after the committed tokens for the target; return the ids, and whether it has
        ended.

        While the text has not ended, the last token is left out: the text that follows may change it.
        """

    def retokenization(self) -> Retokenization:
        """Create the retokenization of a new slot, without committed tokens."""


def create_translation(
    target_json: bytes, draft_json: bytes, target_size: int, draft_size: int, end_ids: Sequence[int]
) -> Translation | None:
    """Return the map between two vocabularies; None where they are the same. For the arguments see `Intersection`.

    Raises `ConfigError` where the draft cannot serve that target.
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
    """Implements `Translation` where ids mean the same, and one model has padding logits that no token has."""

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

    def num_of(self, num_committed: int) -> int:
        return num_committed


class Intersection:
    """Implements `Translation` where ids mean different things."""

    def __init__(
        self,
        target_json: bytes,
        draft_json: bytes,
        target_size: int,
        draft_size: int,
        end_ids: Sequence[int],
    ) -> None:
        """Compare two vocabularies. It takes about a second for vocabularies of 128,000 tokens.

        `target_json`, `draft_json`: contents of tokenizer.json. `target_size`, `draft_size`: widths of the logits.
        `end_ids`: end-of-text ids of the draft; the first begins a text where the draft's tokenizer adds nothing there.

        Raises `ConfigError` where a tokenizer's tokens are not bytes.
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
        """Ids of the target that are shared, ascending [N]."""
        self._columns = np.array(columns, dtype=np.int64)
        """For each of them the draft's id with the same text [N]."""
        self._more = np.array(more, dtype=np.int64).reshape(-1, 2).T
        """Further ids of the draft with the same text: the target's id and the draft's [2, M]."""
        self.num_shared = len(shared)
        self.num_texts = min(target.num_texts, draft.num_texts)
        """Number of tokens that stand for text, in the smaller of both vocabularies."""
        self.by_strings = self.num_shared < SMALL_OVERLAP * target.num_texts

    @property
    def share(self) -> float:
        """Fraction of the smaller vocabulary that is shared."""
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
        """Return the draft's token ids of a text, the marks where tokens of both begin, and whether it ends whole.

        A special token splits the text: nothing merges across it, and the draft has no token for it.

        Example: the target commits "un", "able", "!" and the draft has the tokens "unable" and "!".
        ids are those of "unable", "!"; marks are (0, 0), (2, 1), (3, 2): no token of both begins after "un".
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

    def num_of(self, num_committed: int) -> int:
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
    """Return the length of the common prefix of `previous` and `ids`, in tokens."""
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
    """Return the draft's ids with the same text, by target id. The one that its tokenizer writes comes first."""
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
