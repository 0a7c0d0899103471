"""Which piece of a prompt goes in a forward, and how many rows of logits it takes."""

from outrider.engine.worker.scheduler import _piece
from outrider.engine.worker.slots import PromptScores, needs_prefill
from tests.unit.outrider.engine.worker.opened import PROMPT, feed, make_table, open_slot, params


def test_a_prompt_that_is_scored_is_fed_whole_and_goes_on_after_its_memory_was_taken() -> None:
    """Nothing is taken from the prefix cache before it is scored, and what was scored is not scored again."""
    table = make_table()
    ids = list(range(10, 30))
    first = table.open(1, 1, ids, len(ids), params())
    feed(first, ids[:-1])
    first.reconcile()
    first.publish()
    slot = table.open(1, 2, ids, len(ids), params())
    slot.scoring = PromptScores(len(ids) - 1, 0)
    assert slot.adopt() == 0 and needs_prefill(slot)
    piece = _piece(slot, 10, 100)
    assert (piece.row.num_new, piece.row.num_logits) == (10, 10)
    slot.table.reserve(10)
    slot.fed_committed(piece.row.new_ids)
    slot.scoring.found += [None] * 10
    slot.free_cache()
    assert slot.adopt() == 8, "whole blocks of what is scored"
    piece = _piece(slot, 100, 100)
    assert (piece.row.num_new, piece.row.num_logits) == (11, 9)
    slot.table.reserve(19)
    slot.fed_committed(piece.row.new_ids)
    slot.scoring.found += [None] * 9
    assert not slot.num_unscored and not needs_prefill(slot)


def test_the_end_of_a_prompt_that_is_scored_does_not_ride_along() -> None:
    slot = open_slot()
    assert not needs_prefill(slot)
    slot.scoring = PromptScores(len(PROMPT) - 1, 0)
    assert needs_prefill(slot) and _piece(slot, 100, 100).row.num_logits == 3
