"""A table's follower of a slot's tokens, in the target."""

import pytest

from outrider.drafting.ngram import Ngram
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.followers import TableDrafter
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.worker.jobs import OpenJob
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.params import SamplingParams
from tests.unit.outrider.engine.worker.opened import make_table

PARAMS = SamplingParams(temperature=0.0, max_tokens=20)
VOCAB_SIZE = 32


def followed(drafter: TableDrafter, ids: list[int], prediction: tuple[int, ...] = ()) -> Slot:
    slot = make_table().open(1, 1, ids, len(ids), PARAMS)
    drafter.open(OpenJob(1, 1, tuple(ids), len(ids), PARAMS, print, prediction_ids=prediction), slot)
    return slot


def proposed(drafter: TableDrafter, slot: Slot, max_tokens: int = 3) -> list[int]:
    state = SamplingState(PARAMS, slot.committed, ())
    return drafter.propose(slot, state, SlotAcceptance(RankAcceptance()), max_tokens).tree.ids


def test_what_followed_earlier_is_proposed_after_every_change_of_the_slot() -> None:
    drafter = TableDrafter(Ngram(), VOCAB_SIZE)
    slot = followed(drafter, [1, 2, 3, 4, 5, 1, 2])
    assert drafter.has_next(slot) and proposed(drafter, slot) == [3, 4, 5]
    assert proposed(drafter, slot, 2) == [3, 4]
    slot.commit_from(7, [3])
    assert list(drafter.append(slot, [3])) == []
    assert proposed(drafter, slot) == [4, 5, 1]
    slot.commit_from(7, [9, 4])  # the 3 is taken back
    drafter.commit(slot, 7)
    assert proposed(drafter, slot) == [5, 1, 2]


def test_a_slot_that_changed_unnoted_is_our_own_bug() -> None:
    drafter = TableDrafter(Ngram(), VOCAB_SIZE)
    slot = followed(drafter, [1, 2, 1])
    slot.commit_from(3, [2])
    with pytest.raises(AssertionError, match="3 tokens followed of 4"):
        proposed(drafter, slot)


def test_a_prediction_marks_each_token_that_it_predicted() -> None:
    drafter = TableDrafter(None, VOCAB_SIZE)
    slot = followed(drafter, [1, 2], (7, 8, 9))
    assert proposed(drafter, slot) == [7, 8, 9]
    slot.commit_from(2, [7, 8])
    assert list(drafter.append(slot, [7, 8])) == [True, True]
    assert proposed(drafter, slot) == [9]
    slot.commit_from(4, [5])
    assert list(drafter.append(slot, [5])) == [False]
    assert proposed(drafter, slot) == []
