"""A slot of an encoder-decoder model, which also keeps the keys and values of its source for cross-attention. No torch.

Both caches are in blocks of one pool, count against one budget, and are freed together when the slot is preempted. The
prefix cache returns entries only for an equal source: a source as a whole, and a decoder's tokens together with the
source to which they attend. Choices with the same source, such as the n of a request, share its blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from outrider.engine.kv_pool import DIGEST_BYTES, KVPool
from outrider.engine.step_plan import EncoderSource
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.params import SamplingParams


class SourceSlot(Slot):
    """Slot of an encoder-decoder model, with its source (the encoder's input). Change the source's block table only
    through the methods.

    The forward that encodes the source fills the table.
    """

    __slots__ = ("_source", "_source_salt", "_stored_ids")

    def __init__(
        self,
        key: SlotKey,
        committed_ids: Sequence[int],
        num_prompt: int,
        params: SamplingParams,
        pool: KVPool,
        cache_salt: bytes = b"",
        *,
        source_ids: Sequence[int],
    ) -> None:
        super().__init__(key, committed_ids, num_prompt, params, pool, _salt(b"decoder", cache_salt, source_ids))
        self._source = EncoderSource(pool.new_table(), source_ids)
        self._source_salt = _salt(b"source", cache_salt, source_ids)
        # The salt identifies the tokens: the ids only number the entries. The last block is full, too.
        self._stored_ids = range(self._source.num_stored)

    @property
    def source(self) -> EncoderSource:
        return self._source

    @property
    def num_source_tokens(self) -> int:
        return len(self._source.ids)

    @property
    def num_blocks(self) -> int:
        return super().num_blocks + len(self._source.table.blocks)

    @property
    def num_source_blocks(self) -> int:
        return self._pool.num_blocks_for(len(self._source.ids))

    @property
    def num_to_encode(self) -> int:
        if self._source.table.blocks:
            return 0
        return len(self._source.ids)

    def adopt(self) -> int:
        """Take over from the prefix cache the source (the encoder's input), if all of it is cached, and the longest
        cached prefix of the committed tokens.

        Returns the number of tokens, of source and committed ones together.
        """
        is_first = self.num_adopted is None
        num_stored = self._pool.prefix.adopt(self._source.table, self._stored_ids, self._source_salt)
        num_source = 0
        if num_stored == len(self._stored_ids):
            num_source = len(self._source.ids)
        else:  # a part of a source is useless
            self._source.table.free()
        num_adopted = num_source + super().adopt()
        if is_first:
            self.num_adopted = num_adopted
        return num_adopted

    def publish(self) -> None:
        super().publish()
        table = self._source.table
        if len(table.digests) <= len(table.blocks) > 0:
            self._pool.prefix.publish(table, self._stored_ids, self._source_salt)

    def free_cache(self) -> int:
        num_in_use = self._pool.num_in_use
        super().free_cache()
        self._source.table.free()
        return num_in_use - self._pool.num_in_use

    def invalidate(self) -> None:
        for block in self._source.table.blocks:
            self._pool.prefix.withdraw(block)
        super().invalidate()
        self._source.table.free()


def _salt(kind: bytes, cache_salt: bytes, source_ids: Sequence[int]) -> bytes:
    """Return the salt under which a source, or tokens that attend to it, are cached: a digest of kind, request's salt
    and source.
    """
    digest = blake2b(blake2b(cache_salt).digest(), digest_size=DIGEST_BYTES, person=kind)
    digest.update(array("i", source_ids).tobytes())
    return digest.digest()
