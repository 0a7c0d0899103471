"""A draft worker without a model, which drafts from a table (n-grams, a suffix automaton, a text).

Each slot has a follower of its committed tokens, and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from draft_service.slots.draft_slot import DraftSlot, NodeRequest
from outrider.drafting.sequence_drafter import Counts, SequenceDrafter
from outrider.engine.drafter_table import make_drafters
from outrider.engine.files.tokenizer_files import tokenizer_files
from outrider.engine.loading.vocabulary import Vocabulary, read_vocabulary
from outrider.engine.speculation.node_drafter import NodeDistribution, NodeDrafter, distribution_of_table
from outrider.engine.worker.open_slots import BareSlot, OpenSlots
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.worker_handle import WorkerState
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import OutriderError
from outrider.wire.kinds import TABLES
from outrider.wire.requests.drafters import Drafter
from outrider.wire.settings.config import DraftConfig
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)


@dataclass
class TableState(WorkerState):
    """State of a draft worker without a model, after loading: a vocabulary, and slots that draft from tables, such as
    counts of n-grams.
    """

    vocabulary: Vocabulary = field(kw_only=True)

    def info(self) -> pb.WorkerInfo:
        """Return the description of the worker; its model id is the drafter's name."""
        assert isinstance(self.config, DraftConfig)
        info = super().info()
        info.MergeFrom(
            pb.WorkerInfo(
                model_id=self.config.drafter,
                vocab_size=self.vocabulary.size,
                device="cpu",
                attention_path=TABLES,
                eos_token_ids=self.vocabulary.eos_token_ids,
                decoder_start_ids=self.vocabulary.decoder_start_ids,
                tensor_parallel=1,
            )
        )
        return info


def load_tables(config: DraftConfig, epoch: int, on_lost: Callable[[OutriderError], None]) -> TableState:
    """Load the tokenizer and the tables of a worker without a model. Runs on the engine thread. Raises `ConfigError`
    naming what is missing.

    `epoch`: number of the worker's life. `on_lost`: not used, since there is no other process that could be lost.
    """
    tokenizer = tokenizer_files(config.model)
    vocabulary = read_vocabulary(config.model, tokenizer.tokenizer_json, config.context_limit)
    kind = Drafter(config.drafter)
    drafter = make_drafters((kind,), config.drafter_text, tokenizer.tokenizer_json, vocabulary.size)[kind]
    slots = OpenSlots(
        partial(TableSlot, drafter),
        config.max_slots,
        vocabulary.context_limit,
        has_sources=bool(vocabulary.decoder_start_ids),
        has_corpus=True,
    )
    log.info("drafting by %s, without a model: %d tokens in the vocabulary", config.drafter, vocabulary.size)
    return TableState(config, epoch, slots, tokenizer, drafters=(kind,), vocabulary=vocabulary)


class TableSlot(BareSlot):
    """Slot that drafts from a table, such as counts of n-grams. Its follower has read the encoder's input, if any, and
    then the slot's committed tokens.
    """

    __slots__ = ("_is_sound", "_num_source", "follower")

    def __init__(
        self,
        drafter: SequenceDrafter,
        *slot: Any,
        cache_salt: bytes = b"",
        source_ids: Sequence[int] = (),
        corpus_id: bytes = b"",
    ) -> None:
        """Create a slot. `drafter`: creates the slot's follower. `slot`: positional arguments of `BareSlot`.
        `source_ids`: the encoder's input. `corpus_id`: id of the corpus of ended outputs that `lookup` copies from;
        empty for none.
        """
        super().__init__(*slot)
        self._is_sound = True
        self._num_source = len(source_ids)
        self.follower = drafter.open([*source_ids, *self.committed], len(source_ids) + self.num_prompt, corpus_id)

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        super().commit_from(base_len, ids)
        self.follower.truncate(self._num_source + base_len)
        self.follower.append(ids)

    def counts_after(self, path: Sequence[int]) -> Counts | None:
        """Return the ids of the tokens that have followed the committed tokens plus `path`, and how often each has, as
        the table has counted. None if it has counted nothing there.

        `path`: ids of the draft tokens after the committed tokens.
        """
        walk = self.follower.walk()
        for token_id in path:
            walk.step(token_id)
        return walk.next()

    def free_cache(self) -> int:
        """Close the slot's state in the table. The table may then use the slot's sequence to draft for other slots,
        unless `invalidate` was called. Returns 0, since no cache memory is freed.
        """
        if self._is_sound:
            self.follower.close()
        return 0

    def free_for_successor(self) -> int:
        """Leave the slot's sequence to a new slot, which continues it. The table learns the whole sequence when the new
        slot closes. Returns the freed bytes of cache memory: 0, since a table has none.
        """
        return 0

    def invalidate(self) -> None:
        """Keep the table, which all slots share, from learning this slot's sequence. Call it after an error in a step,
        when the tokens of the slot's follower may be wrong.
        """
        self._is_sound = False


class WorkerTableDrafter(NodeDrafter[DraftSlot]):
    """Drafter of a worker without a model. Its table counts which tokens have followed the slot's last tokens."""

    def __init__(self, keeper: SlotKeeper[TableSlot]) -> None:
        self._keeper = keeper

    def propose(self, requests: Sequence[NodeRequest], now: float) -> Sequence[NodeDistribution] | None:
        distributions = list[NodeDistribution]()
        for draft_slot, nodes in requests:
            slot = draft_slot.slot
            assert isinstance(slot, TableSlot), "a table's slot"
            state = self._keeper.sampling_state(slot)
            vocab_size = self._keeper.vocab_size_of(slot)
            for node in nodes:
                distributions.append(distribution_of_table(draft_slot.tree, node, state, slot.counts_after, vocab_size))
        return distributions or None
