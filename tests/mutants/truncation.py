"""What is kept of a slot's cache after a round, who shares its blocks, and who finds them again."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import argument, call, constant, drop, never

POOL, SLOT, ENGINE = "outrider.engine.kv_pool", "outrider.engine.worker:Slot", "outrider.engine.worker"
KV, SLOTS = "tests/unit/outrider/engine/test_kv_pool.py", "tests/unit/outrider/engine/worker/test_slots.py"

TRUNCATION: Faults = {
    (SLOTS,): {
        "the last committed token is not fed again, and its logits are never computed": Fault(
            f"{SLOT}.truncate", constant(1, to="0")
        ),
        "a slot whose drafts were all kept has nothing left to feed": Fault(f"{SLOT}.reconcile", constant(1, to="0")),
        "rejected guesses stay in the cache and every later token is computed after them": Fault(
            f"{SLOT}._agreeing", never()
        ),
        "a past that a message rewrote is not compared with the cache again": Fault(
            f"{SLOT}.commit_from", drop("_num_agreed")
        ),
        "what is fed after a truncate counts as committed unseen": Fault(f"{SLOT}._crop", drop("_num_agreed")),
        "the blocks of a slot that is opened again are lost": Fault(
            f"{ENGINE}:OpenSlots.open", call("free_for_successor", to="_self")
        ),
        "later prompts adopt a cache that a broken forward wrote": Fault(f"{SLOT}.invalidate", drop("withdraw")),
    },
    (KV,): {
        "a forked sequence writes into the block that another reads": Fault(
            f"{POOL}:BlockTable.reserve", never("num_references")
        ),
        "a block is found after other tokens than those it was computed after": Fault(
            f"{POOL}:PrefixCache._find", argument("_next", 0, to="_root(salt)")
        ),
        "who asks under another cache salt learns from the time of its answer what others asked": Fault(
            f"{POOL}:_root", argument("blake2b", 0, to='b""')
        ),
        "a block that later prompts find is written over": Fault(f"{POOL}:BlockTable.reserve", drop("withdraw")),
    },
    (KV, SLOTS): {
        "a truncate keeps a block too many": Fault(f"{POOL}:BlockTable.truncate", call("num_blocks_for", to="_ + 1"))
    },
}
