"""Which blocks hold which prefix, so that a prompt that begins like an earlier one is not fed again.

A full block is known by the digest of its tokens and of the digest before it, so that a digest stands for everything
from the first token on. The first digest stands for a salt: prefixes are found only under the salt that they were
published with. Digests are 256 bits of BLAKE2b: two prefixes with the same one cannot be made on purpose, so tokens
are not compared. Used by the engine thread through `KVPool.prefix`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine.kv_pool import BlockTable, KVPool

DIGEST_BYTES = 32


class PrefixCache:
    """Published blocks by digest. A published block is full of committed tokens and not written until withdrawn."""

    def __init__(self, pool: KVPool) -> None:
        self.enabled = True
        """Set before anything is published. When false nothing is ever published, and so nothing found."""
        self._pool = pool
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_published(self) -> int:
        return len(self._digest_of)

    def is_published(self, block: int) -> bool:
        return block in self._digest_of

    def adopt(self, table: BlockTable, ids: Sequence[int], salt: bytes = b"") -> int:
        """Begin the empty `table` with the longest published prefix of `ids`; returns how many tokens it has then.

        Whole blocks, at most len(ids) tokens: pass the tokens without the last one, whose logits must be computed.
        """
        assert not table.blocks, f"the table holds {table.num_tokens} tokens already"
        found = self._find(ids, salt)
        table.blocks = [block for _, block in found]
        table.digests = [_root(salt), *(digest for digest, _ in found)]
        table.num_tokens = len(found) * table.block_size
        self._pool.share(table.blocks)
        return table.num_tokens

    def publish(self, table: BlockTable, ids: Sequence[int], salt: bytes = b"") -> None:
        """Let later prompts find the table's full blocks. Costs the blocks that are new since the last call.

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
        """Forget what the block contains: it is about to be written. Nothing when it is not published."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def _publish_block(self, table: BlockTable, index: int, digest: bytes) -> None:
        own, published = table.blocks[index], self._block_of.get(digest)
        if published is None:
            self.withdraw(own)  # of another salt
            self._block_of[digest], self._digest_of[own] = own, digest
        elif published != own:
            self._pool.share([published])
            self._pool.release([own])
            table.blocks[index] = published

    def _find(self, ids: Sequence[int], salt: bytes) -> list[tuple[bytes, int]]:
        """-> (digest, block) of each block found."""
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
