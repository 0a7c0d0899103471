"""Drafters of counts, held against counting anew at every token."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from outrider.drafting.tables import Bigram, Counts, Ngram, Table, Unigram


def as_dict(counts: Counts | None) -> dict[int, int] | None:
    if counts is None:
        return None
    ids, numbers = counts
    assert ids.tolist() == sorted(set(ids.tolist())) and (numbers > 0).all()
    return dict(zip(ids.tolist(), numbers.tolist(), strict=True))


def counted(ids: list[int], orders: tuple[int, ...], history: int) -> dict[int, int] | None:
    """What followed the longest of the last tokens that was followed by anything, within the last `history`."""
    window = ids[-history:]
    for order in sorted(orders, reverse=True):
        tail, found = window[len(window) - order + 1 :], Counter[int]()
        if len(tail) < order - 1:
            continue
        for at in range(len(window) - order + 1):
            if window[at : at + order - 1] == tail:
                found[window[at + order - 1]] += 1
        if found:
            return dict(found)
    return None


@pytest.mark.parametrize("orders", [(2, 3, 4), (2,), (4,), (3, 2)])
@pytest.mark.parametrize("history", [5, 40, 512])
def test_ngrams_are_those_of_the_last_tokens(orders: tuple[int, ...], history: int) -> None:
    dice = random.Random(f"{orders} {history}")
    prompt = [dice.randrange(4) for _ in range(dice.randrange(60))]
    known, ids = Ngram(orders, history).begin(prompt), list(prompt)
    for _ in range(200):
        assert as_dict(known.next()) == counted(ids, orders, history)
        ids.append(dice.randrange(4))
        known.append(ids[-1])


def test_a_repeated_text_is_known_by_heart() -> None:
    known, text = Ngram().begin([1, 2, 3, 4, 5] * 3), [1, 2, 3, 4, 5] * 4
    for token_id in text:
        assert as_dict(known.next()) == {token_id: as_dict(known.next())[token_id]}  # nothing else may follow
        known.append(token_id)


def test_two_sequences_know_nothing_of_each_other() -> None:
    table = Ngram()
    one, other = table.begin([1, 2, 1, 2, 1]), table.begin([1, 3, 1, 3, 1])
    assert as_dict(one.next()) == {2: 1} and as_dict(other.next()) == {3: 1}  # trigrams: (2, 1) and (3, 1)


def test_bigrams_and_unigrams_of_a_text() -> None:
    text = [1, 2, 1, 3, 1, 2]
    bigram, unigram = Bigram(text).begin([9, 1]), Unigram(text).begin([9, 1])
    assert as_dict(bigram.next()) == {2: 2, 3: 1}
    bigram.append(3)
    assert as_dict(bigram.next()) == {1: 1}
    bigram.append(7)  # never seen
    assert as_dict(bigram.next()) == as_dict(unigram.next()) == {1: 3, 2: 2, 3: 1}


@pytest.mark.parametrize("table", [Unigram, Bigram])
def test_a_text_without_tokens_is_refused(table: type[Table]) -> None:
    with pytest.raises(ValueError, match="no token"):
        table([])  # type: ignore[call-arg]
