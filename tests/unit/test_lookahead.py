"""Lookahead decoding: the window and what comes of it, over a scripted model, and what is kept apart by slot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.drafting import lookahead
from outrider.drafting.lookahead import Lookahead
from outrider.engine.speculation.ranks import RankShares, SlotShares
from outrider.wire.drafters import Drafter
from outrider.wire.errors import ConfigError
from outrider.wire.lookahead_shape import LookaheadShape
from outrider.wire.params import SamplingParams
from outrider.wire.settings.config import TargetConfig, load
from target_service.own_lookahead import OwnLookahead

VOCAB, CONTEXT = 50, 99
SHAPE = LookaheadShape(window=3, ngram=4, guesses=2)


def says(ids: list[int]) -> int:
    """A model that reads its last two tokens."""
    return (3 * ids[-1] + 7 * ids[-2] + 1) % VOCAB


def paths(window: Lookahead, last_ids: list[int]) -> list[list[int]]:
    """What each token of the window sees, itself the last; last_ids: the text's."""
    found = list[list[int]]()
    for token_id, parent in zip(window.ids, window.parents, strict=True):
        found.append([*(last_ids if parent < 0 else found[parent]), token_id])
    return found


def step(window: Lookahead, text: list[int]) -> None:
    """Feed the window behind the text, which goes on by a token."""
    last_level = paths(window, text)[-window.shape.window :]
    window.learn(text[-1], [says(path) for path in last_level])
    text.append(says(text))


def test_a_column_sees_the_first_level_up_to_it_and_itself() -> None:
    window = Lookahead(SHAPE, [5, 6, 7, 8])
    ids = window.ids
    first, second, third = ids[:2], ids[2:5], ids[5:]
    assert paths(window, [9])[-3:] == [
        [9, second[0], third[0]],
        [9, first[0], second[1], third[1]],
        [9, *first, second[2], third[2]],
    ]
    assert set(ids) <= {5, 6, 7, 8}, "it begins with tokens of the text"


