"""Makes the drafter of a draft worker. A new kind of heads that drafts in an existing way needs no change here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draft_service.drafters.block_drafter import MaskDrafter, MedusaDrafter, SequentialDrafter
from draft_service.drafters.feeding import Feeder
from draft_service.drafters.loading import HeadState
from draft_service.drafters.model_drafter import ModelDrafter
from draft_service.drafters.table_drafters import TableState, WorkerTableDrafter
from draft_service.slots.draft_slot import DraftSlot
from outrider.engine.loading.cache_size import default_prefill_tokens
from outrider.engine.speculation.node_drafter import NodeDrafter
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.wire.telemetry.metrics import WorkerMetrics


def create_drafter(
    state: Any,
    keeper: SlotKeeper[Any],
    metrics: WorkerMetrics,
    draft_slots: Mapping[SlotKey, DraftSlot],
) -> NodeDrafter[DraftSlot]:
    """Create the drafter of a worker for what the worker has loaded: a model, a head or tables.

    `state`: a `DraftState` for a model or a head, or a `TableState` for tables. `draft_slots`: the worker's slots by
    key; the caller adds and removes them, and each step sees the present ones.
    """
    if isinstance(state, TableState):
        return WorkerTableDrafter(keeper)
    if state.runner is None:
        return MedusaDrafter(state.head.network, keeper)
    prefill_tokens = state.config.max_prefill_tokens or default_prefill_tokens(state.runner.device)
    feeder = Feeder(state.runner, keeper, metrics, prefill_tokens, draft_slots)
    if isinstance(state, HeadState):
        if state.block is None:
            return ModelDrafter(feeder, state.head.path)
        if getattr(state.head.network, "markov_head", None) is not None:
            return SequentialDrafter(feeder, state.block)
    if state.block is None:
        return ModelDrafter(feeder)
    return MaskDrafter(feeder, state.block)
