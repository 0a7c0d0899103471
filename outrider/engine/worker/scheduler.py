"""Apply the decisions of `Scheduler` to slots and memory, before and after each forward. No torch.

Both workers call `StepScheduler.schedule` on the engine thread, run the forward, and call `note_step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.engine.kv_pool import KVPool
from outrider.engine.step_plan import VERIFY_TOKENS, Row
from outrider.engine.worker.decisions import (
    Admit,
    Decision,
    Need,
    Preempt,
    PrefillSlot,
    Run,
    SkipSlot,
    SlotState,
    WaitReason,
)
from outrider.engine.worker.jobs import SlotKey
from outrider.engine.worker.open_slots import OpenSlots
from outrider.engine.worker.planner import Scheduler
from outrider.engine.worker.slots import Slot, needs_prefill
from outrider.wire.telemetry.metrics import WorkerMetrics

__all__ = ["DORMANT_S", "RETRY_S", "Chunk", "Need", "ScheduledStep", "StepRequest", "StepScheduler"]

DORMANT_S = 1.0
"""Seconds without a message after which a slot is dormant. If memory runs out, the memory of dormant slots is taken
first."""
RETRY_S = DORMANT_S / 10
"""Seconds after which a worker without messages plans its next forward again while a slot waits for memory. By then
another slot may be dormant, and its memory can be taken."""


class StepRequest(NamedTuple):
    """Work that a worker requests of the scheduler for one slot: a verify, feeding of draft tokens, or a prefill."""

    want: Need
    num_after: int
    """Number of tokens in the slot's part of the KV cache after the requested step."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk of a prompt that is fed in a forward, or the source that an encoder reads in it."""

    slot: Slot
    row: Row

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are fed: of the source if an encoder reads it, otherwise of the chunk of the prompt."""
        source = self.row.source
        if source is not None and not self.row.new_ids:
            return len(source.ids)
        return self.row.num_new


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Slots that verify, decode or feed draft tokens in the next forward, and pieces of prompts fed in it."""

    running: Sequence[SlotKey]
    """Keys of the slots that verify, decode or feed draft tokens."""
    pieces: Sequence[Chunk]
    """Chunks of prompts that are prefilled, and sources that are encoded."""
    num_admitted: int
    """Number of slots without cache blocks that were chosen to get some for this forward."""

    @property
    def has_work(self) -> bool:
        """Whether the worker should call `schedule` again at once: something runs in this forward, or a slot was
        admitted. (An admitted slot whose whole prompt the prefix cache held runs only in the next forward.)
        """
        return bool(self.running or self.pieces or self.num_admitted)