@pytest.mark.parametrize("shape", [SHAPE, LookaheadShape(5, 3, 4), LookaheadShape(2, 6, 3)])
def test_what_comes_of_a_window_are_tokens_that_the_model_says_in_a_row(
    shape: LookaheadShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once none of the first tokens is left in it: of a column, whatever its first two tokens are, for the window moves
    on; the first column begins with the text's own.
    """
    window, text = Lookahead(shape, [1, 2, 3]), [1, 2, 3]
    for _ in range(3 * shape.ngram):
        assert len(window.ids) == len(window.parents) == shape.num_scaffolds
        step(window, text)
    kept = list[tuple[int, ...]]()
    monkeypatch.setattr(window, "_keep", lambda start, following: kept.append((start, *following)))
    step(window, text)
    assert [len(ngram) for ngram in kept] == [shape.ngram] * shape.window
    for column, ngram in enumerate(kept):
        for place in range(2 if column else 3, shape.ngram):
            assert ngram[place] == says(list(ngram[:place]))


def test_where_the_text_repeats_itself_its_next_tokens_are_guessed() -> None:
    text = [4, 5, 6]

    def cycle(path: list[int]) -> int:
        return 4 + (path[-1] - 3) % 3

    window = Lookahead(LookaheadShape(5, 4, 5), text)
    for _ in range(8):
        window.learn(text[-1], [cycle(path) for path in paths(window, text)[-5:]])
        text.append(cycle(text))
    assert window.guesses(6)[0] == (4, 5, 6), "the latest first"


def test_a_pool_keeps_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "MOST_STARTS", 2)
    window = Lookahead(LookaheadShape(1, 3, 2), [1])
    for following in ((1, 1), (2, 2), (1, 1), (3, 3)):
        window._keep(7, following)
    assert window.guesses(7) == [(3, 3), (1, 1)]
    window._keep(8, (1, 1))
    window._keep(7, (1, 1))
    window._keep(9, (1, 1))
    assert window.guesses(8) == [] and window.guesses(7) == [(1, 1), (3, 3)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("5,4", "write W,N,G, such as 5,4,5"),
        ("5,2,5", "at least 1 and N 3"),
        ("0,4,5", "at least 1 and N 3"),
        ("15,5,15", r"feeds up to \(W \+ G\) \(N - 1\) - 1 = 119 tokens more with it, at most 64"),
    ],
)
def test_a_shape_that_nobody_can_run_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"lookahead.*{why}"):
        load(TargetConfig, ["--model", "x", "--lookahead", text])


def slot_of(number: int, committed: list[int], **options: Any) -> Any:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 99, **options})
    return SimpleNamespace(key=(1, number), committed=committed, max_len=99, params=params, source=None)


def learnt(own: OwnLookahead, slot: Any, num_drafts: int = 0) -> None:
    """A step whose window says the ids 0, 1, .. behind its columns."""
    scaffold = own.scaffold(slot, range(-1, num_drafts - 1))
    assert scaffold is not None
    logits = torch.zeros(len(scaffold.ids), VOCAB)
    logits[range(-SHAPE.window, 0), range(SHAPE.window)] = 1.0
    own.learn(slot, logits, [], scaffold)


class TestSlots:
    def test_nobodys_text_is_guessed_from_another_slots_window(self) -> None:
        own, one, other = OwnLookahead(SHAPE, CONTEXT), slot_of(1, [5, 6]), slot_of(2, [5, 6])
        own.open(one)
        own.open(other)
        learnt(own, one)
        assert own.has_next(one) and not own.has_next(other)
        own.forget(one.key)
        own.open(one)
        assert not own.has_next(one), "nor from an earlier answer's"

    def test_a_window_hangs_under_the_last_committed_token_whatever_is_drafted_beside_it(self) -> None:
        own, slot = OwnLookahead(SHAPE, CONTEXT), slot_of(1, [5, 6])
        own.open(slot)
        alone, beside = own.scaffold(slot, []), own.scaffold(slot, [-1, 0, -1])
        assert alone is not None and beside is not None and beside.ids == alone.ids
        assert beside.parents == [each if each < 0 else 3 + each for each in alone.parents]
        assert beside.beside(0) == alone
        assert (alone.drafter, alone.width, alone.depth) == (Drafter.LOOKAHEAD, SHAPE.guesses, SHAPE.ngram - 1)

    def test_a_window_begins_with_what_the_encoder_reads_too(self) -> None:
        own, slot = OwnLookahead(SHAPE, CONTEXT), slot_of(1, [0])
        slot.source = SimpleNamespace(ids=range(20, 40))
        own.open(slot)
        scaffold = own.scaffold(slot, [])
        assert scaffold is not None and {*scaffold.ids} <= {0, *range(20, 40)} and len({*scaffold.ids}) > 3

    def test_no_window_reaches_past_the_context(self) -> None:
        own, depth = OwnLookahead(SHAPE, CONTEXT), SHAPE.window - 1 + SHAPE.ngram - 2
        for num, fits in ((CONTEXT - depth, True), (CONTEXT - depth + 1, False)):
            slot = slot_of(1, [5] * num)
            own.open(slot)
            assert (own.scaffold(slot, []) is not None) is fits

    def test_ngrams_that_begin_alike_are_branches_of_one_tree_the_latest_first(self) -> None:
        own, slot = OwnLookahead(SHAPE, CONTEXT), slot_of(1, [5, 6])
        own.open(slot)
        for following in ((7, 8, 9), (7, 1, 2)):
            own._slots[slot.key]._keep(6, following)
        shares = SlotShares(RankShares())
        found: Any = own.candidates(slot, None, shares, 9)  # type: ignore[arg-type]
        tree = {(node.token_id, parent if parent < 0 else found[parent][1].token_id) for _, node, parent in found}
        assert tree == {(7, -1), (1, 7), (2, 1), (8, 7), (9, 8)}
        assert [node.token_id for _, node, _ in found][:3] == [7, 1, 2]
        assert len(own.candidates(slot, None, shares, 2)) == 2  # type: ignore[arg-type]
        slot = slot_of(1, [5, 6], lenience=0.5)
        chain: Any = own.candidates(slot, None, shares, 9)  # type: ignore[arg-type]
        assert [(node.token_id, parent) for _, node, parent in chain] == [(7, -1), (1, 0), (2, 1)]
