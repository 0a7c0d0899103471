"""Decide which slots are in the next forward, and with how much: continuous batching, chunked prefill, memory. No
torch.

Plain values in, typed decisions out; `StepScheduler` applies them for both workers. The rules:

1. Slots whose next step is ready run, always: a prompt never keeps them waiting. (A target leaves some out before it
   asks, where one caller would slow another by more than its share.)
2. Prompts get what the step's budget leaves, several short ones together: those of the caller that was fed least over
   its weight go first, and of its own those of the lowest priority number, then first come first served. It is small
   beside steps of others, and also while others are between two steps: those would find the forward under way. Now and
   then it is nothing, to see what the others' steps cost. When many short ones wait beside few that run, all of one
   caller, it is whole for them: all run sooner, and in fuller batches, if those few pause.
3. A slot that holds nothing begins only when the free blocks cover all it needs for its next step, and leave one for
   each slot whose last block is nearly full, this one among them; while one waits for that, none that comes after it
   begins.
4. Memory that runs out is taken from the youngest slot, which begins anew from its committed tokens when its turn
   comes. Nobody takes from an older slot, unless that has been dormant: so the oldest that wants something gets it.

`StepCost` learns what a step costs on this machine from the steps themselves, and so how much of a prompt rides beside
others. All of it runs on the engine thread.
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
"""Times as long as without prompts that a step which also feeds some may take. Doubling what is above 1 feeds prompts
twice as fast, and delays answers by twice as much."""
MIN_PREFILL_TOKENS = 4
"""Prompt tokens fed in any step whatever it costs, so that prompts never starve. At the end of a long prompt a token
may cost many times what one at its beginning does, so this is small; doubling it doubles the longest delay."""
PROBE_STEPS = 16
"""Steps with prompts after which one of that size goes without: what decodes cost grows with their contexts, and beside
prompts it cannot be measured apart. Doubling it halves these steps, and lets the measurement age twice as long."""
_WEIGHT = 0.25
"""Share of a new measurement in a running mean; twice that of one that was long in coming. Doubling it forgets twice as
fast."""
_OUTLIER = 4.0
"""Most times the mean that a measurement counts as: the machine may have had other things to do. Doubling it doubles
what one disturbed step adds."""
_NEAR = 1.25
"""Times another number of tokens that a number may be and their steps take about as long. Doubling what is above 1
takes steps for alike that differ twice as much."""
_LEAST_SHARE = 0.1
"""Share of a step's mean cost of a token that a prompt token costs at least, though noise may make two steps equal.
Doubling it halves the most prompt tokens that ever ride along."""


class StepCost:
    """Running means of decode steps by their size, and of what a prompt token adds to one."""

    def __init__(self) -> None:
        # Sizes are numbers of binary digits of the decode tokens.
        self._decode_s: dict[int, float] = {}
        self._num_mixed: dict[int, int] = {}  # steps with prompts since one without
        self._token_s: float | None = None  # beside decodes
        self._alone_token_s: float | None = None

    def note(self, num_decode_tokens: int, num_prefill_tokens: int, seconds: float) -> None:
        """Record that a forward of that many tokens took so long."""
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
        """Return whether the cost of a step of that size without prompts is not known, or was measured long ago."""
        if self._alone_token_s is None and self._token_s is None:
            return False  # it would not say how many prompt tokens to feed
        size = num_decode_tokens.bit_length()
        return size not in self._decode_s or self._num_mixed[size] >= PROBE_STEPS

    def prefill_tokens(self, num_decode_tokens: int, most: int) -> int:
        """Return the prompt tokens for a step with that many decode tokens; `most` when there are none."""
        if not num_decode_tokens:
            return most
        alone_s = self._decode(num_decode_tokens.bit_length())
        token_s = self._alone_token_s if self._token_s is None else self._token_s
        if alone_s is None or token_s is None:
            return most  # nothing has run yet: what is to be spared is not known
        return min(most, max(MIN_PREFILL_TOKENS, int((SLOWDOWN - 1) * alone_s / token_s)))

    def _decode(self, size: int) -> float | None:
        """Return the seconds of a decode step of about that size: the nearest smaller one known, else the nearest
        larger.
        """
        if size in self._decode_s or not self._decode_s:
            return self._decode_s.get(size)
        smaller = [known for known in self._decode_s if known < size]
        return self._decode_s[max(smaller) if smaller else min(self._decode_s)]


def _mean(before: float | None, new: float, weight: float = _WEIGHT) -> float:
    return new if before is None else before + weight * (min(new, _OUTLIER * before) - before)


GROWTH_TOKENS = 16
"""Tokens by which each slot that runs can grow when another begins: a block of the paths on a CPU."""
WAITING_SERVED_RATIO = 0.3
"""Share of short prompts that wait over slots that run from which on these pause for them. Doubling it makes prompts
wait for twice as many others. Name and idea are those of text-generation-inference."""
SHORT_STEPS = 2
"""Whole steps that a short prompt takes at most: for a longer one nobody pauses. Doubling it doubles that pause."""


class Want(Enum):
    """The use that a slot has for a place in the next forward."""

    STEP = auto()
    """A verify or one more draft token, ready to go."""
    PREFILL = auto()
    """Its prompt only: nothing was asked yet, or what was asked waits for a proposal."""
    NOTHING = auto()
    """It is between two rounds and will be back."""
    DORMANT = auto()
    """Nothing was asked of it for long: its memory is the first to be taken."""


class SlotDemand(NamedTuple):
    """A slot as the scheduler sees it."""

    key: SlotKey
    want: Want
    num_committed: int
    num_cached: int
    num_after: int
    """Tokens in its cache after its next step; never more than fit the pool alone."""
    num_blocks: int
    """Blocks that it holds."""
    num_copied: int = 0
    """Is 1 when its next token goes into a block that others read, which costs one block more."""
    num_source_blocks: int = 0
    """Blocks of its source, held or not."""
    num_to_encode: int = 0
    """Tokens that the encoder has to read first, all in one forward."""
    most_narrow: int = MAX_NARROW
    """Most tokens that ride along in its step."""
    scheduling: Scheduling = Scheduling()

    @property
    def num_to_read(self) -> int:
        """Tokens of its whole text, those of its source among them while that is not encoded."""
        return self.num_committed + self.num_to_encode

    @property
    def is_waiting(self) -> bool:
        """Return whether it is to begin, or to be fed."""
        if self.want is Want.STEP:
            return bool(not self.num_blocks or self.num_to_feed)
        return self.want is Want.PREFILL and bool(self.num_to_feed)

    @property
    def num_to_feed(self) -> int:
        """Tokens to be fed before its step: those of its source, then prompt tokens, in pieces; 0 when few enough ride
        along.
        """
        if self.num_to_encode:
            return self.num_to_encode
        num_uncached = self.num_committed - self.num_cached
        return num_uncached - 1 if num_uncached > self.most_narrow else 0


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take the slot's blocks away, and ask again: what that frees is known only then."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Admit:
    """Let the slot begin: adopt what is cached of its tokens. Its Run or Feed follows."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Run:
    """Put the slot's step into the next forward."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Feed:
    """Put at most so many tokens of the slot's prompt into the next forward."""

    key: SlotKey
    num_tokens: int


