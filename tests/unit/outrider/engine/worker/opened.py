"""Slots over a pool without a model."""

from __future__ import annotations

from outrider.engine.worker.slots import Slot


def feed(slot: Slot, ids: list[int]) -> None:
    """What a forward does to the bookkeeping."""
    slot.table.reserve(len(slot.cached) + len(ids))
    slot.fed(ids)
