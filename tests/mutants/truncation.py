"""What is kept of a slot's cache after a round, who shares its blocks, and who finds them again."""

from tests.mutants import Mutant
from tests.mutants.operators import argument, call, constant, drop, never

POOL, SLOT, ENGINE = "outrider.engine.kv_pool", "outrider.engine.worker:Slot", "outrider.engine.worker"
KV, SLOTS, PREFIX = (
    "tests/unit/outrider/engine/test_kv_pool.py",
    "tests/unit/outrider/engine/worker/test_slots.py",
    "tests/unit/outrider/engine/test_kv_pool.py",
)

TRUNCATION = (
    Mutant(
        f"{SLOT}.truncate",
        constant(1, to="0"),
        "the last committed token is not fed again, and its logits are never computed",
        (SLOTS,),
    ),
    Mutant(
        f"{SLOT}.reconcile", constant(1, to="0"), "a slot whose drafts were all kept has nothing left to feed", (SLOTS,)
    ),
    Mutant(
        f"{SLOT}._agreeing",
        never(),
        "rejected guesses stay in the cache and every later token is computed after them",
        (SLOTS,),
    ),
    Mutant(
        f"{SLOT}.commit_from",
        drop("_num_agreed"),
        "a past that a message rewrote is not compared with the cache again",
        (SLOTS,),
    ),
    Mutant(f"{SLOT}._crop", drop("_num_agreed"), "what is fed after a truncate counts as committed unseen", (SLOTS,)),
    Mutant(
        f"{ENGINE}:OpenSlots.open",
        call("free_for_successor", to="_self"),
        "the blocks of a slot that is opened again are lost",
        (SLOTS,),
    ),
    Mutant(f"{SLOT}.invalidate", drop("withdraw"), "later prompts adopt a cache that a broken forward wrote", (SLOTS,)),
    Mutant(
        f"{POOL}:BlockTable.reserve",
        never("num_references"),
        "a forked sequence writes into the block that another reads",
        (KV,),
    ),
    Mutant(
        f"{POOL}:BlockTable.truncate",
        call("num_blocks_for", to="_ + 1"),
        "a truncate keeps a block too many",
        (KV, SLOTS),
    ),
    Mutant(
        f"{POOL}:PrefixCache._find",
        argument("_next", 0, to="_root(salt)"),
        "a block is found after other tokens than those it was computed after",
        (PREFIX,),
    ),
    Mutant(
        f"{POOL}:_root",
        argument("blake2b", 0, to='b""'),
        "who asks under another cache salt learns from the time of its answer what others asked",
        (PREFIX,),
    ),
    Mutant(
        f"{POOL}:BlockTable.reserve", drop("withdraw"), "a block that later prompts find is written over", (PREFIX,)
    ),
)
