"""Lookahead decoding: the window and what comes of it, over a scripted model, and what is kept apart by slot."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.papers import lookahead
from outrider.papers.lookahead import LookaheadDrafter, Window
from outrider.wire.errors import ConfigError
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.lookahead_shape import LookaheadShape
from outrider.wire.requests.params import SamplingParams
from outrider.wire.settings.config import TargetConfig, load

VOCAB, CONTEXT = 50, 99
SHAPE = "3,4,2"
WINDOW, NGRAM, GUESSES = LookaheadShape.parse(SHAPE)


def says(ids: list[int]) -> int:
    """A model that reads its last two tokens."""
    return (3 * ids[-1] + 7 * ids[-2] + 1) % VOCAB


def slot_of(number: int, committed: list[int], **options: Any) -> Any:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 99, **options})
    return SimpleNamespace(key=(1, number), committed=committed, max_len=99, params=params)


def opened(shape: str, committed: list[int], source_ids: tuple[int, ...] = ()) -> tuple[LookaheadDrafter, Any]:
    drafter, slot = LookaheadDrafter(shape, CONTEXT), slot_of(1, committed)
    open_slot(drafter, slot, source_ids)
    return drafter, slot


def open_slot(drafter: LookaheadDrafter, slot: Any, source_ids: tuple[int, ...] = ()) -> None:
    job: Any = SimpleNamespace(source_ids=source_ids)
    drafter.open(job, slot)


def rows_of(drafter: LookaheadDrafter, slot: Any, parents: list[int] | None = None) -> ExtraRows:
    rows = drafter.extra_rows(slot, parents or [])
    assert rows is not None
    return rows


def paths(rows: ExtraRows, last_ids: list[int]) -> list[list[int]]:
    """What each token of the window sees, itself the last; last_ids: the text's."""
    found = list[list[int]]()
    for token_id, parent in zip(rows.ids, rows.parents, strict=True):
        found.append([*(last_ids if parent == ROOT else found[parent]), token_id])
    return found


def step(drafter: LookaheadDrafter, slot: Any, says: Callable[[list[int]], int] = says) -> None:
    """Feed the window after the text, which goes on by a token."""
    rows = rows_of(drafter, slot)
    logits = torch.zeros(len(rows.ids), VOCAB)
    for row, path in enumerate(paths(rows, slot.committed)):
        logits[row, says(path)] = 1.0
    drafter.read(slot, logits, [], rows)
    slot.committed.append(says(slot.committed))


def test_a_column_sees_the_first_level_up_to_it_and_itself() -> None:
    drafter, slot = opened(SHAPE, [5, 6, 7, 8])
    rows = rows_of(drafter, slot)
    first, second, third = rows.ids[:2], rows.ids[2:5], rows.ids[5:]
    assert paths(rows, [9])[-3:] == [
        [9, second[0], third[0]],
        [9, first[0], second[1], third[1]],
        [9, *first, second[2], third[2]],
    ]
    assert set(rows.ids) <= {5, 6, 7, 8}, "it begins with tokens of the text"


@pytest.mark.parametrize("shape", [SHAPE, "5,3,4", "2,6,3", "1,3,1"])
def test_a_window_gives_tokens_that_the_model_generates_in_sequence(shape: str) -> None:
    """Once none of the first tokens is left in it: of a column, whatever its first two tokens are, for the window moves
    on; the first column begins with the text's own.
    """
    (drafter, slot), parsed = opened(shape, [1, 2, 3]), LookaheadShape.parse(shape)
    for _ in range(3 * parsed.ngram):
        assert len(rows_of(drafter, slot).ids) == parsed.num_window_tokens
        step(drafter, slot)
    drafter.has_next(slot)  # what was said last is learnt
    window = drafter._windows[slot.key]
    window._pool.clear()
    last_id = slot.committed[-1]
    step(drafter, slot)
    drafter.has_next(slot)
    ngrams = [(start, *following) for start, known in window._pool.items() for following in known]
    assert ngrams[-1 if parsed.window == 1 else 0][0] == last_id or parsed.max_ngrams == 1
    for ngram in ngrams:
        assert len(ngram) == parsed.ngram
        for place in range(3 if ngram[0] == last_id else 2, parsed.ngram):
            assert ngram[place] == says(list(ngram[:place]))


