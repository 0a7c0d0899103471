"""Load what a draft's folder holds: a model, one that fills masks, or a head of a target. On the engine thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from draft_service.head_slot import ContextSlot, HeadSlot, RowSlot
from draft_service.translated_slot import make_slot
from outrider.engine.drafters import make_drafters, rows_ahead
from outrider.engine.heads.block_path import BlockHeadPath
from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.kinds import DraftKind, is_same, kind_of, pard_token
from outrider.engine.heads.loader import LoadedHead, LoadedMedusa, load_head, load_medusa
from outrider.engine.heads.opening import OpeningMap
from outrider.engine.heads.target_files import TargetFiles
from outrider.engine.heads.wiring import Outcome, Seen, score_head, score_medusa
from outrider.engine.loading.loaded import Loaded, load
from outrider.engine.loading.tokenizer_files import tokenizer_files
from outrider.engine.speculation.growth import OpenAhead
from outrider.engine.worker.slots import OpenSlots, SlotTable
from outrider.engine.worker.worker_handle import WorkerState
from outrider.v1 import common_pb2 as pb
from outrider.wire.drafters import Drafter
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.log import get_logger
from outrider.wire.settings.config import DraftConfig

log = get_logger(__name__)


@dataclass
class ModelState(Loaded):
    """A model. Where it has no encoder it drafts for targets of other vocabularies, too."""

    translations: Callable[[], Sequence[pb.Translation]] = field(default=tuple)
    open_ahead: OpenAhead | None = None
    """Who has rows fed beside the nodes of its slots."""

    @property
    def translates(self) -> bool:
        return not self.runner.facts.decoder_start_ids

    def info(self) -> pb.WorkerInfo:
        info = super().info()
        info.translates = self.translates
        info.translations.extend(self.translations())
        return info


@dataclass
class PardState(Loaded):
    """A model that fills masks."""

    mask_id: int = field(kw_only=True)
    searches_beams: ClassVar[bool] = False


@dataclass
class HeadState(Loaded):
    """A head that is run over rows of the target's features, token by token or block by block."""

    head: LoadedHead = field(kw_only=True)
    num_layers: int = field(kw_only=True)
    """Of the target."""
    needs_features: ClassVar[bool] = True
    searches_beams: ClassVar[bool] = False

    @property
    def opening(self) -> OpeningMap:
        return self.head.opening

    def score(self, seen: Seen) -> Outcome:
        return score_head(self.head, seen, self.num_layers)

    def info(self) -> pb.WorkerInfo:
        info = super().info()
        info.trees = True  # also of what a block says, though its path runs none
        return info


@dataclass
class MedusaState(WorkerState):
    """Heads over the target's newest row."""

    heads: LoadedMedusa = field(kw_only=True)
    num_layers: int = field(kw_only=True)
    """Of the target."""
    needs_features: ClassVar[bool] = True

    @property
    def opening(self) -> OpeningMap:
        return self.heads.opening

    def score(self, seen: Seen) -> Outcome:
        return score_medusa(self.heads, seen, self.num_layers)

    def info(self) -> pb.WorkerInfo:
        facts, info = self.heads.facts, super().info()
        info.MergeFrom(
            pb.WorkerInfo(
                model_id=facts.model_id,
                vocab_size=facts.vocab_size,
                dtype=facts.dtype,
                device=facts.device,
                attention_path="none",
                eos_token_ids=facts.eos_token_ids,
                num_parameters=facts.num_parameters,
                trees=True,
                tensor_parallel=1,
            )
        )
        return info


AnyHeadState = HeadState | MedusaState


def load_draft(config: DraftConfig, epoch: int, on_lost: Callable[[OutriderError], None]) -> WorkerState:
    """Raises ConfigError naming what is missing or does not fit."""
    files = Checkpoint(config.model, config.allow_pickle)
    kind = kind_of(files, config.target_model)
    if kind is not DraftKind.MODEL and config.drafted_by != "none":
        raise ConfigError(
            f"drafted_by is {config.drafted_by!r}, and {config.model} is no model that drafts token by token from ids "
            "alone: what follows a guess cannot be known beside it; leave drafted_by out",
            param="drafted_by",
        )
    match kind:
        case DraftKind.MODEL:
            if config.target_model is not None and is_same(config.model, config.target_model):
                log.warning(
                    "the draft %s is the target itself, with no MTP head in it: nothing gets faster", config.model
                )
            return _model_state(config, load(config, epoch, on_lost))
        case DraftKind.PARD:
            model = load(config, epoch, on_lost)
            return PardState(
                config, epoch, model.slots, model.tokenizer, runner=model.runner, mask_id=pard_token(files)
            )
        case DraftKind.MEDUSA:
            return _load_medusa(config, epoch)
        case _:
            return _load_head(config, epoch, kind)


def _model_state(config: DraftConfig, loaded: Loaded) -> ModelState:
    """Give slots of other vocabularies a class of their own."""
    slots, tokenizer, runner = loaded.slots, loaded.tokenizer, loaded.runner
    if not runner.facts.decoder_start_ids:
        limit = runner.facts.context_limit
        slots = SlotTable(runner.pool, config.max_slots, limit, partial(make_slot, limit))
    open_ahead = None
    if config.drafted_by != "none":
        by = Drafter(config.drafted_by)
        table = make_drafters((by,), None, tokenizer.tokenizer_json, runner.facts.vocab_size)[by]
        open_ahead = rows_ahead(table)
        log.info("what %s draws for targets of its own tokens is guessed by %s", config.model, config.drafted_by)
    return ModelState(config, loaded.epoch, slots, tokenizer, runner=runner, close=loaded.close, open_ahead=open_ahead)


def _load_head(config: DraftConfig, epoch: int, kind: DraftKind) -> HeadState:
    target = _target_of(config)
    head = load_head(config, target, config.allow_pickle, kind)
    pool, limit = head.runner.pool, head.runner.facts.context_limit
    pool.prefix.enabled = config.prefix_caching
    slot_class = ContextSlot if isinstance(head.path, BlockHeadPath) else HeadSlot
    slots = SlotTable(pool, config.max_slots, limit, partial(slot_class, head.opening.spec.width))
    num_layers = TargetFiles(target).num_layers
    return HeadState(
        config, epoch, slots, tokenizer_files(target), runner=head.runner, head=head, num_layers=num_layers
    )


def _load_medusa(config: DraftConfig, epoch: int) -> MedusaState:
    target = _target_of(config)
    heads = load_medusa(config, target, config.allow_pickle)
    slots = OpenSlots(RowSlot, config.max_slots, heads.facts.context_limit)
    num_layers = TargetFiles(target).num_layers
    return MedusaState(config, epoch, slots, tokenizer_files(target), heads=heads, num_layers=num_layers)


def _target_of(config: DraftConfig) -> str:
    if config.target_model is None:
        raise ConfigError(
            f"{config.model} is a draft head, and target_model is missing: give the folder of the target that it was "
            "trained for, with --target-model",
            param="target_model",
        )
    return config.target_model
