"""Decide which slots run in the next forward: continuous batching, chunked prefill and KV memory. No torch.

`Scheduler` takes plain values and returns typed decisions; `StepScheduler` applies them for both workers. The rules:

1. A slot that is ready for its next step always runs: a prompt never delays it. (A target first leaves out slots
   of a caller that would slow another caller by more than its share.)
2. Prompts get the rest of the step's budget, several short ones together. Prompts of the caller that was fed least,
   relative to its weight, come first; within a caller the lowest priority number, then first come first served. The
   budget is small beside steps of other slots, and also while other slots are between two steps: those would have to
   wait for the forward under way. After `PROBE_STEPS` it is zero for one step, which measures decoding alone. When
   many short prompts wait beside few running slots, all of one caller, the prompts get whole steps: everyone then
   finishes sooner, and in fuller batches.
3. A slot without blocks is admitted only when the free blocks cover its next step and leave one block for each slot,
   itself included, whose last block is nearly full. While one such slot waits, none after it is admitted.
4. When memory runs out, the youngest slot is preempted; it starts again from its committed tokens. A slot never takes
   memory from an older one unless that one is dormant, so the oldest slot with work always gets memory.

`StepCost` measures what a step costs on this machine, which sets how many prompt tokens run beside decodes. All of this
runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from outrider.engine.kv_pool import KVPool
from outrider.engine.step_plan import FORWARD_COST_TOKENS, VERIFY_TOKENS, Row
from outrider.engine.worker.jobs import MAX_NARROW, SlotKey
from outrider.engine.worker.slots import OpenSlots, Slot, needs_prefill
from outrider.wire.requests.scheduling import Scheduling, VirtualTokens
from outrider.wire.telemetry.metrics import WorkerMetrics

SLOWDOWN = 1.5
"""Longest step with prompts, as a multiple of a step without them."""
MIN_PREFILL_TOKENS = 4
"""Minimum of prompt tokens fed in any step, so that prompts never starve. It is small because a token at the end of a
long prompt may cost many times one at its beginning."""
PROBE_STEPS = 16
"""Number of steps with prompts of one size after which one step runs without: the cost of decoding grows with the
contexts, and cannot be measured while prompts run in the same step."""
_WEIGHT = 0.25
"""Weight of a new measurement in a running mean. A measurement after a long gap weighs twice this."""
_OUTLIER = 4.0
"""Cap on a measurement, as a multiple of the mean: the machine may have been busy with something else."""
_NEAR = 1.25
"""Largest ratio of two token counts whose steps are taken to cost about the same."""
_LEAST_SHARE = 0.1
"""Minimum cost of a prompt token, as a fraction of the step's mean cost per token. It holds where noise makes the
measured difference zero."""


class StepCost:
    """Running means of the cost of decode steps, by size, and of the cost that a prompt token adds to one."""

    def __init__(self) -> None:
        # A size is the bit length of the number of decode tokens.
        self._decode_s: dict[int, float] = {}
        self._num_mixed: dict[int, int] = {}  # steps with prompts since the last one without
        self._token_s: float | None = None  # of a prompt token beside decodes
        self._alone_token_s: float | None = None

    def note(self, num_decode_tokens: int, num_prefill_tokens: int, seconds: float) -> None:
        """Record that a forward of these decode and prefill tokens took `seconds`."""
        size = num_decode_tokens.bit_length()
        if not num_prefill_tokens:
            weight = (2 if self._num_mixed.get(size, 0) >= PROBE_STEPS else 1) * _WEIGHT
            self._decode_s[size] = _mean(self._decode_s.get(size), seconds, weight)
            self._num_mixed[size] = 0
        elif not num_decode_tokens:
            if num_prefill_tokens >= FORWARD_COST_TOKENS:  # a smaller step is the reading of the weights
                self._alone_token_s = _mean(self._alone_token_s, seconds / num_prefill_tokens)
        elif size in self._decode_s:
            self._num_mixed[size] += 1
            least_s = _LEAST_SHARE * seconds / (num_decode_tokens + num_prefill_tokens)
            added_s = (seconds - self._decode_s[size]) / num_prefill_tokens
            self._token_s = _mean(self._token_s, max(added_s, least_s))

    def wants_probe(self, num_decode_tokens: int) -> bool:
        """Return whether the cost of a decode step of this size is unknown or was measured too long ago."""
        if self._alone_token_s is None and self._token_s is None:
            return False  # no prompt token has been measured yet: a probe would not give a budget
        size = num_decode_tokens.bit_length()
        return size not in self._decode_s or self._num_mixed[size] >= PROBE_STEPS

    def prefill_tokens(self, num_decode_tokens: int, most: int) -> int:
        """Return the number of prompt tokens to run beside `num_decode_tokens`; `most` when there are none."""
        if not num_decode_tokens:
            return most
        alone_s = self._decode(num_decode_tokens.bit_length())
        token_s = self._alone_token_s if self._token_s is None else self._token_s
        if alone_s is None or token_s is None:
            return most  # nothing has run yet: the cost of a decode step is unknown
        return min(most, max(MIN_PREFILL_TOKENS, int((SLOWDOWN - 1) * alone_s / token_s)))

    def _decode(self, size: int) -> float | None:
        if size in self._decode_s or not self._decode_s:
            return self._decode_s.get(size)
        smaller = [known for known in self._decode_s if known < size]
        return self._decode_s[max(smaller) if smaller else min(self._decode_s)]


def _mean(before: float | None, new: float, weight: float = _WEIGHT) -> float:
    return new if before is None else before + weight * (min(new, _OUTLIER * before) - before)


GROWTH_TOKENS = 16
"""Number of tokens by which each running slot can still grow when another is admitted: one block of the CPU's attention
backends."""
WAITING_SERVED_RATIO = 0.3
"""Minimum ratio of waiting short prompts to running slots at which the running slots pause for the prompts. Name and
idea are those of text-generation-inference."""
SHORT_STEPS = 2
"""Maximum length of a short prompt, in whole prefill steps. Running slots never pause for a longer prompt."""


class Want(Enum):
    """The reason why a slot needs the next forward."""

    STEP = auto()
    """A verify, or one more draft token, is ready to run."""
    PREFILL = auto()
    """The prompt has to be fed: no step was requested yet, or the requested step waits for a proposal."""
    NOTHING = auto()
    """The slot is between two rounds and will be back."""
    DORMANT = auto()
    """No step was requested for `DORMANT_S` or longer: its memory is taken first."""


class SlotDemand(NamedTuple):
    """State of one slot, as the scheduler reads it."""

    key: SlotKey
    want: Want
    num_committed: int
    num_cached: int
    num_after: int
    """Number of tokens in the cache after the next step; never more than fit the pool alone."""
    num_blocks: int
    """Number of blocks that the slot holds."""
    num_copied: int = 0
    """Number of blocks that copy-on-write costs the next token: 1 when its block is shared, else 0."""
    num_source_blocks: int = 0
    """Number of blocks of the encoder's source, held or not."""
    num_to_encode: int = 0
    """Number of source tokens that the encoder has yet to read, all in one forward."""
    most_narrow: int = MAX_NARROW
    """Maximum number of uncached tokens that run in the slot's step without a prefill before it."""
    scheduling: Scheduling = Scheduling()

    @property
    def num_to_read(self) -> int:
        """Return the number of committed tokens plus source tokens that are not encoded."""
        return self.num_committed + self.num_to_encode

    @property
    def is_waiting(self) -> bool:
        """Return whether the slot waits to be admitted or prefilled."""
        if self.want is Want.STEP:
            return bool(not self.num_blocks or self.num_to_feed)
        return self.want is Want.PREFILL and bool(self.num_to_feed)

    @property
    def num_to_feed(self) -> int:
        """Return the number of tokens to prefill before the slot's step; 0 when the uncached ones fit in the step
        itself.

        The source comes first, in one piece; then the prompt, in chunks.
        """
        if self.num_to_encode:
            return self.num_to_encode
        num_uncached = self.num_committed - self.num_cached
        return num_uncached - 1 if num_uncached > self.most_narrow else 0