def test_where_the_text_repeats_itself_its_next_tokens_are_proposed() -> None:
    drafter, slot = opened("5,4,5", [4, 5, 6])
    for _ in range(8):
        step(drafter, slot, lambda path: 4 + (path[-1] - 3) % 3)
    drafter.has_next(slot)
    assert drafter._windows[slot.key].after(6)[0] == [4, 5, 6], "the latest first"


def test_a_pool_keeps_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "MAX_STARTS", 2)
    window = Window(LookaheadShape(1, 3, 2), [1])

    def keep(*ngram: int) -> None:
        *window.ids, said = ngram
        window.learn([said])

    for following in ((1, 1), (2, 2), (1, 1), (3, 3)):
        keep(7, *following)
    assert window.after(7) == [[3, 3], [1, 1]]
    keep(8, 1, 1)
    keep(7, 1, 1)
    keep(9, 1, 1)
    assert not window.after(8) and window.after(7) == [[1, 1], [3, 3]]


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


class TestSlots:
    def test_no_text_is_drafted_from_another_slots_window(self) -> None:
        (drafter, one), other = opened(SHAPE, [5, 6]), slot_of(2, [5, 6])
        open_slot(drafter, other)
        step(drafter, one, lambda path: 6)
        assert drafter.has_next(one) and not drafter.has_next(other)
        drafter.close(one.key, is_ended=True)
        open_slot(drafter, one)
        assert not drafter.has_next(one), "nor from an earlier answer's"

    def test_a_window_follows_the_last_committed_token_whatever_is_drafted_beside_it(self) -> None:
        drafter, slot = opened(SHAPE, [5, 6])
        alone, beside = rows_of(drafter, slot), rows_of(drafter, slot, [-1, 0, -1])
        assert beside.ids == alone.ids
        assert beside.parents == [each if each < 0 else 3 + each for each in alone.parents]
        assert (alone.drafter, alone.width, alone.depth) == (Drafter.LOOKAHEAD, GUESSES, NGRAM - 1)
        shares = SlotAcceptance(RankAcceptance())
        prob = shares.prob(0) + shares.prob(1)
        assert alone.gain(shares) == pytest.approx(prob + prob**2 + prob**3)

    def test_a_window_begins_with_what_the_encoder_reads_too(self) -> None:
        rows = rows_of(*opened(SHAPE, [0], tuple(range(20, 40))))
        assert {*rows.ids} <= {0, *range(20, 40)} and len({*rows.ids}) > 3

    def test_no_window_reaches_past_the_context(self) -> None:
        depth = WINDOW - 1 + NGRAM - 2
        for num, fits in ((CONTEXT - depth, True), (CONTEXT - depth + 1, False)):
            drafter, slot = opened(SHAPE, [5] * num)
            assert (drafter.extra_rows(slot, []) is not None) is fits

    def test_ngrams_that_begin_alike_are_branches_of_one_tree_the_latest_first(self) -> None:
        drafter, slot = opened(SHAPE, [5, 6])
        drafter._windows[slot.key]._pool[6] = [[7, 1, 2], [7, 8, 9]]
        shares, state = SlotAcceptance(RankAcceptance()), Any

        def proposed(slot: Any, max_tokens: int) -> DraftTree:
            return drafter.propose(slot, state, shares, max_tokens).tree  # type: ignore[arg-type]

        tree = proposed(slot, 9)
        assert {tree.prefix(node) for node in range(len(tree))} == {(7,), (7, 1), (7, 1, 2), (7, 8), (7, 8, 9)}
        assert tree.ids[:3] == [7, 1, 2] and tree.probs == sorted(tree.probs, reverse=True)
        assert len(proposed(slot, 2)) == 2
        chain = proposed(slot_of(1, [5, 6], lenience=0.5), 9)
        assert chain.is_chain and chain.ids == [7, 1, 2]
