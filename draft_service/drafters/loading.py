"""Load the draft's folder: a model, a model that fills masks, or a head of a target. Runs on the engine thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from draft_service.slots.head_slot import HeadSlot
from draft_service.slots.translated_slot import make_slot
from outrider.engine.drafter_table import lookahead_rows_of, make_drafters
from outrider.engine.files.tokenizer_files import tokenizer_files
from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.head_loader import LoadedHead, load_head
from outrider.engine.heads.kinds import MODEL, PARD, HeadKind, is_same, kind_of, pard_block
from outrider.engine.heads.network import BlockShape
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.loaded import ModelWorkerState, describe_model, load
from outrider.engine.model_runner import ModelRunner
from outrider.engine.speculation.growth import OpenAhead
from outrider.engine.worker.open_slots import OpenSlots
from outrider.engine.worker.slots import SlotTable
from outrider.engine.worker.worker_handle import WorkerState
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.requests.drafters import Drafter
from outrider.wire.settings.config import DraftConfig
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)


@dataclass
class ModelState(ModelWorkerState):
    """State of a draft worker with a model, after loading: the model and its slots.

    The model can also draft for targets with another vocabulary, unless it has an encoder or predicts at mask tokens.
    """

    block: BlockShape | None = None
    """Layout of a block of mask tokens, at which the model predicts several tokens in one forward; None for a model
    that drafts one token at a time."""
    shared_vocabularies: list[pb.SharedVocabulary] = field(default_factory=list)
    """Descriptions of what the worker's vocabulary has in common with those of targets with another tokenizer. The
    pairing check with such a target adds one."""
    open_ahead: OpenAhead | None = None
    """Function that creates the look-ahead rows of a slot: guessed tokens that are fed before it is known whether they
    become draft tokens. None if the worker uses no look-ahead rows."""

    @property
    def supports_retokenization(self) -> bool:
        """Whether the worker can draft for targets with another vocabulary."""
        return self.block is None and not self.runner.facts.decoder_start_ids

    def info(self) -> pb.WorkerInfo:
        info = super().info()
        info.supports_beams = info.supports_beams and self.block is None
        info.supports_retokenization = self.supports_retokenization
        info.shared_vocabularies.extend(self.shared_vocabularies)
        return info


@dataclass
class HeadState(WorkerState):
    """State of a draft worker with a head (EAGLE, Medusa or another), after loading."""

    head: LoadedHead = field(kw_only=True)
    needs_features: ClassVar[bool] = True

    @property
    def block(self) -> BlockShape | None:
        return self.head.network.block

    @property
    def runner(self) -> ModelRunner | None:
        return self.head.runner

    def info(self) -> pb.WorkerInfo:
        info = super().info()
        info.MergeFrom(describe_model(self.head.facts, self.runner))
        info.supports_trees = True  # also for a block, though its path runs no trees
        return info


DraftState = ModelState | HeadState


def load_draft(config: DraftConfig, epoch: int, on_lost: Callable[[OutriderError], None]) -> DraftState:
    """Load the model or the head from the folder that the settings name. Runs on the engine thread. Raises
    `ConfigError` naming what is missing or does not fit.

    `epoch`: number of the worker's life. `on_lost`: called with the error if a process of the model's tensor-parallel
    ranks is lost.
    """
    files = Checkpoint(config.model, config.allow_pickle)
    kind = kind_of(files, config.target_model)
    if kind is not MODEL and config.drafted_by != "none":
        raise ConfigError(
            f"drafted_by is {config.drafted_by!r}, and {config.model} is no model that drafts token by token from ids "
            "alone: what follows a guess cannot be known beside it; leave drafted_by out",
            param="drafted_by",
        )
    if kind.network is not None:
        return _load_head(config, epoch, kind)
    block = None
    if kind is PARD:
        block = pard_block(files)
    if config.target_model is not None and is_same(config.model, config.target_model):
        log.warning("the draft %s is the target itself, with no MTP head in it: nothing gets faster", config.model)
    loaded = load(config, epoch, on_lost)
    state = ModelState(config, epoch, loaded.slots, loaded.tokenizer, runner=loaded.runner, block=block)
    if state.supports_retokenization:  # slots with other vocabularies have a class of their own
        limit = state.slots.context_limit
        state.slots = SlotTable(state.runner.pool, config.max_slots, limit, partial(make_slot, limit))
    if config.drafted_by != "none":
        by = Drafter(config.drafted_by)
        table = make_drafters((by,), None, state.tokenizer.tokenizer_json, state.runner.facts.vocab_size)[by]
        state.open_ahead = lookahead_rows_of(table)
        log.info("what %s draws for targets of its own tokens is guessed by %s", config.model, config.drafted_by)
    return state


def _load_head(config: DraftConfig, epoch: int, kind: HeadKind) -> HeadState:
    if config.target_model is None:
        raise ConfigError(
            f"{config.model} is a draft head, and target_model is missing: give the folder of the target that it was "
            "trained for, with --target-model",
            param="target_model",
        )
    head = load_head(config, config.target_model, kind, config.allow_pickle)
    slots: OpenSlots[Any]
    limit = head.facts.context_limit
    make = partial(HeadSlot, head.projection.spec.width, head.network.lag)
    if head.runner is None:
        slots = OpenSlots(partial(make, pool=KVPool(1), has_cache=False), config.max_slots, limit)
    else:
        head.runner.pool.prefix.enabled = config.prefix_caching
        slots = SlotTable(head.runner.pool, config.max_slots, limit, make)
    return HeadState(config, epoch, slots, tokenizer_files(config.target_model), head=head)
