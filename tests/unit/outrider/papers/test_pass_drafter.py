"""PaSS in the target: behind what look-ahead ids are fed, and what is read of them, over scripted logits."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.papers.pass_drafter import PassDrafter
from outrider.wire.errors import ConfigError
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.settings.config import TargetConfig, load

VOCAB, NUM_AHEAD = 20, 2
PARAMS = SamplingParams(temperature=0.0, max_tokens=96)


def slot_of(committed: Sequence[int], max_len: int = 99) -> Any:
    return SimpleNamespace(key=(1, 1), committed=list(committed), max_len=max_len, num_prompt=1, params=PARAMS)


def rows_of(drafter: PassDrafter, slot: Any, parents: Sequence[int]) -> ExtraRows:
    found = drafter.extra_rows(slot, parents)
    assert found is not None and found.drafter is Drafter.PASS
    return found


def drafted(drafter: PassDrafter, slot: Any, most: int = 9) -> list[int]:
    state = SamplingState(PARAMS, slot.committed[:1], ())
    state.set_output(slot.committed[1:])
    return drafter.propose(slot, state, SlotAcceptance(RankAcceptance()), most).tree.ids


def test_ids_follow_each_other_after_each_token_at_which_a_step_may_end() -> None:
    """Of a chain, and of a tree."""
    own = PassDrafter(VOCAB, NUM_AHEAD)
    for parents in ([-1, 0], [-1, -1]):
        rows = rows_of(own, slot_of([5, 6]), parents)
        assert rows.ids == [VOCAB, VOCAB + 1] * 3
        assert rows.parents == [-1, 2, 0, 4, 1, 6]


def test_near_the_end_of_an_answer_only_those_are_fed_of_which_there_may_be_drafts() -> None:
    """The target says the last token itself, and the next one, too."""
    own = PassDrafter(VOCAB, NUM_AHEAD)
    slot = slot_of([5] * 6, max_len=9)  # one more draft after the next token
    assert rows_of(own, slot, [-1]).ids == [VOCAB] and own.extra_rows(slot_of([5] * 7, max_len=9), []) is None
    assert rows_of(own, slot_of([5] * 5, max_len=9), [-1, 0]).ids == [VOCAB, VOCAB + 1, VOCAB]


def test_a_step_feeds_no_more_than_it_may_and_the_first_drafts_come_first() -> None:
    own = PassDrafter(VOCAB, 4)
    found = [rows_of(own, slot_of([5, 6]), range(-1, num - 1)) for num in range(40)]
    assert [len(each.ids) for each in found] == [min(4 * (num + 1), 64) for num in range(40)]
    assert found[-1].parents[4 * 3] == 2


@pytest.mark.parametrize(("path", "rows"), [([], [0, 1]), ([0], [2, 3]), ([0, 1], [4, 5])])
def test_what_is_drafted_are_the_tokens_after_the_last_accepted_one(path: list[int], rows: list[int]) -> None:
    own, slot = PassDrafter(VOCAB, NUM_AHEAD), slot_of([5, 6])
    beside = rows_of(own, slot, [-1, 0])
    own.read(slot, 9.0 * torch.eye(6, VOCAB), path, beside)
    assert not own.has_next(slot) and not drafted(own, slot)
    assert own._logits._pending, "nobody waits for a copy that is not read"
    slot.committed += [1] * (len(path) + 1)
    assert own.has_next(slot) and drafted(own, slot) == rows and drafted(own, slot, 1) == rows[:1]
    own.commit(slot, len(slot.committed))
    assert own.has_next(slot)
    own.commit(slot, len(slot.committed) - 1)
    assert not own.has_next(slot), "other tokens may be there now"


def test_where_nothing_was_fed_nothing_is_reported() -> None:
    own, slot = PassDrafter(VOCAB, 4), slot_of([5, 6])
    own.read(slot, torch.zeros(64, VOCAB), range(20), rows_of(own, slot, range(-1, 19)))
    slot.committed += [1] * 21
    assert not own.has_next(slot)
    own.read(slot, torch.zeros(4, VOCAB), [], rows_of(own, slot, []))
    slot.committed.append(1)
    assert own.has_next(slot)
    own.close(slot.key, is_ended=True)
    assert not own.has_next(slot)


def test_embeddings_of_a_split_target_are_refused() -> None:
    with pytest.raises(ConfigError, match="lookahead_embeddings is 'f' and tensor_parallel 2"):
        load(TargetConfig, ["--model", "x", "--lookahead-embeddings", "f", "--tensor-parallel", "2"])
