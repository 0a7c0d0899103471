"""What is kept of a slot's cache after a round, who shares its blocks, and who finds them again."""

from tests.mutants import Mutant

POOL, SLOTS_FILE = "outrider/engine/kv_pool.py", "outrider/engine/worker/slots.py"
KV, SLOTS, PREFIX = "tests/unit/test_kv_pool.py", "tests/unit/test_slots.py", "tests/unit/test_prefix_cache.py"

TRUNCATION = (
    Mutant(
        SLOTS_FILE,
        "        return self._crop(max(committed_len - 1 - self.first, 0))",
        "        return self._crop(max(committed_len - self.first, 0))",
        "the last committed token is not fed again, and its logits are never computed",
        (SLOTS,),
    ),
    Mutant(
        SLOTS_FILE,
        "        agreed = self._agreeing(min(len(self.cached), len(self.ids) - 1 - self.first))",
        "        agreed = self._agreeing(min(len(self.cached), len(self.ids) - self.first))",
        "a slot whose drafts were all kept has nothing left to feed",
        (SLOTS,),
    ),
    Mutant(
        SLOTS_FILE,
        "            if cached_id != committed_id:\n                break\n",
        "",
        "rejected guesses stay in the cache and every later token is computed after them",
        (SLOTS,),
    ),
    Mutant(
        SLOTS_FILE,
        "        self._num_agreed = min(self._num_agreed, max(0, base_len - self.first))",
        "        pass",
        "a past that a message rewrote is not compared with the cache again",
        (SLOTS,),
    ),
    Mutant(
        SLOTS_FILE,
        "        self._num_agreed = min(self._num_agreed, len(self.cached))",
        "        pass",
        "what is fed after a truncate counts as committed unseen",
        (SLOTS,),
    ),
    Mutant(
        SLOTS_FILE,
        "            self._slots.pop(key).make_way()",
        "            self._slots.pop(key)",
        "the blocks of a slot that is opened again are lost",
        (SLOTS,),
    ),
    Mutant(
        SLOTS_FILE,
        "            self._pool.prefix.withdraw(block)\n        self._crop(0)",
        "            pass\n        self._crop(0)",
        "later prompts adopt a cache that a broken forward wrote",
        (SLOTS,),
    ),
    Mutant(
        POOL,
        "        copied = [block for block in written if pool.num_references(block) > 1]",
        "        copied: list[int] = []",
        "a forked sequence writes into the block that another reads",
        (KV,),
    ),
    Mutant(
        POOL,
        "        dropped = self.blocks[keep:]\n        del self.blocks[keep:]",
        "        dropped = self.blocks[keep + 1 :]\n        del self.blocks[keep + 1 :]",
        "a truncate keeps a block too many",
        (KV, SLOTS),
    ),
    Mutant(
        POOL,
        "            digest = _next(digest, ids[start : start + size])\n            block",
        "            digest = _next(_root(salt), ids[start : start + size])\n            block",
        "a block is found after other tokens than those it was computed after",
        (PREFIX,),
    ),
    Mutant(
        POOL,
        "    return blake2b(salt, digest_size",
        '    return blake2b(b"", digest_size',
        "who asks under another cache salt learns from the time of its answer what others asked",
        (PREFIX,),
    ),
    Mutant(
        POOL,
        "        elif written:\n            pool.prefix.withdraw(written[0])\n",
        "",
        "a block that later prompts find is written over",
        (PREFIX,),
    ),
)
