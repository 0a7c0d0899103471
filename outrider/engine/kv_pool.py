"""Block tables, the pool from which their blocks come, and the prefix cache: integers on the host, without storage.

The attention path has the storage. A block holds `block_size` consecutive tokens of one sequence, in every layer.
Blocks are counted by reference: tables with the same prefix share blocks, and a table copies a block only before it
writes into one that another table uses, too. A block is in use (a table holds it), idle (no table holds it, but the
prefix cache can find it) or blank.

The prefix cache saves feeding a prompt that begins like an earlier one. A full block is found by a digest of its tokens
and of the previous block's digest, so that a digest stands for all tokens from the first one on. The first digest is
that of a salt: a prefix is found only under the salt with which it was published. Digests are 256 bits of BLAKE2b. Two
prefixes of equal digest cannot be made on purpose, so tokens are not compared. Used by the engine thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import grpc

from outrider.wire.errors import OutriderError

DIGEST_BYTES = 32
"""Size of a block's digest in bytes: 256 bits, so that two prefixes of equal digest cannot be made on purpose."""


class PrefixCache:
    """Index of blocks by a digest of their tokens and of all tokens before them. If a prompt begins with the same
    tokens, its block table adopts these blocks, i.e. uses them too. A block in the index is called published. It is
    full of committed tokens, and is not written to until it is withdrawn from the index.
    """

    def __init__(self, pool: KVPool) -> None:
        self.enabled = True
        """Whether `publish` adds blocks to the index; False = prefix caching is off. Set it before publishing."""
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def is_published(self, block: int) -> bool:
        """Return whether the block is published. If it is, `adopt` can find it."""
        return block in self._digest_of

    def adopt(self, table: BlockTable, ids: Sequence[int], salt: bytes = b"") -> int:
        """Put the blocks of the longest published prefix of `ids` into the empty `table`. Return the number of tokens
        in these blocks.

        Only whole blocks are adopted, at most len(ids) tokens. Pass the prompt's tokens without the last one, whose
        logits must be computed. salt: the salt under which the prefix was published.
        """
        assert not table.blocks, f"the table holds {table.num_tokens} tokens already"
        table.digests, table.blocks = self._find(ids, salt)
        table.num_tokens = len(table.blocks) * table.block_size
        self._pool.share(table.blocks)
        return table.num_tokens

    def publish(self, table: BlockTable, ids: Sequence[int], salt: bytes = b"") -> None:
        """Publish the table's full blocks, so that later prompts can adopt them.

        ids: committed tokens of the sequence; they must equal the tokens in the table, as far as both lists go. salt: a
        prefix is found only under the salt with which it was published. If a block of the same contents is published
        already, the table takes that block and releases its own. Only blocks that are new since the last call are
        hashed.
        """
        # block_size 4, 10 committed tokens, digests [salt, block 0]: block 1 is published, block 2 is not full
        if not self.enabled:
            return
        root = _root(salt)
        if table.digests[:1] != [root]:
            table.digests = [root]
        size = table.block_size
        num_full = min(len(ids), table.num_tokens) // size
        for index in range(len(table.digests) - 1, num_full):
            digest = _next(table.digests[index], ids[index * size : (index + 1) * size])
            table.digests.append(digest)
            self._publish_block(table, index, digest)

    def withdraw(self, block: int) -> None:
        """Remove the block from the index, since it is about to be written to. Does nothing if it is not published."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def _publish_block(self, table: BlockTable, index: int, digest: bytes) -> None:
        own = table.blocks[index]
        published = self._block_of.get(digest)
        if published is None:
            self.withdraw(own)  # it may be published under another salt
            self._block_of[digest] = own
            self._digest_of[own] = digest
        elif published != own:
            self._pool.share([published])
            self._pool.release([own])
            table.blocks[index] = published

    def _find(self, ids: Sequence[int], salt: bytes) -> tuple[list[bytes], list[int]]:
        # Returns one digest more than blocks: the first is the salt's.
        digest = _root(salt)
        digests = [digest]
        blocks: list[int] = []
        if not self._block_of:
            return digests, blocks
        size = self._pool.block_size
        for start in range(0, len(ids) - size + 1, size):
            digest = _next(digest, ids[start : start + size])
            block = self._block_of.get(digest)
            if block is None:
                break
            digests.append(digest)
            blocks.append(block)
        return digests, blocks


def _root(salt: bytes) -> bytes:
    return blake2b(salt, digest_size=DIGEST_BYTES, person=b"outrider salt").digest()


def _next(digest: bytes, ids: Sequence[int]) -> bytes:
    return blake2b(digest + array("i", ids).tobytes(), digest_size=DIGEST_BYTES, person=b"outrider block").digest()


TRASH_BLOCK = 0
"""Number of the block that is never allocated. Padding is written to it, and read from it where a mask hides what was
read. Its contents are always finite, since a hidden NaN would still make the result NaN."""


class OutOfBlocks(OutriderError):
    """Raised if a KV cache has fewer free blocks than are needed: a running request has to wait or to be preempted."""

    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retryable = True


class KVPool:
    """Blocks of one KV cache, numbered from 1, with the number of block tables that hold each. Owned by the engine
    thread.

    `block_size`: number of tokens in a block. Raises ValueError for a pool without a block or a block without a token.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks is {num_blocks} and block_size {block_size}, both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix = PrefixCache(self)
        self.num_evictions = 0
        """Number of idle blocks that were evicted for new tokens, since the pool was created."""
        self._blank = list(range(num_blocks, 0, -1))  # a stack: the lowest first, so one request stays contiguous
        self._idle: dict[int, None] = {}  # in the order in which they were released: the first is evicted first
        self._references = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can return: blank blocks, which have no contents, and idle blocks, which no
        table holds but a later prompt may adopt.
        """
        return len(self._blank) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Number of idle blocks: no table holds them, but a later prompt may adopt them."""
        return len(self._idle)

    @property
    def num_in_use(self) -> int:
        """Number of blocks that tables hold."""
        return self.num_blocks - self.num_free

    def num_references(self, block: int) -> int:
        """Return the number of tables that hold the block; 0 if it is free."""
        return self._references[block]

    def new_table(self) -> BlockTable:
        """Return an empty table for blocks of this pool."""
        return BlockTable(self)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens of one sequence need."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Return the numbers of `count` blocks for a table that now holds them. Blocks without contents are taken
        first, then the idle blocks (which no table holds) that were released longest ago.

        Raises OutOfBlocks if fewer are free, and then allocates none.
        """
        if count > self.num_free:
            raise OutOfBlocks(
                f"the KV cache has {self.num_free} of {self.num_blocks} blocks free and {count} are needed; "
                "raise kv_cache_tokens or lower max_slots"
            )
        blocks: list[int] = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block = self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more block table that holds each of these blocks. A block must be in use, or idle: no table holds
        it, and its contents are still cached.
        """
        for block in blocks:
            if self._references[block] == 0:
                assert block in self._idle, f"block {block} is free and cannot be shared"
                del self._idle[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> int:
        """Count one table fewer that holds each of these blocks (in its order). Return how many became free."""
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
    """Block table: the numbers of the blocks of one sequence, in order. Token t lies in `blocks[t // block_size]` at
    `t % block_size`.

    Example: block_size 4, blocks [7, 2], 6 tokens: tokens 0 to 3 lie in block 7, tokens 4 and 5 in block 2 at 0 and 1.
    """

    __slots__ = ("_pool", "blocks", "digests", "num_tokens")

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []
        self.num_tokens = 0
        """Number of the sequence's tokens for which blocks are reserved. It includes tokens whose keys and values the
        next forward will write."""
        self.digests: list[bytes] = []
        """Digest of the salt, followed by the digests of the table's published blocks in order. `PrefixCache.publish`
        extends the list."""

    @property
    def block_size(self) -> int:
        """Number of tokens in a block."""
        return self._pool.block_size

    def storage_indices(self, tokens: Iterable[int]) -> list[int]:
        """Return the storage index of each token of `tokens`, which are given by their index in the sequence."""
        # block_size 4, blocks [7, 2], tokens [0, 5]: [28, 9]
        size = self.block_size
        return [self.blocks[token // size] * size + token % size for token in tokens]

    def reserve(self, num_tokens: int) -> list[tuple[int, int]]:
        """Allocate the blocks of the tokens from `self.num_tokens` to `num_tokens - 1`, before these are written.

        Returns the pairs (from, to) of blocks that the storage must copy first: at most one, for a partly filled last
        block that another table uses, too. A partly filled block that only this table uses is withdrawn from the prefix
        cache instead. Raises OutOfBlocks if there are too few free blocks, and leaves the table unchanged.
        """
        # block_size 4, 6 tokens in blocks [7, 2], room for 9: two tables read 2, blocks become [7, 5, 6], copy (2, 5)
        if num_tokens <= self.num_tokens:
            return []
        pool = self._pool
        first = self.num_tokens // pool.block_size
        written = self.blocks[first : first + 1]  # the partly filled block, if there is one
        shared: list[int] = []
        if written and pool.num_references(written[0]) > 1:
            shared = written
        num_new = pool.num_blocks_for(num_tokens) - len(self.blocks)
        fresh = pool.allocate(len(shared) + num_new)
        copies: list[tuple[int, int]] = []
        if shared:
            pool.release(shared)
            self.blocks[first] = fresh[0]
            copies.append((shared[0], fresh[0]))
        elif written:
            pool.prefix.withdraw(written[0])
        self.blocks.extend(fresh[len(shared) :])
        self.num_tokens = num_tokens
        return copies

    def rewrite(self, start: int, end: int) -> list[tuple[int, int]]:
        """Make this table the only holder of the blocks of the stored tokens from `start` to `end - 1`, before these
        are overwritten.

        Returns the pairs (from, to) of blocks that the storage must copy first, and withdraws published blocks. Raises
        OutOfBlocks if there are too few free blocks, and leaves the table unchanged.
        """
        assert start <= end <= self.num_tokens, f"tokens {start} to {end} of {self.num_tokens}"
        pool = self._pool
        written = range(0)
        if end > start:
            written = range(start // pool.block_size, pool.num_blocks_for(end))
        shared = [index for index in written if pool.num_references(self.blocks[index]) > 1]
        fresh = pool.allocate(len(shared))
        copies: list[tuple[int, int]] = []
        for index, block in zip(shared, fresh, strict=True):
            copies.append((self.blocks[index], block))
            pool.release([self.blocks[index]])
            self.blocks[index] = block
        for index in written:
            pool.prefix.withdraw(self.blocks[index])
        del self.digests[start // pool.block_size + 1 :]
        return copies

    def truncate(self, num_tokens: int) -> int:
        """Cut the table to at most `num_tokens` tokens. Return the number of blocks that became free.

        A partly filled block stays. Raises ValueError for a negative number.
        """
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
        """Empty the table. Return the number of blocks that became free. The table can be used again."""
        return self.truncate(0)
