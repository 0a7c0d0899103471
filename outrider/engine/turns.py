"""Whose turn it is: puts the scheduler's decisions into effect, for both workers. On the engine thread.

Takes what each slot wishes, gives memory and takes it away, and hands back who runs and which pieces of prompts go with
them. The worker runs the forward and says when it is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.engine.kv_pool import KVPool
from outrider.engine.open_slots import OpenSlots
from outrider.engine.scheduler import Admit, Decision, Demand, Feed, Preempt, Run, Scheduler, SlotKey, Wait, Want, Why
from outrider.engine.slot_keeper import needs_prefill
from outrider.engine.slots import Slot
from outrider.engine.step_plan import Row
from outrider.wire.metrics import WorkerMetrics

DORMANT_S = 1.0
"""A slot of which nothing was asked for so long gives its memory up first."""
RETRY_S = 0.1
"""While somebody waits for memory and nothing else happens: a slot may turn dormant meanwhile."""


class Wish(NamedTuple):
    """What a worker would do with a slot's turn."""

    want: Want
    num_after: int
    """Tokens in the slot's cache after its next step."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a prompt in the next forward."""

    slot: Slot
    row: Row


@dataclass(frozen=True, slots=True)
class Turn:
    """What goes into the next forward."""

    running: Sequence[SlotKey]
    pieces: Sequence[Piece]
    num_admitted: int
    starved: frozenset[SlotKey]
    """Who lost their memory, or has work and no memory for it: their time does not run."""

    @property
    def worked(self) -> bool:
        """A further call would not decide the same."""
        return bool(self.running or self.pieces or self.num_admitted)


class Turns:
    def __init__(self, table: OpenSlots[Slot], pool: KVPool, metrics: WorkerMetrics, max_prefill_tokens: int) -> None:
        self._table = table
        self._pool = pool
        self._metrics = metrics
        self._scheduler = Scheduler(pool.block_size, max_prefill_tokens)
        self._num_evictions = 0
        self._num_starved = 0
        self._decode_tokens = metrics.step_tokens.labels(purpose="decode")
        self._prefill_tokens = metrics.step_tokens.labels(purpose="prefill")

    @property
    def num_starved(self) -> int:
        """Slots that lost their memory, or waited for some, in the last turn."""
        return self._num_starved

    def take(self, wishes: Mapping[SlotKey, Wish], now: float, *, feed_all: bool) -> Turn:
        """Slots without a wish want nothing, or with feed_all that their prompts be fed."""
        preempted: set[SlotKey] = set()
        while True:
            demands = [_demand(slot, wishes.get(slot.key), now, feed_all) for slot in self._table]
            decisions = self._scheduler.plan(demands, self._pool.num_free)
            victims = [decision.key for decision in decisions if isinstance(decision, Preempt)]
            if not victims:
                return self._apply(decisions, preempted)
            for key in victims:
                self._preempt(key)
            preempted.update(victims)

    def next_wake(self, now: float) -> float | None:
        """When to ask again though nothing has happened; None when nobody waits for memory."""
        return now + RETRY_S if self._num_starved else None

    def done(self, turn: Turn, num_run_tokens: int, seconds: float) -> None:
        """The forward of `turn` has run, and took so long with all that belongs to it."""
        for piece in turn.pieces:
            piece.slot.fed_committed(piece.row.new_ids)
        num_fed = sum(piece.row.num_new for piece in turn.pieces)
        self._scheduler.cost.note(num_run_tokens, num_fed, seconds)
        if num_run_tokens:
            self._decode_tokens.observe(num_run_tokens)
        if num_fed:
            self._prefill_tokens.observe(num_fed)

    def joined_saves_s(self, num_run_tokens: int) -> float:
        """What one step saves over two of half its tokens."""
        return self._scheduler.cost.joined_saves_s(num_run_tokens)

    def _apply(self, decisions: Sequence[Decision], preempted: set[SlotKey]) -> Turn:
        running: list[SlotKey] = []
        pieces: list[Piece] = []
        num_admitted = 0
        starved = set(preempted)
        for decision in decisions:
            match decision:
                case Run(key):
                    running.append(key)
                case Feed(key, num_tokens):
                    slot = self._slot(key)
                    if needs_prefill(slot):  # the prefix cache may have had all of it
                        pieces.append(_piece(slot, num_tokens))
                case Admit(key):
                    num_admitted += 1
                    self._admit(self._slot(key))
                case Wait(key, why):
                    if why is Why.MEMORY:
                        starved.add(key)
        self._note_memory(len(starved))
        return Turn(running, pieces, num_admitted, frozenset(starved))

    def _admit(self, slot: Slot) -> None:
        is_first = slot.num_adopted is None
        num_adopted = slot.adopt()
        if is_first:
            self._metrics.prompt_tokens.inc(len(slot.committed))
            self._metrics.prefix_hit_tokens.inc(num_adopted)

    def _preempt(self, key: SlotKey) -> None:
        self._slot(key).give_up()
        self._metrics.preemptions.inc()

    def _note_memory(self, num_starved: int) -> None:
        if num_starved or self._num_starved:
            self._metrics.slots_waiting.set(num_starved)
        self._num_starved = num_starved
        evictions = self._pool.num_evictions
        if evictions != self._num_evictions:
            self._metrics.prefix_evictions.inc(evictions - self._num_evictions)
            self._num_evictions = evictions

    def _slot(self, key: SlotKey) -> Slot:
        slot = self._table.get(*key)
        assert slot is not None, f"slot {key} was scheduled and is not open"
        return slot


def _demand(slot: Slot, wish: Wish | None, now: float, feed_all: bool) -> Demand:
    num_committed, num_cached, table = len(slot.committed), len(slot.cached), slot.table
    if wish is not None:
        want, num_after = wish.want, min(wish.num_after, slot.most_cached)
    elif now - slot.asked_s >= DORMANT_S:  # not even its prompt: it would take back what was taken from it
        want, num_after = Want.DORMANT, num_committed
    else:
        want, num_after = Want.PREFILL if feed_all and needs_prefill(slot) else Want.NOTHING, num_committed
    return Demand(slot.key, want, num_committed, num_cached, num_after, len(table.blocks), slot.num_copied)


def _piece(slot: Slot, most: int) -> Piece:
    num_cached = len(slot.cached)
    end = min(num_cached + most, len(slot.committed) - 1)
    return Piece(slot, Row(slot.table, slot.committed[num_cached:end], num_cached, 0, slot.cached))
