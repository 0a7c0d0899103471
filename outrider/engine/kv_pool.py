"""Which cache blocks belong to whom, on host integers alone. The storage is that of a path (`outrider.engine.paths`).

A block holds `block_size` consecutive tokens of one sequence, in every layer. Blocks are counted by reference, so a
forked table shares its prefix and copies a block only when it writes into one that somebody else reads. A block is
held (by tables), idle (nobody holds it, but the prefix cache knows what it contains) or blank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grpc

from outrider.engine.prefix_cache import PrefixCache
from outrider.wire.errors import OutriderError

TRASH_BLOCK = 0
"""Never handed out: padding is read from it and written to it, and always finite, so that no product meets a NaN."""


class OutOfBlocks(OutriderError):
    """The cache is full of what running requests hold: one of them must wait or give its blocks up."""

    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retryable = True


class KVPool:
    """References of `num_blocks` blocks, numbered from 1. Owned by the engine thread."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks is {num_blocks} and block_size {block_size}, both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix = PrefixCache(self)
        self.num_evictions = 0
        """Idle blocks given up for new tokens, since the start."""
        self._blank = list(range(num_blocks, 0, -1))  # a stack: the lowest first, so one request stays contiguous
        self._idle: dict[int, None] = {}  # in the order in which they were let go: the first is evicted first
        self._references = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, idle ones included."""
        return len(self._blank) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Idle blocks: no table holds them, a later prompt may adopt them."""
        return len(self._idle)

    @property
    def num_in_use(self) -> int:
        """Blocks that tables hold."""
        return self.num_blocks - self.num_free

    def num_references(self, block: int) -> int:
        """Tables that hold the block; 0 when it is free."""
        return self._references[block]

    def new_table(self) -> BlockTable:
        return BlockTable(self)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Blank blocks first, then the idle ones that were let go longest ago. Raises OutOfBlocks, taking none."""
        if count > self.num_free:
            raise OutOfBlocks(
                f"the KV cache has {self.num_free} of {self.num_blocks} blocks free and {count} are needed; "
                "raise kv_cache_tokens or lower max_slots"
            )
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One holder more for each, which is held or idle."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._idle, f"block {block} is free and cannot be shared"
                del self._idle[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> int:
        """One holder less for each, in a table's order; returns how many of them became free."""
        num_freed = 0
        for block in reversed(blocks):  # blank ones are handed out again in order; of idle ones the tail goes first
            assert self._references[block] > 0, f"block {block} is freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                num_freed += 1
                if self.prefix.is_published(block):
                    self._idle[block] = None
                else:
                    self._blank.append(block)
        return num_freed

    def _evict(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        self.prefix.withdraw(block)
        self.num_evictions += 1
        return block


class BlockTable:
    """The blocks of one sequence, in order. Token t lies in `blocks[t // block_size]` at `t % block_size`."""

    __slots__ = ("_pool", "blocks", "digests", "num_tokens")

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []
        self.num_tokens = 0
        """Tokens stored, or about to be by the forward that reserved them."""
        self.digests: list[bytes] = []
        """The prefix cache's: see `PrefixCache.publish`."""

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    def storage_indices(self, tokens: Iterable[int]) -> list[int]:
        """Where each of these tokens lies, counted in tokens over all blocks."""
        size = self.block_size
        return [self.blocks[token // size] * size + token % size for token in tokens]

    def reserve(self, num_tokens: int) -> list[tuple[int, int]]:
        """Make room for tokens `self.num_tokens` to `num_tokens - 1`, which the caller is about to write.

        Returns the (from, to) block copies that the storage must make first: a partly filled last block that another
        table reads too. One that is published but held by nobody else is withdrawn instead. Raises OutOfBlocks,
        leaving the table unchanged.
        """
        if num_tokens <= self.num_tokens:
            return []
        pool, first = self._pool, self.num_tokens // self._pool.block_size
        written = self.blocks[first : first + 1]  # in part
        copied = [block for block in written if pool.num_references(block) > 1]
        num_new = pool.num_blocks_for(num_tokens) - len(self.blocks)
        fresh = pool.allocate(len(copied) + num_new)
        if copied:
            pool.release(copied)
            self.blocks[first] = fresh[0]
        elif written:
            pool.prefix.withdraw(written[0])
        self.blocks.extend(fresh[len(copied) :])
        self.num_tokens = num_tokens
        return [(copied[0], fresh[0])] if copied else []

    def rewrite(self, start: int, end: int) -> list[tuple[int, int]]:
        """The stored tokens `start` to `end - 1` are about to be written over: their blocks become this table's alone.

        Returns the (from, to) block copies that the storage must make first, and withdraws what is published. Raises
        OutOfBlocks, leaving the table unchanged.
        """
        assert start <= end <= self.num_tokens, f"tokens {start} to {end} of {self.num_tokens}"
        pool = self._pool
        written = range(start // pool.block_size, pool.num_blocks_for(end) if end > start else 0)
        shared = [index for index in written if pool.num_references(self.blocks[index]) > 1]
        fresh = pool.allocate(len(shared))
        copies = [(self.blocks[index], to) for index, to in zip(shared, fresh, strict=True)]
        for index, (before, to) in zip(shared, copies, strict=True):
            self.blocks[index] = to
            pool.release([before])
        for index in written:
            pool.prefix.withdraw(self.blocks[index])
        del self.digests[start // pool.block_size + 1 :]
        return copies

    def truncate(self, num_tokens: int) -> int:
        """Keep at most `num_tokens`; returns the blocks that became free. A partly filled block stays."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}, must be at least 0")
        if num_tokens >= self.num_tokens:
            return 0
        self.num_tokens = num_tokens
        del self.digests[num_tokens // self.block_size + 1 :]
        keep = self._pool.num_blocks_for(num_tokens)
        dropped = self.blocks[keep:]
        del self.blocks[keep:]
        return self._pool.release(dropped)

    def fork(self) -> BlockTable:
        """A second table over the same tokens; either may go on, neither sees the other's writes."""
        other = BlockTable(self._pool)
        other.blocks, other.num_tokens = list(self.blocks), self.num_tokens
        other.digests = list(self.digests)
        self._pool.share(other.blocks)
        return other

    def free(self) -> int:
        """Drop everything; returns the blocks that became free. The table can be used again."""
        return self.truncate(0)
