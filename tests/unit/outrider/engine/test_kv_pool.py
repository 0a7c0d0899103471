"""The pool of blocks: nothing is lost or handed out twice, and what is found again of whom."""

from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.engine.kv_pool import TRASH_BLOCK, BlockTable, KVPool, OutOfBlocks
from tests.forked_table import forked


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


SIZE = 4


def published(pool: KVPool, ids: list[int], salt: bytes = b"") -> BlockTable:
    """A table that holds `ids` and has published its full blocks."""
    table = pool.new_table()
    table.reserve(len(ids))
    pool.prefix.publish(table, ids, salt)
    return table


def match(pool: KVPool, ids: list[int], salt: bytes = b"") -> list[int]:
    """The blocks that a prompt of `ids` would begin with, were it adopted: nothing is held by looking."""
    _, blocks = pool.prefix._find(ids, salt)
    return blocks


def test_an_ended_requests_full_blocks_are_found_again() -> None:
    pool = KVPool(8, SIZE)
    first = published(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    blocks = list(first.blocks)
    first.free()
    assert (pool.num_in_use, pool.num_cached, pool.num_free) == (0, 2, 8)
    second = pool.new_table()
    assert pool.prefix.adopt(second, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]) == 8
    assert (second.blocks, second.num_tokens) == (blocks[:2], 8)
    assert (pool.num_in_use, pool.num_cached, pool.num_free) == (2, 0, 6)


