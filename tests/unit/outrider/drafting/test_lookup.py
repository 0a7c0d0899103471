"""Copying from where the last tokens came before, held against looking through all places."""

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.table_drafters import TableSlot
from outrider.drafting.lookup import Lookup
from outrider.engine.worker.open_slots import OpenSlots
from outrider.wire.requests.params import SamplingParams
from tests.unit.outrider.drafting.drafting import Course, check_a_course, courses, ids, said
from tests.unit.outrider.drafting.longest import copied

SIZES = ((1, 1), (2, 4), (3, 8))


@pytest.mark.parametrize(("min_n", "max_n"), SIZES)
def test_outputs_of_others_are_copied_where_they_match_more(min_n: int, max_n: int) -> None:
    dice = random.Random(f"{min_n} {max_n}")
    for _ in range(40):
        other, tokens = ([dice.randrange(3) for _ in range(12)] for _ in range(2))
        drafter = Lookup(min_n, max_n)
        drafter.open([7, 7, *other], 2, b"a").close()
        expected = copied([tokens, other], min_n, max_n)
        assert said(drafter.open(tokens, 1, b"a")) == (None if expected is None else {expected: 1.0})


@given(prompt=ids, course=courses, sizes=st.sampled_from(SIZES))
@settings(max_examples=60)
def test_it_proposes_what_a_fresh_one_proposes(prompt: list[int], course: Course, sizes: tuple[int, int]) -> None:
    check_a_course(lambda: Lookup(*sizes), prompt, course)


def test_only_outputs_are_remembered_and_only_of_sequences_that_ended() -> None:
    drafter = Lookup()
    drafter.open([1, 2, 3, 4, 5, 6], 3, b"a").close()
    drafter.open([5, 6, 7, 8], 0, b"a")  # dropped
    assert said(drafter.open([4, 5], 2, b"a")) == {6: 1}
    assert said(drafter.open([1, 2], 2, b"a")) is None  # of the prompt
    assert said(drafter.open([5, 6], 2, b"a")) is None


def test_nobody_copies_what_came_under_another_id() -> None:
    drafter = Lookup()
    for corpus_id, output in ((b"", [1, 2, 3]), (b"one", [1, 2, 4]), (b"other", [1, 2, 5])):
        drafter.open(output, 0, corpus_id).close()
    assert drafter.corpus.num_tokens == 6
    found = [said(drafter.open([1, 2], 2, corpus_id)) for corpus_id in (b"", b"one", b"other", b"new")]
    assert found == [None, {4: 1}, {5: 1}, None]


def test_no_more_is_remembered_than_configured_and_the_oldest_is_evicted_first() -> None:
    drafter = Lookup(2, 4, corpus_tokens=10)
    for start, corpus_id in ((10, b"a"), (20, b"b"), (30, b"b")):
        drafter.open([start, start + 1, start + 2, start + 3], 0, corpus_id).close()
    assert drafter.corpus.num_tokens == 8
    assert said(drafter.open([10, 11], 2, b"a")) is None and drafter.corpus.index_of(b"a") is None
    assert said(drafter.open([20, 21], 2, b"b")) == {22: 1} and said(drafter.open([30, 31], 2, b"b")) == {32: 1}
    drafter.open(list(range(100, 150)), 0, b"b").close()  # more than all: its end
    assert drafter.corpus.num_tokens == 10
    assert said(drafter.open([138, 139], 2, b"b")) is None and said(drafter.open([140, 141], 2, b"b")) == {142: 1}
    assert said(drafter.open([30, 31], 2, b"b")) is None


def test_a_draft_worker_remembers_an_answer_once_also_if_its_slot_was_opened_again() -> None:
    drafter = Lookup(2, 4)
    slots = OpenSlots(partial(TableSlot, drafter), 2, 100, has_corpus=True)
    params = SamplingParams(max_tokens=20)
    slots.open(1, 5, [1, 2, 3], 2, params, corpus_id=b"a").commit_from(3, [4, 5, 6, 7])
    slots.open(1, 5, [1, 2, 3, 4, 5, 6, 7], 2, params, corpus_id=b"a").commit_from(7, [8])
    assert drafter.corpus.num_tokens == 0
    slots.close(1, 5)
    slots.close(1, 5)
    assert drafter.corpus.num_tokens == 6


def test_a_draft_worker_copies_from_what_an_encoder_reads() -> None:
    """The source is followed before the prompt, and is no output to be remembered."""
    drafter = Lookup(2, 4)
    slots = OpenSlots(partial(TableSlot, drafter), 2, 100, has_sources=True, has_corpus=True)
    source_ids = [30, 31, 32, 33, 34, 0]
    slot = slots.open(1, 5, [1], 1, SamplingParams(max_tokens=20), source_ids=source_ids, corpus_id=b"a")
    assert slot.counts_after([]) is None
    slot.commit_from(1, [31, 32])
    assert [slot.counts_after(path)[0].tolist() for path in ([], [33])] == [[33], [34]]
    slot.commit_from(2, [33])
    assert slot.counts_after([]) is None  # 31 33 came nowhere
    slot.commit_from(1, [31, 32, 33])
    slots.close(1, 5)
    assert drafter.corpus.num_tokens == 3
