"""The engine worker of a draft without a model: a drafter, and a follower of what is committed in each slot, no cache.

Every proposal that is asked for is made in the next step, as a chain of what its slot's follower says. Runs on the
engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from draft_service.active import Asked, Drawn, ProposalQueue
from draft_service.deliveries import Sender
from draft_service.jobs import PartOut
from outrider.drafting.drafter import SequenceDrafter
from outrider.engine.drafters import make_drafters
from outrider.engine.loading.model_files import tokenizer_files
from outrider.engine.loading.vocabulary import Vocabulary, read_vocabulary
from outrider.engine.sampling.chain import draw_chain
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, Fault, SlotKey
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import BareSlot, OpenSlots
from outrider.engine.worker.worker_handle import WorkerState
from outrider.v1 import common_pb2 as pb
from outrider.wire import kinds
from outrider.wire.errors import OutriderError
from outrider.wire.log import get_logger
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.params import SamplingParams
from outrider.wire.settings.config import DraftConfig

log = get_logger(__name__)


@dataclass
class TableState(WorkerState):
    """The state of a draft without a model."""

    vocabulary: Vocabulary = field(kw_only=True)

    def info(self) -> pb.WorkerInfo:
        """Describe the draft; its id is the drafter's name."""
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
    """Make the state on the engine thread; nothing of it is ever lost. Raises ConfigError naming what is missing."""
    tokenizer = tokenizer_files(config.model)
    vocabulary = read_vocabulary(config.model, tokenizer.tokenizer_json, config.context_limit)
    kind = kinds.Drafter[config.drafter.upper()]
    drafter = make_drafters((kind,), config.drafter_text, tokenizer.tokenizer_json, vocabulary.size)[kind]
    slots = OpenSlots(partial(TableSlot, drafter), config.max_slots, vocabulary.context_limit)
    log.info("drafting by %s, without a model: %d tokens in the vocabulary", config.drafter, vocabulary.size)
    return TableState(config, epoch, slots, tokenizer, drafters=(kind,), vocabulary=vocabulary)


class TableSlot(BareSlot):
    """Follows what is committed."""

    __slots__ = ("_is_sound", "follower")

    def __init__(
        self,
        drafter: SequenceDrafter,
        key: SlotKey,
        committed_ids: Sequence[int],
        num_prompt: int,
        params: SamplingParams,
        cache_salt: bytes = b"",
    ) -> None:
        super().__init__(key, committed_ids, num_prompt, params)
        self._is_sound = True
        self.follower = drafter.open(self.committed, num_prompt, cache_salt)

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        super().commit_from(base_len, ids)
        self.follower.truncate(base_len)
        self.follower.append(ids)

    def give_up(self) -> int:
        """Close the follower: its drafter may remember what was said in it."""
        if self._is_sound:
            self.follower.close()
        return 0

    def make_way(self) -> int:
        """Remember nothing: what was said is in the slot that comes, and remembered once, at the end."""
        return 0

    def distrust(self) -> None:
        """Keep the drafter from remembering what the follower holds: it may be wrong."""
        self._is_sound = False


@dataclass(slots=True)
class AskedOfTables(Asked):
    """A proposal that was asked of a draft without a model."""

    slot: TableSlot


class TableProposer:
    """Runs the jobs and steps of a draft without a model."""

    def __init__(
        self,
        keeper: SlotKeeper[TableSlot],
        engine: EngineThread,
        deliver: Callable[[PartOut], None],
        metrics: WorkerMetrics,
        vocab_size: int,
    ) -> None:
        self._keeper = keeper
        self._sender = Sender(engine, deliver)
        self._queue = ProposalQueue(keeper, engine, metrics, vocab_size, AskedOfTables)
        self._metrics = metrics
        self._vocab_size = vocab_size

    def handle(self, job: object) -> None:
        self._queue.handle(job)

    def next_wake(self) -> float | None:
        return None

    def step(self, now: float) -> bool:
        asked = list(self._queue.active.values())
        if not asked:
            return False
        for a in asked:
            a.started_s = now
        for a in asked:
            self._make(a)
        self._metrics.batch_size.observe(len(asked))
        self._metrics.busy_seconds.inc(time.monotonic() - now)
        return True

    def fail_step(self, error: Exception) -> None:
        """Answer every job of the failed step. What followers hold cannot be trusted: the gateway opens the slots
        again.
        """
        for a in list(self._queue.active.values()):
            self._queue.cancel(*a.slot.key, f"the draft's step failed: {error}", Fault.INTERNAL)
            a.slot.distrust()
            self._keeper.close(CloseJob(*a.slot.key))

    def _make(self, a: AskedOfTables) -> None:
        state, committed_len = self._keeper.sampling_state(a.slot), len(a.slot.committed)
        chain = draw_chain(
            a.slot.follower.walk(), state, committed_len, a.job.num_draft_tokens, self._vocab_size, a.topk
        )
        a.length = len(chain.ids)
        for index, token_id in enumerate(chain.ids):
            a.take(Drawn(token_id, None if chain.laws is None else chain.laws[index]))
            self._sender.send_large(a)
        self._sender.send_due(a)
        self._queue.finish(a)
