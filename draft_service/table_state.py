"""What a draft without a model is made of: a tokenizer, what it must know of the target's vocabulary, and a drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from draft_service.table_slot import TableSlot
from outrider.engine.drafters import LookupSizes, make_drafters
from outrider.engine.loaded import tokenizer_of
from outrider.engine.open_slots import OpenSlots
from outrider.engine.vocabulary import Vocabulary, read_vocabulary
from outrider.engine.worker_state import WorkerState
from outrider.v1 import common_pb2 as pb
from outrider.wire import kinds
from outrider.wire.config import DraftConfig
from outrider.wire.errors import OutriderError
from outrider.wire.log import get_logger
from outrider.wire.rpc import check_message_size

log = get_logger(__name__)


@dataclass
class TableState(WorkerState):
    vocabulary: Vocabulary = field(kw_only=True)

    def info(self) -> pb.WorkerInfo:
        """Its id is the drafter's name: what it says is not of any model."""
        assert isinstance(self.config, DraftConfig)
        info = super().info()
        info.MergeFrom(
            pb.WorkerInfo(
                model_id=self.config.drafter,
                vocab_size=self.vocabulary.size,
                device="cpu",
                attention_path=kinds.TABLES,
                eos_token_ids=self.vocabulary.eos_token_ids,
                tensor_parallel=1,
            )
        )
        return info


def load_tables(config: DraftConfig, epoch: int, on_lost: Callable[[OutriderError], None]) -> TableState:
    """On the engine thread. Raises ConfigError naming what is missing or does not fit. Nothing of it is ever lost."""
    tokenizer = tokenizer_of(config.model)
    vocabulary = read_vocabulary(config.model, tokenizer.tokenizer_json, config.context_limit)
    check_message_size(vocabulary.size, config.max_message_bytes)
    kind = kinds.Drafter[config.drafter.upper()]
    sizes = LookupSizes(config.lookup_min_n, config.lookup_max_n, config.lookup_corpus_tokens)
    drafter = make_drafters((kind,), config.drafter_text, tokenizer.tokenizer_json, vocabulary.size, sizes)[kind]
    slots = OpenSlots(partial(TableSlot, drafter), config.max_slots, vocabulary.context_limit)
    log.info("drafting by %s, without a model: %d tokens in the vocabulary", config.drafter, vocabulary.size)
    return TableState(config, epoch, slots, tokenizer, drafters=(kind,), vocabulary=vocabulary)