class Why(Enum):
    """The reason of a Wait."""

    MEMORY = auto()
    """No blocks, or an older slot waits for some."""
    BUDGET = auto()
    """Older prompts fill the step."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Leave the slot, which has work, out of the next forward."""

    key: SlotKey
    why: Why


Decision = Preempt | Admit | Run | Feed | Wait


class Scheduler:
    """Decides on the next forward; remembers nothing but the cost of steps, and whose prompts were fed."""

    def __init__(self, block_size: int, max_prefill_tokens: int) -> None:
        self.cost = StepCost()
        self._block_size = block_size
        self._max_prefill_tokens = max_prefill_tokens
        self._fed = VirtualTokens()

    def plan(self, demands: Sequence[SlotDemand], num_free: int) -> list[Decision]:
        """Decide on the next forward. demands: every open slot, the longest open first. num_free: blocks to be had.

        Either all decisions are Preempt, and the caller asks again after them, or none is. Run comes before the rest.
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
        """Return the indices of slots that would be fed, or begin, in the order of their turns."""
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
    """Makes the decisions of one call of `Scheduler.plan`, which end with the first Preempt."""

    def __init__(self, demands: Sequence[SlotDemand], num_free: int, block_size: int) -> None:
        self.decisions: list[Decision] = []
        self.preempted: list[Preempt] = []
        self._demands = demands
        self._num_free = num_free
        self._block_size = block_size

    def run(self) -> int:
        """Decide on the steps of slots that hold memory already; return how many tokens they feed."""
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
        """Return the tokens that slots between two steps will feed: they have answers out, or proposals under way."""
        waiting = [d for d in self._demands if d.want in (Want.NOTHING, Want.PREFILL)]
        # Guesses of the last step may still be in its cache.
        return sum(max(1, d.num_after - d.num_cached) for d in waiting if d.num_blocks and not d.num_to_feed)

    def feed(self, waiting: Sequence[int], beside: int, most: int) -> None:
        """Decide on prompts, as far as the budget in tokens and memory go.

        waiting: indices of slots that want some, in the order of their turns. beside: tokens that hardly delay those
        who run. most: tokens of a whole step.
        """
        spare = self._num_spare()
        short = self._pause_for(most)
        num_fed = 0
        no_memory = False  # for one that holds nothing, so that none that comes after it may begin
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
        """Return the tokens of the longest text for whose prompt those who run pause; 0: for none."""
        short = SHORT_STEPS * most
        running = [d for d in self._demands if d.num_blocks and not d.num_to_feed and d.want is not Want.DORMANT]
        wanting = [d for d in self._demands if d.want in (Want.STEP, Want.PREFILL) and d.num_to_feed]
        waiting = [d for d in wanting if d.num_to_read <= short]
        if running and len({d.scheduling.caller for d in (*running, *waiting)}) > 1:
            return 0  # nobody pauses for another caller's
        return short if len(waiting) >= WAITING_SERVED_RATIO * len(running) else 0

    def _feed(self, demand: SlotDemand, index: int, budget: int) -> int:
        """Decide on part of a prompt, of a slot that holds memory or was just admitted; return its tokens."""
        if budget <= 0:
            self.decisions.append(Wait(demand.key, Why.BUDGET))
            return 0
        least = 0 if demand.num_to_encode else 1  # tokens that a piece adds to its cache
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
        """Decide on the step of a slot whose whole text is short; return its tokens."""
        self._num_free -= self._missing(demand, demand.num_after)
        self.decisions.append(Run(demand.key))
        return demand.num_after

    def _num_spare(self) -> int:
        """Return the free blocks that nobody who holds memory counts on: to grow, and what half-fed prompts still need.

        Dormant slots count on nothing: what they hold is taken when it is needed.
        """
        holding = [d for d in self._demands if d.num_blocks and d.want is not Want.DORMANT]
        half_fed = sum(self._missing(demand, demand.num_after) for demand in holding if demand.num_to_feed)
        return self._num_free - sum(self._reserve(demand) for demand in holding) - half_fed

    def _reserve(self, demand: SlotDemand) -> int:
        """Return the blocks that the slot needs to grow after its next step: none while its last one has the tokens."""
        return int(-demand.num_after % self._block_size < GROWTH_TOKENS)

    def _missing(self, demand: SlotDemand, num_tokens: int) -> int:
        """Return the blocks to be had before the slot's cache can hold num_tokens."""
        missing = demand.num_source_blocks - (-num_tokens // self._block_size) - demand.num_blocks
        return max(missing, 0) + (demand.num_copied if num_tokens > demand.num_cached else 0)

    def _make_room(self, num_blocks: int, index: int) -> None:
        """Take blocks for the slot at `index`: from dormant slots, then from younger ones, the youngest first."""
        younger = [d for d in reversed(self._demands[index + 1 :]) if d.num_blocks and d.want is not Want.DORMANT]
        self._take(num_blocks, [*self._dormant(), *younger])

    def _dormant(self) -> list[SlotDemand]:
        return [demand for demand in self._demands if demand.want is Want.DORMANT and demand.num_blocks]

    def _take(self, num_blocks: int, victims: Sequence[SlotDemand]) -> None:
        """Preempt as many of them as it takes; none when all together do not hold so many."""
        if num_blocks > sum(victim.num_blocks for victim in victims):
            return
        for victim in victims:
            if num_blocks <= 0:
                return
            self.preempted.append(Preempt(victim.key))
            num_blocks -= victim.num_blocks


DORMANT_S = 1.0
"""Seconds without a message after which a slot gives its memory up first. Doubling it lets idle slots hold on twice as
long."""
RETRY_S = DORMANT_S / 10
"""Seconds between two looks while somebody waits for memory and nothing else happens: a slot may turn dormant."""


class StepRequest(NamedTuple):
    """The use that a worker has for a slot's turn."""

    want: Want
    num_after: int
    """Tokens in the slot's cache after its next step."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt, or a source to be encoded, in the next forward."""

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
        """Return whether a further call would decide otherwise."""
        return bool(self.running or self.pieces or self.num_admitted)


class StepScheduler:
    """Applies the scheduler's decisions for both workers, which run the forward and say when it is done."""

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
        """Number of slots that lost their memory, or waited for some, in the last turn."""
        return self._num_starved

    def take(self, step_requests: Mapping[SlotKey, StepRequest], now: float, *, feed_all: bool) -> Turn:
        """Decide on the next forward, and give and take memory for it. Slots without a step_request want nothing, or
        with feed_all that their prompts be fed.
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
        """Return when to ask again though nothing has happened; None when nobody waits for memory."""
        return now + RETRY_S if self._num_starved else None

    def done(self, turn: Turn, num_run_tokens: int, seconds: float) -> None:
        """Note that the forward of `turn` has run, and took so long with all that belongs to it."""
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
        num_rows = VERIFY_TOKENS * (self._table.max_slots - num_running)  # of logits that the memory budget has left
        for decision in decisions:
            match decision:
                case Run(key):
                    running.append(key)
                case Feed(key, num_tokens):
                    slot = self._slot(key)
                    # The prefix cache may have had all of it.
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
    elif now - slot.asked_s >= DORMANT_S:  # not even its prompt: it would take back what was taken from it
        want, num_after = Want.DORMANT, num_committed
    else:
        want, num_after = Want.PREFILL if feed_all and needs_prefill(slot) else Want.NOTHING, num_committed
    blocks = (slot.num_blocks, slot.num_copied, slot.num_source_blocks)
    rest = (*blocks, slot.num_to_encode, slot.most_narrow, slot.scheduling)
    return SlotDemand(slot.key, want, num_committed, num_cached, num_after, *rest)


def _piece(slot: Slot, most: int, most_logits: int) -> Piece:
    """most_logits: rows of logits to be had, where the prompt is scored."""
    num_cached = len(slot.cached)
    if slot.num_to_encode:
        return Piece(slot, Row(slot.table, (), num_cached, 0, slot.cached, source=slot.source))
    # Behind each token that is fed stands what the next one is scored by.
    scoring = slot.scoring if slot.num_unscored else None
    if scoring is not None:
        most = min(most, most_logits + len(scoring.found) - num_cached)
    ids = slot.uncached(min(most, slot.num_feedable - 1 - num_cached))
    features = slot.features_of(len(ids))
    num_logits = 0 if scoring is None else max(0, num_cached + len(ids) - len(scoring.found))
    return Piece(slot, Row(slot.table, ids, num_cached, num_logits, slot.cached, features=features, source=slot.source))