class StepScheduler:
    """Scheduler of a draft worker or target: it calls `Scheduler.plan` and applies its decisions. The worker runs the
    forward, and calls `note_step` after it.
    """

    def __init__(self, table: OpenSlots[Slot], pool: KVPool, metrics: WorkerMetrics, max_prefill_tokens: int) -> None:
        self._table = table
        self._pool = pool
        self._metrics = metrics
        self._scheduler = Scheduler(pool.block_size, max_prefill_tokens)
        self._num_evictions = 0
        self._num_without_blocks = 0
        self._decode_tokens = metrics.step_tokens.labels(purpose="decode")
        self._prefill_tokens = metrics.step_tokens.labels(purpose="prefill")

    @property
    def num_without_blocks(self) -> int:
        """Number of slots for which there were too few KV blocks in the last call of `schedule`: they were preempted or
        had to wait.
        """
        return self._num_without_blocks

    def schedule(self, step_requests: Mapping[SlotKey, StepRequest], now: float, *, feed_all: bool) -> ScheduledStep:
        """Decide what runs in the next forward, and allocate and free cache blocks for it.

        `step_requests`: requested work by slot. A slot without an entry is only prefilled, and only if `feed_all` is
        True and the slot is not dormant. `now`: monotonic time, in seconds.
        """
        preempted: set[SlotKey] = set()
        while True:
            states = [_slot_state(slot, step_requests.get(slot.key), now, feed_all) for slot in self._table]
            decisions = self._scheduler.plan(states, self._pool.num_free)
            victims = [decision.key for decision in decisions if isinstance(decision, Preempt)]
            if not victims:
                return self._apply(decisions, preempted)
            for key in victims:
                self._preempt(key)
            preempted.update(victims)

    def next_wake(self, now: float) -> float | None:
        """Return the monotonic time, in seconds, at which to plan again even if nothing happens until then; None if no
        slot waits for memory.
        """
        if not self._num_without_blocks:
            return None
        return now + RETRY_S

    def note_step(self, scheduled: ScheduledStep, num_run_tokens: int, seconds: float) -> None:
        """Record that the forward of `scheduled` has run and took `seconds` in all.

        `num_run_tokens`: number of tokens that it fed for the slots in `scheduled.running`, without prompt tokens.
        """
        for piece in scheduled.pieces:
            piece.slot.fed_committed(piece.row.new_ids)
        num_fed = sum(piece.num_tokens for piece in scheduled.pieces)
        self._scheduler.cost.note(num_run_tokens, num_fed, seconds)
        if num_run_tokens:
            self._decode_tokens.observe(num_run_tokens)
        if num_fed:
            self._prefill_tokens.observe(num_fed)

    def _apply(self, decisions: Sequence[Decision], preempted: set[SlotKey]) -> ScheduledStep:
        running: list[SlotKey] = []
        pieces: list[Chunk] = []
        num_admitted = 0
        without_blocks = set(preempted)
        num_running = sum(isinstance(decision, Run) for decision in decisions)
        num_rows = VERIFY_TOKENS * (self._table.max_slots - num_running)  # logits rows that the memory budget has left
        for decision in decisions:
            match decision:
                case Run(key):
                    running.append(key)
                case PrefillSlot(key, num_tokens):
                    slot = self._slot(key)
                    # The prefix cache may have held the whole prompt.
                    if needs_prefill(slot) and (num_rows or not slot.num_unscored):
                        piece = _piece(slot, num_tokens, num_rows)
                        num_rows -= piece.row.num_logits
                        pieces.append(piece)
                case Admit(key):
                    num_admitted += 1
                    self._admit(self._slot(key))
                case SkipSlot(key, why):
                    if why is WaitReason.MEMORY:
                        without_blocks.add(key)
        self._note_memory(len(without_blocks))
        return ScheduledStep(running, pieces, num_admitted)

    def _admit(self, slot: Slot) -> None:
        is_first = slot.num_adopted is None
        num_adopted = slot.adopt()
        if is_first:
            self._metrics.prompt_tokens.inc(len(slot.committed) + slot.num_source_tokens)
            self._metrics.prefix_hit_tokens.inc(num_adopted)

    def _preempt(self, key: SlotKey) -> None:
        self._slot(key).free_cache()
        self._metrics.preemptions.inc()

    def _note_memory(self, num_without_blocks: int) -> None:
        if num_without_blocks or self._num_without_blocks:
            self._metrics.slots_waiting.set(num_without_blocks)
        self._num_without_blocks = num_without_blocks
        evictions = self._pool.num_evictions
        if evictions != self._num_evictions:
            self._metrics.prefix_evictions.inc(evictions - self._num_evictions)
            self._num_evictions = evictions

    def _slot(self, key: SlotKey) -> Slot:
        slot = self._table.get(*key)
        assert slot is not None, f"slot {key} was scheduled and is not open"
        return slot


def _slot_state(slot: Slot, step_request: StepRequest | None, now: float, feed_all: bool) -> SlotState:
    num_committed = slot.num_feedable
    num_after = num_committed
    want = Need.NOTHING
    if step_request is not None:
        want = step_request.want
        num_after = min(step_request.num_after, slot.max_cached_len)
    elif (
        now - slot.last_request_s >= DORMANT_S
    ):  # no prefill either: it would take back the memory that was taken from it
        want = Need.DORMANT
    elif feed_all and needs_prefill(slot):
        want = Need.PREFILL
    return SlotState(
        slot.key,
        want,
        num_committed,
        len(slot.cached),
        num_after,
        slot.num_blocks,
        slot.num_copied,
        slot.num_source_blocks,
        slot.num_to_encode,
        slot.max_narrow_tokens,
        slot.scheduling,
    )


def _piece(slot: Slot, max_tokens: int, max_logits: int) -> Chunk:
    num_cached = len(slot.cached)
    if slot.num_to_encode:
        return Chunk(slot, Row(slot.table, (), num_cached, 0, slot.cached, source=slot.source))
    num_ids = min(max_tokens, slot.num_feedable - 1 - num_cached)
    num_scored: int | None = None  # prompt tokens whose logprobs are computed; None where no more are
    if slot.scoring is not None and slot.num_unscored:
        num_scored = len(slot.scoring.found)
        num_ids = min(num_ids, max_logits + num_scored - num_cached)
    ids = slot.uncached(num_ids)
    features = slot.features_of(len(ids))
    num_logits = 0
    if num_scored is not None:  # the logits behind each fed token score the token after it
        num_logits = max(0, num_cached + len(ids) - num_scored)
    return Chunk(slot, Row(slot.table, ids, num_cached, num_logits, slot.cached, features=features, source=slot.source))
