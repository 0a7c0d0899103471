"""Block bookkeeping: nothing is lost, nothing is handed out twice, forks never write into each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.kv_pool import TRASH_BLOCK, KVPool, OutOfBlocks
from tests.forked_table import forked


def test_reserve_takes_whole_blocks_and_reports_tokens() -> None:
    pool = KVPool(8, block_size=4)
    table = pool.new_table()
    assert table.reserve(5) == []
    assert (len(table.blocks), table.num_tokens, pool.num_in_use) == (2, 5, 2)
    table.reserve(8)
    assert len(table.blocks) == 2
    table.reserve(3)  # room is there already
    assert table.num_tokens == 8


def test_the_trash_block_is_never_handed_out() -> None:
    table = KVPool(5, block_size=1).new_table()
    table.reserve(5)
    assert TRASH_BLOCK not in table.blocks


def test_one_sequence_stays_consecutive_through_rollbacks() -> None:
    pool = KVPool(10, block_size=2)
    table = pool.new_table()
    for length in (3, 9, 14):
        table.reserve(length)
        table.truncate(length - 3)
    first = table.blocks[0]
    assert table.blocks == list(range(first, first + len(table.blocks)))


def test_out_of_blocks_leaves_the_table_as_it_was() -> None:
    pool = KVPool(3, block_size=4)
    table, other = pool.new_table(), pool.new_table()
    other.reserve(4)
    table.reserve(4)
    before = (list(table.blocks), table.num_tokens, pool.num_in_use)
    with pytest.raises(OutOfBlocks, match=r"1 of 3 blocks free and 2 are needed"):
        table.reserve(12)
    assert (table.blocks, table.num_tokens, pool.num_in_use) == before


def test_truncate_keeps_a_partly_filled_block_and_is_idempotent() -> None:
    pool = KVPool(8, block_size=4)
    table = pool.new_table()
    table.reserve(14)
    assert table.truncate(5) == 2
    assert (len(table.blocks), table.num_tokens) == (2, 5)
    assert table.truncate(5) == 0
    assert table.truncate(9) == 0  # longer than it is: nothing grows
    assert table.num_tokens == 5
    assert table.free() == 2
    assert pool.num_in_use == 0
    with pytest.raises(ValueError, match="num_tokens is -1"):
        table.truncate(-1)


def test_a_fork_copies_the_shared_partial_block_when_it_writes() -> None:
    pool = KVPool(8, block_size=4)
    table = pool.new_table()
    table.reserve(6)
    fork = forked(pool, table)
    shared = list(table.blocks)
    copies = fork.reserve(7)
    assert copies == [(shared[1], fork.blocks[1])] and fork.blocks[0] == shared[0] and fork.blocks[1] != shared[1]
    assert table.reserve(7) == []  # the only holder by now
    assert table.blocks == shared
    assert pool.num_in_use == 3


def test_a_fork_rolled_back_into_a_shared_block_copies_it_too() -> None:
    pool = KVPool(8, block_size=4)
    table = pool.new_table()
    table.reserve(8)
    fork = forked(pool, table)
    assert fork.truncate(5) == 0
    assert fork.reserve(6) == [(table.blocks[1], fork.blocks[1])]
    assert fork.truncate(4) == 1
    assert fork.reserve(5) == []  # begins a block of its own
    assert table.free() == 1 and fork.free() == 2


def test_stored_tokens_are_rewritten_in_blocks_of_their_own() -> None:
    pool = KVPool(8, block_size=4)
    table = pool.new_table()
    table.reserve(14)
    pool.prefix.publish(table, range(14))  # blocks 0 to 2
    fork = forked(pool, table)
    before = list(table.blocks)
    assert table.rewrite(6, 6) == []
    copies = table.rewrite(6, 12)  # blocks 1 and 2
    assert copies == [(before[1], table.blocks[1]), (before[2], table.blocks[2])]
    assert fork.blocks == before and (table.blocks[0], table.blocks[3]) == (before[0], before[3])
    assert [pool.prefix.is_published(block) for block in table.blocks] == [True, False, False, False]
    assert len(table.digests) == 2 and table.num_tokens == 14
    assert table.free() == 2
    assert fork.rewrite(13, 14) == [] and fork.rewrite(1, 2) == []  # the only holder by now
    assert [pool.prefix.is_published(block) for block in fork.blocks] == [False, True, True, False]


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        KVPool(num_blocks, block_size)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["new", "reserve", "truncate", "fork", "free"]), st.integers(0, 7), st.integers(0, 40)),
    max_size=60,
)


@settings(max_examples=100)
@given(ACTIONS, st.integers(1, 5))
def test_references_always_equal_the_tables_that_hold_a_block(
    actions: list[tuple[str, int, int]], block_size: int
) -> None:
    pool = KVPool(12, block_size)
    tables = [pool.new_table()]
    for action, which, num_tokens in actions:
        table = tables[which % len(tables)]
        if action == "new":
            tables.append(pool.new_table())
        elif action == "fork":
            tables.append(forked(pool, table))
        elif action == "free":
            table.free()
        elif action == "truncate":
            table.truncate(num_tokens)
        else:
            try:
                table.reserve(num_tokens)
            except OutOfBlocks:
                continue
        held = [block for t in tables for block in t.blocks]
        assert all(pool.num_references(block) == held.count(block) for block in range(1, 13))
        assert pool.num_in_use == len(set(held))
        assert all(len(t.blocks) == -(-t.num_tokens // block_size) for t in tables)
    for table in tables:
        table.free()
    assert pool.num_in_use == 0
