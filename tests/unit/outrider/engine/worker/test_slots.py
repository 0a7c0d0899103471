"""Slots: what a message says is committed, what stays cached, and who gets how much memory."""

from outrider.engine.worker.slots import Slot, SlotTable
from tests.unit.outrider.engine.worker.opened import PROMPT, feed, make_table, open_slot, params


def test_rejected_draft_tokens_are_truncated_and_their_blocks_freed() -> None:
    slot = open_slot()
    feed(slot, [5, 6, 7, 8, 20, 21, 22, 23, 24])
    slot.commit_from(4, [20, 30])
    assert slot.reconcile() == 5
    assert slot.cached == [5, 6, 7, 8, 20] and slot.table.num_tokens == 5 and len(slot.table.blocks) == 2


def test_reconcile_never_keeps_the_last_committed_token() -> None:
    slot = open_slot()
    feed(slot, PROMPT)
    assert slot.reconcile() == 3
    assert slot.reconcile() == 3


def test_a_rewritten_past_is_compared_again() -> None:
    slot = open_slot()
    slot.commit_from(4, [1, 2, 3])
    feed(slot, [5, 6, 7, 8, 1, 2])
    assert slot.reconcile() == 6
    slot.commit_from(4, [9, 2, 3])
    assert slot.reconcile() == 4


def test_what_is_fed_after_a_truncate_is_compared_again() -> None:
    slot = open_slot()
    slot.commit_from(4, [1, 2, 3])
    feed(slot, [5, 6, 7, 8, 1, 2])
    assert slot.reconcile() == 6
    slot.truncate(5)
    feed(slot, [9, 2])
    assert slot.reconcile() == 4


def test_truncate_is_idempotent_and_leaves_committed_alone() -> None:
    slot = open_slot()
    feed(slot, [5, 6, 7, 8, 20, 21, 22, 23, 24])
    assert slot.truncate(5) == 2
    assert slot.truncate(5) == 0
    assert slot.truncate(100) == 0
    assert (slot.cached, slot.committed) == (PROMPT, PROMPT)
    assert slot.truncate(0) == 1 and slot.cached == []


def test_open_replaces_and_frees_the_older_slot() -> None:
    table = make_table()
    slot = open_slot(table)
    feed(slot, PROMPT)
    newer = open_slot(table)
    assert table.get(1, 1) is newer and newer.cached == [] and table.num_in_use == 1
    assert table.pool.num_in_use == 0


def begin(table: SlotTable, slot_id: int, ids: list[int], salt: bytes = b"") -> Slot:
    """Opened, and fed what the prefix cache did not have."""
    slot = table.open(1, slot_id, ids, len(ids), params(), salt)
    slot.adopt()
    new = ids[len(slot.cached) : -1]
    slot.table.reserve(len(ids) - 1)
    slot.fed_committed(new)
    return slot


LONG = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
"""Two blocks of 4, and two tokens more."""


def test_a_prompt_that_begins_alike_adopts_whole_blocks_and_shares_them() -> None:
    table = make_table()
    first, second = begin(table, 1, LONG), begin(table, 2, [*LONG[:9], 1, 2, 3])
    assert (first.num_adopted, second.num_adopted) == (0, 8)
    assert second.table.blocks[:2] == first.table.blocks[:2] and table.pool.num_in_use == 4
    assert second.cached == [*LONG[:9], 1, 2] and second.reconcile() == 11


def test_draft_tokens_are_never_published() -> None:
    table = make_table()
    slot = begin(table, 1, LONG)
    feed(slot, [14, 20, 21, 22, 23, 24])  # the last committed one and five guesses: three blocks and a half are full
    table.open(1, 2, [*LONG, 20, 21, 22], 13, params()).adopt()
    assert table.get(1, 2).num_adopted == 8  # type: ignore[union-attr]
    slot.commit_from(10, [20, 30])
    assert slot.free_cache() > 0
    assert begin(table, 3, [*LONG, 20, 21, 22]).num_adopted == 8
    assert begin(table, 4, [*LONG, 20, 30, 1, 2]).num_adopted == 8


def test_what_was_committed_is_found_again_after_memory_was_given_up() -> None:
    table = make_table()
    slot = begin(table, 1, LONG)
    feed(slot, [14, 20, 21])
    slot.commit_from(10, [20, 21, 22])
    assert slot.free_cache() == 3 and slot.cached == [] and table.pool.num_in_use == 0
    assert slot.adopt() == 12 and slot.num_adopted == 0, "what is reported is what the slot first found"
    assert slot.cached == slot.committed[:12]


def test_a_closed_slots_answer_is_found_again() -> None:
    table = make_table()
    slot = begin(table, 1, LONG)
    feed(slot, [14, 20, 21])
    slot.commit_from(10, [20, 21, 22])
    table.close(1, 1)
    assert begin(table, 2, [*LONG, 20, 21, 22]).num_adopted == 12


def test_what_may_be_wrong_is_never_found_again() -> None:
    table = make_table()
    slot = begin(table, 1, LONG)
    slot.invalidate()
    assert slot.cached == [] and table.pool.num_in_use == 0
    assert begin(table, 2, LONG).num_adopted == 0


def test_an_owner_that_left_leaves_nothing() -> None:
    table = make_table()
    for owner, slot_id in ((1, 1), (1, 2), (2, 1)):
        feed(table.open(owner, slot_id, PROMPT, 4, params()), PROMPT)
    assert [slot.key for slot in table] == [(1, 1), (1, 2), (2, 1)]
    assert table.close_owner(1) == 2
    assert table.close_owner(1) == 0
    assert table.pool.num_in_use == 1
    assert table.close(2, 1) == 1 and table.close(2, 1) == 0