def test_a_block_counts_only_after_the_same_tokens() -> None:
    pool = KVPool(8, SIZE)
    published(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    assert len(match(pool, [1, 1, 1, 1, 2, 2, 2, 2])) == 2
    assert match(pool, [2, 2, 2, 2]) == []
    assert match(pool, [3, 1, 1, 1, 2, 2, 2, 2]) == []
    assert len(match(pool, [1, 1, 1, 1, 2, 2, 2, 3])) == 1
    assert len(match(pool, [1, 1, 1, 1, 2, 2, 2])) == 1  # whole blocks of what was asked for


@pytest.mark.parametrize("other", [b"", b"tenant-b", b"tenant-a "])
def test_another_salt_finds_nothing(other: bytes) -> None:
    pool = KVPool(8, SIZE)
    published(pool, [1, 2, 3, 4], b"tenant-a")
    assert len(match(pool, [1, 2, 3, 4], b"tenant-a")) == 1
    assert match(pool, [1, 2, 3, 4], other) == []


def num_published(pool: KVPool) -> int:
    return sum(pool.prefix.is_published(block) for block in range(1, pool.num_blocks + 1))


def test_a_prefix_loses_its_tail_first_and_the_longest_unused_before_others() -> None:
    pool = KVPool(6, SIZE)
    old, new = published(pool, [1] * 12), published(pool, [2] * 8)
    old.free()
    new.free()
    table = pool.new_table()
    table.reserve(8)  # one blank block, one idle
    assert pool.num_evictions == 1
    assert len(match(pool, [1] * 12)) == 2
    table.reserve(16)
    assert (len(match(pool, [1] * 12)), len(match(pool, [2] * 8))) == (0, 2)


NUM_BLOCKS = 7
NUM_SEQUENCES = 4
Entry = tuple[bytes, tuple[int, ...]]
"""What the KV of a token depends on: whose it is, and every token up to it."""
which = st.integers(0, NUM_SEQUENCES - 1)
some_ids = st.sampled_from([[0], [1], [0, 0], [0, 0, 0, 0], [0, 1, 1], [0] * 6, [0, 0, 0, 1, 1]])


class Sequence:
    def __init__(self, table: BlockTable, salt: bytes) -> None:
        self.table = table
        self.salt = salt
        self.ids: list[int] = []

    def entry(self, position: int) -> Entry:
        return self.salt, tuple(self.ids[: position + 1])


class CacheMachine(RuleBasedStateMachine):
    """Any order of what workers do to tables, against a storage that remembers what was written where."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(NUM_BLOCKS, 2)
        self.storage: dict[int, list[Entry | None]] = {block: [None, None] for block in range(NUM_BLOCKS + 1)}
        self.living = [Sequence(self.pool.new_table(), salt) for salt in (b"", b"", b"", b"x")]
        self.known: dict[int, list[Entry | None]] = {}
        """Published blocks before the last step, and what they held."""
        self.withdrawn: set[Entry] = set()
        """Prefixes whose only holder wrote into them: what continues them can no longer be found."""

    @rule(index=which, ids=some_ids)
    def write(self, index: int, ids: list[int]) -> None:
        sequence = self.living[index]
        table, start, size = sequence.table, len(sequence.ids), self.pool.block_size
        before, was_published = list(table.blocks), [self.pool.prefix.is_published(block) for block in table.blocks]
        contents = {block: list(entries) for block, entries in self.storage.items()}
        try:
            copies = table.reserve(start + len(ids))
        except OutOfBlocks:
            assert (table.blocks, table.num_tokens) == (before, start)
            assert self.pool.num_free < self.pool.num_blocks_for(start + len(ids)) - len(before) + 1
            return
        for source, to in copies:
            self.storage[to] = contents[source]
        for block, was in zip(before, was_published, strict=True):
            if was and not self.pool.prefix.is_published(block):
                self.withdrawn |= {entry for entry in contents[block] if entry is not None}
        sequence.ids += ids
        for position in range(start, len(sequence.ids)):
            self.storage[table.blocks[position // size]][position % size] = sequence.entry(position)

    @rule(index=which, keep=st.integers(0, 12))
    def truncate(self, index: int, keep: int) -> None:
        sequence, free = self.living[index], self.pool.num_free
        freed = sequence.table.truncate(keep)
        assert self.pool.num_free == free + freed
        del sequence.ids[keep:]

    @rule(index=which, num_dropped=st.integers(1, 3), ids=some_ids)
    def rewrite(self, index: int, num_dropped: int, ids: list[int]) -> None:
        self.truncate(index, max(len(self.living[index].ids) - num_dropped, 0))
        self.write(index, ids)

    @rule(index=which)
    def free(self, index: int) -> None:
        self.living[index].table.free()
        self.living[index].ids.clear()

    @rule(index=which, other=which)
    def fork(self, index: int, other: int) -> None:
        if index == other:
            return
        self.free(other)
        sequence = self.living[index]
        self.living[other] = Sequence(forked(self.pool, sequence.table), sequence.salt)
        self.living[other].ids = list(sequence.ids)

    @rule(index=which, num_guesses=st.sampled_from([0, 0, 0, 1, 3]))
    def publish(self, index: int, num_guesses: int) -> None:
        sequence = self.living[index]
        ids = sequence.ids[: max(len(sequence.ids) - num_guesses, 0)]
        self.pool.prefix.publish(sequence.table, ids, sequence.salt)
        assert match(self.pool, ids, sequence.salt) == sequence.table.blocks[: len(ids) // 2]

    @rule(index=which, ids=st.lists(some_ids, max_size=3).map(lambda parts: [*chain.from_iterable(parts)]))
    def begin(self, index: int, ids: list[int]) -> None:
        self.free(index)
        sequence = self.living[index]
        num_tokens = self.pool.prefix.adopt(sequence.table, ids, sequence.salt)
        assert num_tokens % 2 == 0 and num_tokens <= len(ids)
        sequence.ids = ids[:num_tokens]

    @invariant()
    def counts_add_up(self) -> None:
        held = [block for sequence in self.living for block in sequence.table.blocks]
        assert all(self.pool.num_references(block) == held.count(block) for block in range(NUM_BLOCKS + 1))
        assert self.pool.num_in_use == len(set(held)) == NUM_BLOCKS - self.pool.num_free
        assert TRASH_BLOCK not in held and not self.pool.prefix.is_published(TRASH_BLOCK)
        idle = [b for b in range(1, NUM_BLOCKS + 1) if self.pool.prefix.is_published(b) and b not in held]
        assert self.pool.num_cached == len(idle)

    @invariant()
    def every_table_sees_its_own_tokens(self) -> None:
        for sequence in self.living:
            table = sequence.table
            assert table.num_tokens == len(sequence.ids) and len(table.blocks) == -(-len(sequence.ids) // 2)
            for position in range(len(sequence.ids)):
                seen = self.storage[table.blocks[position // 2]][position % 2]
                assert seen == sequence.entry(position)

    @invariant()
    def published_blocks_keep_their_contents(self) -> None:
        now = {b: list(e) for b, e in self.storage.items() if self.pool.prefix.is_published(b)}
        assert len(now) == num_published(self.pool)
        written = [block for block in now if block in self.known and self.known[block] != now[block]]
        assert not written, f"blocks {written} were written while they were published"
        self.known = now

    @invariant()
    def a_tail_goes_before_its_head(self) -> None:
        ends = {entries[-1] for block, entries in self.storage.items() if self.pool.prefix.is_published(block)}
        assert len(ends) == num_published(self.pool), "the same contents are published twice"
        for salt, ids in (end for end in ends if end is not None):
            head = (salt, ids[:-2])
            assert len(ids) == 2 or head in ends or any((salt, ids[:n]) in self.withdrawn for n in range(1, len(ids)))

    def teardown(self) -> None:
        for sequence in self.living:
            sequence.table.free()
        assert (self.pool.num_in_use, self.pool.num_free) == (0, NUM_BLOCKS)
        assert len(set(self.pool.allocate(NUM_BLOCKS))) == NUM_BLOCKS
        assert num_published(self.pool) == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=40)


def test_one_sequence_stays_consecutive_through_rollbacks() -> None:
    pool = KVPool(10, block_size=2)
    table = pool.new_table()
    for length in (3, 9, 14):
        table.reserve(length)
        table.truncate(length - 3)
    first = table.blocks[0]
    assert table.blocks == list(range(first, first + len(table.blocks)))
