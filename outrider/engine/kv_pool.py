"""Count which sequences hold which cache blocks and which blocks hold which prefix, on host integers alone.

A path holds the storage. A block holds `block_size` consecutive tokens of one sequence, in every layer. Blocks are
counted by reference: tables that begin alike share them, and copy a block only to write into one that another reads.
A block is held (by tables), idle (nobody holds it, but the prefix cache knows what it contains) or blank.

The prefix cache saves feeding a prompt that begins like an earlier one. A full block is known by the digest of its
tokens and of the digest before it, so that a digest stands for everything from the first token on. The first digest
stands for a salt: prefixes are found only under the salt that they were published with. Digests are 256 bits of
BLAKE2b: two prefixes with the same one cannot be made on purpose, so tokens are not compared. Used by the engine
thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import grpc

from outrider.wire.errors import OutriderError

DIGEST_BYTES = 32
"""Bytes of a block's digest."""


class PrefixCache:
    """Finds published blocks by digest. A published block is full of committed tokens, and unwritten until
    withdrawn."""

    def __init__(self, pool: KVPool) -> None:
        self.enabled = True
        """To be set before anything is published. When false nothing is ever published, and so nothing found."""
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def is_published(self, block: int) -> bool:
        return block in self._digest_of

    def adopt(self, table: BlockTable, ids: Sequence[int], salt: bytes = b"") -> int:
        """Begin the empty `table` with the longest published prefix of `ids`; return how many tokens it has then.

        Adopts whole blocks, at most len(ids) tokens: pass the tokens without the last one, whose logits must be
        computed.
        """
        assert not table.blocks, f"the table holds {table.num_tokens} tokens already"
        found = self._find(ids, salt)
        table.blocks = [block for _, block in found]
        table.digests = [_root(salt), *(digest for digest, _ in found)]
        table.num_tokens = len(found) * table.block_size
        self._pool.share(table.blocks)
        return table.num_tokens

    def publish(self, table: BlockTable, ids: Sequence[int], salt: bytes = b"") -> None:
        """Let later prompts find the table's full blocks. Costs as much as the blocks that are new since the last call.

        ids: committed tokens, equal to what the table holds as far as both go. A block whose contents are published
        already is given back in exchange for the published one. `table.digests` keeps the salt's and those of the
        blocks done; truncating the table shortens it.
        """
        if not self.enabled:
            return
        root = _root(salt)
        if table.digests[:1] != [root]:
            table.digests = [root]
        size, num_full = table.block_size, min(len(ids), table.num_tokens) // table.block_size
        for index in range(len(table.digests) - 1, num_full):
            digest = _next(table.digests[index], ids[index * size : (index + 1) * size])
            table.digests.append(digest)
            self._publish_block(table, index, digest)

    def withdraw(self, block: int) -> None:
        """Forget what the block contains: it is about to be written. Does nothing when it is not published."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def _publish_block(self, table: BlockTable, index: int, digest: bytes) -> None:
        own, published = table.blocks[index], self._block_of.get(digest)
        if published is None:
            self.withdraw(own)  # it may be published under another salt
            self._block_of[digest], self._digest_of[own] = own, digest
        elif published != own:
            self._pool.share([published])
            self._pool.release([own])
            table.blocks[index] = published

    def _find(self, ids: Sequence[int], salt: bytes) -> list[tuple[bytes, int]]:
        """Return the (digest, block) of each block found."""
        if not self._block_of:
            return []
        found: list[tuple[bytes, int]] = []
        digest, size = _root(salt), self._pool.block_size
        for start in range(0, len(ids) - size + 1, size):
            digest = _next(digest, ids[start : start + size])
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append((digest, block))
        return found


def _root(salt: bytes) -> bytes:
    return blake2b(salt, digest_size=DIGEST_BYTES, person=b"outrider salt").digest()


def _next(digest: bytes, ids: Sequence[int]) -> bytes:
    return blake2b(digest + array("i", ids).tobytes(), digest_size=DIGEST_BYTES, person=b"outrider block").digest()


TRASH_BLOCK = 0
"""Block that is never handed out: padding is read from it and written to it. It is always finite, so no product
meets a NaN."""


class OutOfBlocks(OutriderError):
    """Raised when running requests hold the whole cache: one of them must wait or give its blocks up."""

    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retryable = True


class KVPool:
    """Counts the references of `num_blocks` blocks, numbered from 1. Owned by the engine thread."""

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
        """Return how many tables hold the block; 0 when it is free."""
        return self._references[block]

    def new_table(self) -> BlockTable:
        return BlockTable(self)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take blank blocks first, then the idle ones that were let go longest ago. Raises OutOfBlocks, taking none."""
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
        """Add one holder to each block, which is held or idle."""
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._idle, f"block {block} is free and cannot be shared"
                del self._idle[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> int:
        """Remove one holder from each block, given in a table's order; return how many of them became free."""
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
        """Digests of its published blocks, kept by `PrefixCache.publish`."""

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    def storage_indices(self, tokens: Iterable[int]) -> list[int]:
        """Return where each of these tokens lies, counted in tokens over all blocks."""
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
        written = self.blocks[first : first + 1]  # the partly filled block
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
        """Make the blocks of the stored tokens `start` to `end - 1`, about to be written over, this table's alone.

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
        """Keep at most `num_tokens`; return how many blocks became free. A partly filled block stays."""
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

    def free(self) -> int:
        """Drop everything; return how many blocks became free. The table can be used again."""
        return self.truncate(0)
