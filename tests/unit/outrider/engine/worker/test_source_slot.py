"""Slots whose model has an encoder."""

import pytest

from outrider.engine.kv_pool import KVPool
from outrider.engine.worker.slots import Slot, SlotTable, needs_prefill
from outrider.engine.worker.source_slot import SourceSlot
from outrider.wire.errors import InvalidRequest
from tests.unit.outrider.engine.worker.opened import feed, make_table, params


def with_sources(num_blocks: int = 64, max_slots: int = 4) -> SlotTable:
    return SlotTable(KVPool(num_blocks, block_size=4), max_slots, 64, SourceSlot, has_sources=True)


def begun(table: SlotTable, slot_id: int, source_ids: list[int], salt: bytes = b"") -> Slot:
    """A slot that has been let begin, its source encoded where the prefix cache did not have it."""
    slot = table.open(1, slot_id, [1], 1, params(), salt, source_ids)
    slot.adopt()
    if slot.num_to_encode:
        assert needs_prefill(slot) and slot.source is not None
        slot.source.table.reserve(slot.source.num_stored)
        slot.fed_committed([])
    return slot


def write(slot: Slot, ids: list[int]) -> None:
    feed(slot, slot.uncached()[:-1] or [slot.committed[-1]])
    slot.commit_from(len(slot.committed), ids)
    feed(slot, slot.uncached()[:-1])
    slot.settle()


def test_a_source_lies_in_blocks_of_its_own_and_goes_with_the_slot() -> None:
    table = with_sources()
    slot = begun(table, 1, [5, 6, 7, 8, 9])
    assert (slot.num_blocks, slot.num_source_blocks, table.num_blocks_in_use) == (2, 2, 2)
    write(slot, [20, 21, 22, 23])
    assert slot.num_blocks == 3
    slot.truncate(1)
    assert (slot.num_blocks, slot.num_to_encode) == (2, 0)  # truncation leaves the source
    assert slot.free_cache() == 2 and slot.num_to_encode == 5  # memory that is taken takes it along
    assert table.close(1, 1) == 0 and table.num_blocks_in_use == 0


def test_answers_to_one_source_share_its_blocks_and_no_other_finds_them() -> None:
    table = with_sources()
    first = begun(table, 1, [5, 6, 7, 8, 9])
    write(first, [20, 21, 22, 23, 24])
    second = begun(table, 2, [5, 6, 7, 8, 9])
    assert second.source is not None and first.source is not None
    assert second.source.table.blocks == first.source.table.blocks and second.num_adopted == 5
    second.commit_from(1, [20, 21, 22, 23, 24])
    second.free_cache()
    assert second.adopt() == 5 + 4  # what was written to the same source
    for source_ids, salt in (([5, 6, 7, 8], b""), ([5, 6, 7, 8, 10], b""), ([5, 6, 7, 8, 9], b"other")):
        other = begun(table, 3, source_ids, salt)
        assert other.num_adopted == 0
        other.commit_from(1, [20, 21, 22, 23, 24])
        other.free_cache()
        assert other.adopt() == len(source_ids)  # its own, and nothing of the decoder's though the ids are the same
        table.close(1, 3)


def test_a_source_of_which_a_part_is_left_is_encoded_again() -> None:
    table = with_sources(num_blocks=9)
    begun(table, 1, list(range(2, 14)))  # 3 blocks
    table.close(1, 1)
    table.pool.allocate(7)  # the blank ones, and one of those
    again = table.open(1, 1, [1], 1, params(), b"", list(range(2, 14)))
    assert again.adopt() == 0 and again.num_to_encode == 12 and not again.num_blocks


def test_what_may_be_wrong_of_a_source_is_found_by_nobody() -> None:
    table = with_sources()
    begun(table, 1, [5, 6, 7]).invalidate()
    assert table.num_blocks_cached == 0
    assert table.open(1, 2, [1], 1, params(), b"", [5, 6, 7]).adopt() == 0


def test_sources_that_cannot_be_read_are_refused() -> None:
    def refused(table: SlotTable, source_ids: list[int], max_tokens: int = 20) -> str:
        with pytest.raises(InvalidRequest) as caught:
            table.open(1, 1, [1], 1, params(max_tokens), b"", source_ids)
        return caught.value.message

    assert "a source of 2 tokens, and this worker reads none without an encoder" in refused(make_table(), [5, 6])
    assert "source_ids is empty" in refused(with_sources(), [])
    assert "a source of 65 tokens, and this worker reads at most 64" in refused(with_sources(), [5] * 65)
    assert "21 tokens and a source of 9 need 9 cache blocks, this worker has 8" in refused(with_sources(8), [5] * 9)
    assert with_sources(9).open(1, 1, [1], 1, params(), b"", [5] * 9).max_cached_len == 21
