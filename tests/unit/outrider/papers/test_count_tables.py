"""Drafters that have read a text."""

import pytest

from outrider.papers.count_tables import Bigram, Unigram
from tests.unit.outrider.drafting.drafting import as_dict, said


def test_bigrams_and_unigrams_of_a_text() -> None:
    text = [1, 2, 1, 3, 1, 2]
    bigram, unigram = Bigram(text).open([9, 1], 2), Unigram(text).open([9, 1], 2)
    assert said(bigram) == {2: 2, 3: 1}
    bigram.append([3])
    assert said(bigram) == {1: 1}
    bigram.append([7])  # never seen
    assert said(bigram) == said(unigram) == {1: 3, 2: 2, 3: 1}
    bigram.truncate(3)
    assert said(bigram) == {1: 1} and bigram.num_tokens == 3


def test_a_walk_continues_after_its_draft_tokens() -> None:
    follower = Bigram([1, 2, 3, 4]).open([1], 1)
    walk = follower.walk()
    for expected in (2, 3, 4):
        assert as_dict(walk.next()) == {expected: 1}
        walk.step(expected)
    assert said(follower) == {2: 1}


@pytest.mark.parametrize("table", [Unigram, Bigram])
def test_a_text_without_tokens_is_refused(table: type[Unigram]) -> None:
    with pytest.raises(ValueError, match="no token"):
        table([])