@dataclass(frozen=True, slots=True)
class Preempt:
    """Preempt the slot, then plan again: only afterwards is it known how many blocks became free."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Admit:
    """Admit the slot: adopt the cached prefix of its tokens. A `Run` or `Feed` of the same slot follows."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Run:
    """Run the slot's step in the next forward."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Feed:
    """Prefill at most `num_tokens` of the slot's prompt in the next forward."""

    key: SlotKey
    num_tokens: int


class Why(Enum):
    """The reason of a `Wait`."""

    MEMORY = auto()
    """No free blocks, or an earlier slot in the queue waits for some."""
    BUDGET = auto()
    """Earlier prompts fill the step's token budget."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Leave a slot that has work out of the next forward."""

    key: SlotKey
    why: Why


Decision = Preempt | Admit | Run | Feed | Wait


class Scheduler:
    """Planner of the next forward. Its only state is the measured cost of steps and the tokens fed per caller."""

    def __init__(self, block_size: int, max_prefill_tokens: int) -> None:
        self.cost = StepCost()
        self._block_size = block_size
        self._max_prefill_tokens = max_prefill_tokens
        self._fed = VirtualTokens()

    def plan(self, demands: Sequence[SlotDemand], num_free: int) -> list[Decision]:
        """Return the decisions for the next forward.

        `demands`: every open slot, the longest open first. `num_free`: free blocks.

        Either every decision is a `Preempt`, and the caller plans again after applying them, or none is. `Run` comes
        first.

        Example, with memory for all: slot A is ready to verify, B of another caller is new with a prompt of 1,000
        tokens, and `StepCost` allows 64 prompt tokens beside A's step: Run(A), Admit(B), Feed(B, 64).
        """
        plan = _Plan(demands, num_free, self._block_size)
        num_running, most = plan.run(), self._max_prefill_tokens
        beside = self.cost.prefill_tokens(num_running or plan.num_expected(), most)
        waiting = self._in_turn(demands)
        plan.feed(waiting, 0 if num_running and self.cost.wants_probe(num_running) else beside, most)
        if not plan.preempted:
            self._note_fed(demands, plan.decisions)
        return list(plan.preempted) or plan.decisions

    def _in_turn(self, demands: Sequence[SlotDemand]) -> list[int]:
        waiting = [index for index, demand in enumerate(demands) if demand.is_waiting]
        first = dict[bytes, int]()
        for index in waiting:
            first.setdefault(demands[index].scheduling.caller, index)
        weights = {caller: demands[index].scheduling.weight for caller, index in first.items()}
        self._fed.wait(weights, (demand.scheduling.caller for demand in demands))

        def turn(index: int) -> tuple[float, int, int]:
            caller, priority = demands[index].scheduling.caller, demands[index].scheduling.priority
            return self._fed.given(caller), first[caller], priority

        return sorted(waiting, key=turn)

    def _note_fed(self, demands: Sequence[SlotDemand], decisions: Sequence[Decision]) -> None:
        callers = {demand.key: demand.scheduling.caller for demand in demands}
        for decision in decisions:
            if isinstance(decision, Feed):
                self._fed.give(callers[decision.key], decision.num_tokens)


