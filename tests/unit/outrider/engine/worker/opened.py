"""Slots over a pool without a model."""

from outrider.engine.kv_pool import KVPool
from outrider.engine.worker.slots import Slot, SlotTable
from outrider.wire.requests.params import SamplingParams

PROMPT = [5, 6, 7, 8]


def params(max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def make_table(num_blocks: int = 64, max_slots: int = 4, context_limit: int = 64) -> SlotTable:
    return SlotTable(KVPool(num_blocks, block_size=4), max_slots, context_limit)


def open_slot(table: SlotTable | None = None) -> Slot:
    return (table or make_table()).open(1, 1, PROMPT, len(PROMPT), params())


def feed(slot: Slot, ids: list[int]) -> None:
    """What a forward does to the bookkeeping."""
    slot.table.reserve(len(slot.cached) + len(ids))
    slot.fed(ids)
