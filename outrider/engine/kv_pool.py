"""Which cache blocks belong to whom, on host integers alone. The storage itself is in `dense_attention.py`.

A block holds `block_size` consecutive tokens of one sequence, in every layer. Blocks are counted by reference, so a
forked table shares its prefix and copies a block only when it writes into one that somebody else reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from outrider.wire.errors import OutriderError

TRASH_BLOCK = 0
"""Never handed out and kept at zero: padding reads it, so that no stale NaN reaches a masked product."""


class OutOfBlocks(OutriderError):
    """The cache is full. `SlotTable` promises blocks at `open`, so a running request never sees this."""

    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retryable = True


class KVPool:
    """Free list and reference counts of `num_blocks` blocks, numbered from 1."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks is {num_blocks} and block_size {block_size}, both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks, 0, -1))  # a stack: the lowest first, so one request stays contiguous
        self._references = [0] * (num_blocks + 1)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - len(self._free)

    def num_references(self, block: int) -> int:
        """Tables that hold the block; 0 when it is free."""
        return self._references[block]

    def new_table(self) -> BlockTable:
        return BlockTable(self)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Raises OutOfBlocks, taking none, when fewer than `count` are free."""
        if count > len(self._free):
            raise OutOfBlocks(
                f"the KV cache has {len(self._free)} of {self.num_blocks} blocks free and {count} are needed; "
                "raise kv_cache_tokens or lower max_slots"
            )
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free and cannot be shared"
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> int:
        """One holder less for each; returns how many of them became free."""
        num_freed = 0
        for block in reversed(blocks):  # so that they are handed out again in the same order
            assert self._references[block] > 0, f"block {block} is freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
                num_freed += 1
        return num_freed


class BlockTable:
    """The blocks of one sequence, in order. Token t lies in `blocks[t // block_size]` at `t % block_size`."""

    __slots__ = ("_pool", "blocks", "num_tokens")

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []
        self.num_tokens = 0
        """Tokens stored, or about to be by the forward that reserved them."""

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    def reserve(self, num_tokens: int) -> list[tuple[int, int]]:
        """Make room for tokens `self.num_tokens` to `num_tokens - 1`, which the caller is about to write.

        Returns the (from, to) block copies that the storage must make first: a partly filled last block that another
        table reads too. Raises OutOfBlocks, leaving the table unchanged.
        """
        if num_tokens <= self.num_tokens:
            return []
        pool, first = self._pool, self.num_tokens // self._pool.block_size
        copied = self.blocks[first : first + 1]
        if not copied or pool.num_references(copied[0]) == 1:
            copied = []
        num_new = pool.num_blocks_for(num_tokens) - len(self.blocks)
        fresh = pool.allocate(len(copied) + num_new)
        if copied:
            pool.release(copied)
            self.blocks[first] = fresh[0]
        self.blocks.extend(fresh[len(copied) :])
        self.num_tokens = num_tokens
        return [(copied[0], fresh[0])] if copied else []

    def truncate(self, num_tokens: int) -> int:
        """Keep at most `num_tokens`; returns the blocks that became free. A partly filled block stays."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}, must be at least 0")
        if num_tokens >= self.num_tokens:
            return 0
        self.num_tokens = num_tokens
        keep = self._pool.num_blocks_for(num_tokens)
        dropped = self.blocks[keep:]
        del self.blocks[keep:]
        return self._pool.release(dropped)

    def fork(self) -> BlockTable:
        """A second table over the same tokens; either may go on, neither sees the other's writes."""
        other = BlockTable(self._pool)
        other.blocks, other.num_tokens = list(self.blocks), self.num_tokens
        self._pool.share(other.blocks)
        return other

    def free(self) -> int:
        """Drop everything; returns the blocks that became free. The table can be used again."""
        return self.truncate(0)