class _Plan:
    """The decisions of one call of `Scheduler.plan`, which stop at the first `Preempt`."""

    def __init__(self, demands: Sequence[SlotDemand], num_free: int, block_size: int) -> None:
        self.decisions: list[Decision] = []
        self.preempted: list[Preempt] = []
        self._demands = demands
        self._num_free = num_free
        self._block_size = block_size

    def run(self) -> int:
        """Run the ready slots that hold blocks; return the number of tokens that they feed."""
        num_tokens = 0
        for index, demand in enumerate(self._demands):
            if demand.want is not Want.STEP or not demand.num_blocks or demand.num_to_feed or self.preempted:
                continue
            missing = self._missing(demand, demand.num_after)
            if missing > self._num_free:
                self._make_room(missing - self._num_free, index)
                self.decisions.append(Wait(demand.key, Why.MEMORY))
                continue
            self._num_free -= missing
            self.decisions.append(Run(demand.key))
            num_tokens += demand.num_after - demand.num_cached
        return num_tokens

    def num_expected(self) -> int:
        """Return the number of tokens that slots between two steps will feed in their next one."""
        waiting = [d for d in self._demands if d.want in (Want.NOTHING, Want.PREFILL)]
        # Draft tokens of the last step may still be in the slot's cache.
        return sum(max(1, d.num_after - d.num_cached) for d in waiting if d.num_blocks and not d.num_to_feed)

    def feed(self, waiting: Sequence[int], beside: int, most: int) -> None:
        """Decide which prompts are fed, within the budgets of tokens and blocks.

        `waiting`: indices of slots with a prompt to feed, in scheduling order. `beside`: prompt tokens that hardly
        delay the running slots. `most`: prompt tokens of a whole step.
        """
        spare = self._num_spare()
        short = self._pause_for(most)
        num_fed = 0
        no_memory = False  # for an admission: no later slot may be admitted either
        for index in waiting:
            demand = self._demands[index]
            if self.preempted:
                return
            budget = (most if demand.num_to_read <= short else beside) - num_fed
            if demand.num_blocks:
                if demand.num_to_feed:
                    num_fed += self._feed(demand, index, budget)
                continue
            missing = self._missing(demand, demand.num_after)
            if not no_memory and missing > spare:
                no_memory = True
                self._take(missing - spare, self._dormant())
            if no_memory or (demand.num_to_feed and budget <= 0):
                self.decisions.append(Wait(demand.key, Why.MEMORY if no_memory else Why.BUDGET))
                continue
            self.decisions.append(Admit(demand.key))
            spare -= missing + self._reserve(demand)
            num_fed += self._feed(demand, index, budget) if demand.num_to_feed else self._run_admitted(demand)

    def _pause_for(self, most: int) -> int:
        """Return the maximum prompt length, in tokens, for which running slots pause; 0 when they do not."""
        short = SHORT_STEPS * most
        running = [d for d in self._demands if d.num_blocks and not d.num_to_feed and d.want is not Want.DORMANT]
        wanting = [d for d in self._demands if d.want in (Want.STEP, Want.PREFILL) and d.num_to_feed]
        waiting = [d for d in wanting if d.num_to_read <= short]
        if running and len({d.scheduling.caller for d in (*running, *waiting)}) > 1:
            return 0  # a slot never pauses for another caller's prompt
        return short if len(waiting) >= WAITING_SERVED_RATIO * len(running) else 0

    def _feed(self, demand: SlotDemand, index: int, budget: int) -> int:
        if budget <= 0:
            self.decisions.append(Wait(demand.key, Why.BUDGET))
            return 0
        least = 0 if demand.num_to_encode else 1  # tokens that a chunk adds to the slot's cache
        missing = self._missing(demand, demand.num_cached + least)
        if missing > self._num_free:
            self._make_room(missing - self._num_free, index)
            self.decisions.append(Wait(demand.key, Why.MEMORY))
            return 0
        if demand.num_to_encode:
            self._num_free -= missing
            self.decisions.append(Feed(demand.key, demand.num_to_encode))
            return demand.num_to_encode
        num_blocks = demand.num_blocks - demand.num_source_blocks + self._num_free - demand.num_copied
        num_tokens = min(demand.num_to_feed, budget, num_blocks * self._block_size - demand.num_cached)
        self._num_free -= self._missing(demand, demand.num_cached + num_tokens)
        self.decisions.append(Feed(demand.key, num_tokens))
        return num_tokens

    def _run_admitted(self, demand: SlotDemand) -> int:
        self._num_free -= self._missing(demand, demand.num_after)
        self.decisions.append(Run(demand.key))
        return demand.num_after

    def _num_spare(self) -> int:
        """Return the number of free blocks that no running or half-prefilled slot needs.

        Dormant slots reserve nothing: they are preempted when their blocks are needed.
        """
        holding = [d for d in self._demands if d.num_blocks and d.want is not Want.DORMANT]
        half_fed = sum(self._missing(demand, demand.num_after) for demand in holding if demand.num_to_feed)
        return self._num_free - sum(self._reserve(demand) for demand in holding) - half_fed

    def _reserve(self, demand: SlotDemand) -> int:
        return int(-demand.num_after % self._block_size < GROWTH_TOKENS)

    def _missing(self, demand: SlotDemand, num_tokens: int) -> int:
        missing = demand.num_source_blocks - (-num_tokens // self._block_size) - demand.num_blocks
        return max(missing, 0) + (demand.num_copied if num_tokens > demand.num_cached else 0)

    def _make_room(self, num_blocks: int, index: int) -> None:
        """Preempt dormant slots, then slots younger than the one at `index`, the youngest first."""
        younger = [d for d in reversed(self._demands[index + 1 :]) if d.num_blocks and d.want is not Want.DORMANT]
        self._take(num_blocks, [*self._dormant(), *younger])

    def _dormant(self) -> list[SlotDemand]:
        return [demand for demand in self._demands if demand.want is Want.DORMANT and demand.num_blocks]

    def _take(self, num_blocks: int, victims: Sequence[SlotDemand]) -> None:
        """Preempt `victims` in order until `num_blocks` are free; preempt none when all of them do not hold enough."""
        if num_blocks > sum(victim.num_blocks for victim in victims):
            return
        for victim in victims:
            if num_blocks <= 0:
                return
            self.preempted.append(Preempt(victim.key))
            num_blocks -= victim.num_blocks


DORMANT_S = 1.0
"""Seconds without a message after which a slot is dormant: its memory is taken first."""
RETRY_S = DORMANT_S / 10
"""Seconds between two looks while a slot waits for memory and nothing else happens: another may turn dormant."""


class StepRequest(NamedTuple):
    """A worker's request for a slot's step."""

    want: Want
    num_after: int
    """Number of tokens in the slot's cache after its next step."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of a prompt, or a source to encode, in the next forward."""

    slot: Slot
    row: Row

    @property
    def num_tokens(self) -> int:
        source = self.row.source
        return len(source.ids) if source is not None and not self.row.new_ids else self.row.num_new


@dataclass(frozen=True, slots=True)
class Turn:
    """The contents of the next forward."""

    running: Sequence[SlotKey]
    pieces: Sequence[Piece]
    num_admitted: int

    @property
    def worked(self) -> bool:
        """Return whether the forward has work, or a slot was admitted, so that the next call would decide otherwise."""
        return bool(self.running or self.pieces or self.num_admitted)


class StepScheduler:
    """Applier of the scheduler's decisions for both workers. The workers run the forward and call `done` after it."""

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
        """Number of slots that were preempted, or waited for memory, in the last call of `take`."""
        return self._num_starved

    def take(self, step_requests: Mapping[SlotKey, StepRequest], now: float, *, feed_all: bool) -> Turn:
        """Decide on the next forward; allocate and free memory for it.

        `step_requests`: the requested steps, by slot. A slot without one needs no step; with `feed_all` its prompt is
        fed.
        """
        preempted: set[SlotKey] = set()
        while True:
            demands = [_demand(slot, step_requests.get(slot.key), now, feed_all) for slot in self._table]
            decisions = self._scheduler.plan(demands, self._pool.num_free)
            victims = [decision.key for decision in decisions if isinstance(decision, Preempt)]
            if not victims:
                return self._apply(decisions, preempted)
            for key in victims:
                self._preempt(key)
            preempted.update(victims)

    def next_wake(self, now: float) -> float | None:
        """Return the monotonic time, in seconds, to plan again without an event; None when no slot waits for memory."""
        return now + RETRY_S if self._num_starved else None

    def done(self, turn: Turn, num_run_tokens: int, seconds: float) -> None:
        """Record that the forward of `turn` ran and took `seconds` in all.

        `num_run_tokens`: tokens of steps in it, without those of prompts.
        """
        for piece in turn.pieces:
            piece.slot.fed_committed(piece.row.new_ids)
        num_fed = sum(piece.num_tokens for piece in turn.pieces)
        self._scheduler.cost.note(num_run_tokens, num_fed, seconds)
        if num_run_tokens:
            self._decode_tokens.observe(num_run_tokens)
        if num_fed:
            self._prefill_tokens.observe(num_fed)

    def _apply(self, decisions: Sequence[Decision], preempted: set[SlotKey]) -> Turn:
        running: list[SlotKey] = []
        pieces: list[Piece] = []
        num_admitted = 0
        starved = set(preempted)
        num_running = sum(isinstance(decision, Run) for decision in decisions)
        num_rows = VERIFY_TOKENS * (self._table.max_slots - num_running)  # logits rows that the memory budget has left
        for decision in decisions:
            match decision:
                case Run(key):
                    running.append(key)
                case Feed(key, num_tokens):
                    slot = self._slot(key)
                    # The prefix cache may have held the whole prompt.
                    if needs_prefill(slot) and (num_rows or not slot.num_unscored):
                        piece = _piece(slot, num_tokens, num_rows)
                        num_rows -= piece.row.num_logits
                        pieces.append(piece)
                case Admit(key):
                    num_admitted += 1
                    self._admit(self._slot(key))
                case Wait(key, why):
                    if why is Why.MEMORY:
                        starved.add(key)
        self._note_memory(len(starved))
        return Turn(running, pieces, num_admitted)

    def _admit(self, slot: Slot) -> None:
        is_first = slot.num_adopted is None
        num_adopted = slot.adopt()
        if is_first:
            self._metrics.prompt_tokens.inc(len(slot.committed) + slot.num_source_tokens)
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


def _demand(slot: Slot, step_request: StepRequest | None, now: float, feed_all: bool) -> SlotDemand:
    num_committed, num_cached = slot.num_feedable, len(slot.cached)
    if step_request is not None:
        want, num_after = step_request.want, min(step_request.num_after, slot.most_cached)
    elif now - slot.asked_s >= DORMANT_S:  # no prefill either: it would take back the memory that was taken from it
        want, num_after = Want.DORMANT, num_committed
    else:
        want, num_after = Want.PREFILL if feed_all and needs_prefill(slot) else Want.NOTHING, num_committed
    blocks = (slot.num_blocks, slot.num_copied, slot.num_source_blocks)
    rest = (*blocks, slot.num_to_encode, slot.most_narrow, slot.scheduling)
    return SlotDemand(slot.key, want, num_committed, num_cached, num_after, *rest)


def _piece(slot: Slot, most: int, most_logits: int) -> Piece:
    num_cached = len(slot.cached)
    if slot.num_to_encode:
        return Piece(slot, Row(slot.table, (), num_cached, 0, slot.cached, source=slot.source))
    # The logits behind each fed token score the token after it.
    scoring = slot.scoring if slot.num_unscored else None
    if scoring is not None:
        most = min(most, most_logits + len(scoring.found) - num_cached)
    ids = slot.uncached(min(most, slot.num_feedable - 1 - num_cached))
    features = slot.features_of(len(ids))
    num_logits = 0 if scoring is None else max(0, num_cached + len(ids) - len(scoring.found))
    return Piece(slot, Row(slot.table, ids, num_cached, num_logits, slot.cached, features=features, source=slot.source))
