"""How much of a slot's tokens is fed before its step, and which slots wait for that."""

import pytest

from outrider.engine.worker.decisions import Need, SlotState
from outrider.engine.worker.jobs import MAX_NARROW


def state(committed: int, cached: int, want: Need = Need.RUN, blocks: int = 1, to_encode: int = 0) -> SlotState:
    return SlotState((1, 1), want, committed, cached, committed + 4, blocks, num_to_encode=to_encode)


@pytest.mark.parametrize(
    ("committed", "cached", "to_encode", "num_to_feed"),
    [
        (MAX_NARROW, 0, 0, 0),  # all of them go in the step itself
        (MAX_NARROW + 1, 0, 0, MAX_NARROW),  # the last one always goes in the step
        (100, 30, 0, 69),
        (100, 84, 0, 0),
        (1, 0, 40, 40),  # the source first
        (100, 0, 40, 40),
    ],
)
def test_the_last_token_is_never_fed_before_the_step(
    committed: int, cached: int, to_encode: int, num_to_feed: int
) -> None:
    asked = state(committed, cached, to_encode=to_encode)
    assert (asked.num_to_feed, asked.num_to_read) == (num_to_feed, committed + to_encode)


@pytest.mark.parametrize(
    ("want", "committed", "blocks", "is_waiting"),
    [
        (Need.RUN, 9, 0, True),  # to be admitted
        (Need.RUN, 9, 1, False),  # to run at once
        (Need.RUN, 99, 1, True),  # to be fed
        (Need.PREFILL, 99, 0, True),
        (Need.PREFILL, 9, 0, False),
        (Need.NOTHING, 99, 0, False),
        (Need.DORMANT, 99, 1, False),
    ],
)
def test_who_waits_to_be_admitted_or_fed(want: Need, committed: int, blocks: int, is_waiting: bool) -> None:
    assert state(committed, 0, want, blocks).is_waiting is is_waiting


def test_a_dormant_slot_does_not_keep_its_memory() -> None:
    held = [state(9, 8, want, blocks).has_memory for want in (Need.NOTHING, Need.DORMANT) for blocks in (0, 2)]
    assert held == [False, True, False, False]
