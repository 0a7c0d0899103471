"""The scheduler's laws, over a real pool and no model: who goes, who waits, who gives its memory up."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.kv_pool import BlockTable, KVPool
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
from outrider.engine.worker.planner import Scheduler
from outrider.wire.requests.scheduling import Scheduling

BLOCK_SIZE = 4


def state(
    index: int,
    want: Need = Need.RUN,
    committed: int = 9,
    cached: int | None = None,
    k: int = 4,
    blocks: int | None = None,
) -> SlotState:
    """A slot of 9 committed tokens that verifies 4 drafts, all but the last token cached, unless said otherwise."""
    num_cached = committed - 1 if cached is None else cached
    num_blocks = -(-num_cached // BLOCK_SIZE) if blocks is None else blocks
    return SlotState((1, index), want, committed, num_cached, committed + k, num_blocks)


def blank(index: int, committed: int = 9, want: Need = Need.RUN) -> SlotState:
    return state(index, want, committed, cached=0)


def plan(*states: SlotState, num_free: int = 100, budget: int = 64) -> list[Decision]:
    return Scheduler(BLOCK_SIZE, budget).plan(states, num_free)


def keys(decisions: list[Decision], kind: type) -> list[int]:
    return [decision.key[1] for decision in decisions if isinstance(decision, kind)]


def test_ready_steps_go_before_an_older_prompt() -> None:
    decisions = plan(state(1, Need.PREFILL, 300, cached=20), state(2), state(3))
    assert decisions == [Run((1, 2)), Run((1, 3)), PrefillSlot((1, 1), 64)]


def test_a_prompt_alone_gets_the_whole_budget() -> None:
    assert plan(state(1, Need.RUN, 300, cached=20)) == [PrefillSlot((1, 1), 64)]
    assert plan(state(1, Need.RUN, 60, cached=20)) == [PrefillSlot((1, 1), 39)]


def test_nobody_younger_overtakes_one_who_waits_for_memory() -> None:
    decisions = plan(state(1), blank(2, 80), blank(3), num_free=12)
    assert decisions == [Run((1, 1)), SkipSlot((1, 2), WaitReason.MEMORY), SkipSlot((1, 3), WaitReason.MEMORY)]


def test_a_slot_begins_when_all_that_it_needs_is_there() -> None:
    """9 + 4 tokens are 4 blocks; the running slot's own step takes 2, and 1 is left to it."""
    assert Admit((1, 2)) not in plan(state(1), blank(2), num_free=6)
    assert Admit((1, 2)) in plan(state(1), blank(2), num_free=7)


@pytest.mark.parametrize(("num_free", "num_begun"), [(4, 3), (3, 3), (2, 2)])
def test_a_block_that_has_tokens_left_is_what_its_slot_grows_into(num_free: int, num_begun: int) -> None:
    """Blocks of 256, as `flash` has them: a text of 20 tokens takes one, and none beside it."""
    scheduler = Scheduler(256, 64)
    begun = keys(scheduler.plan([blank(index, 20) for index in range(3)], num_free), Admit)
    assert begun == list(range(num_begun))
    running, nearly_full = state(0, Need.NOTHING, 20, k=0, blocks=1), state(1, Need.NOTHING, 250, k=0, blocks=1)
    assert keys(scheduler.plan([running, blank(2, 20)], num_free=1), Admit) == [2]
    assert keys(scheduler.plan([nearly_full, blank(2, 20)], num_free=1), Admit) == [], "the one block is for its growth"


def test_the_youngest_gives_its_memory_up() -> None:
    assert plan(state(1), state(2), state(3), num_free=1) == [Preempt((1, 3))]
    assert plan(state(1), state(2, Need.NOTHING), state(3, Need.PREFILL), num_free=0) == [Preempt((1, 3))]


def test_nobody_takes_from_an_older_one_unless_it_is_dormant() -> None:
    assert plan(state(1, Need.NOTHING), state(2), num_free=0) == [SkipSlot((1, 2), WaitReason.MEMORY)]
    assert plan(state(1, Need.DORMANT), state(2), state(3), num_free=0) == [Preempt((1, 1))]
    assert plan(state(1, Need.DORMANT), blank(2, 12), num_free=0)[0] == SkipSlot(
        (1, 2), WaitReason.MEMORY
    )  # that would not do
    assert plan(state(1, Need.DORMANT), blank(2, 4), num_free=1) == [Preempt((1, 1))]


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=12), st.integers(0, 8), st.data())
def test_dormant_slots_keep_nobody_waiting(held: list[tuple[int, bool]], num_free: int, data: st.DataObject) -> None:
    """Whatever they hold, and half-fed or not: a text that fits the pool begins, though none of them ever wakes."""
    dormant = [
        state(index, Need.DORMANT, (100 if half_fed else 1) + blocks * BLOCK_SIZE, blocks * BLOCK_SIZE, 0, blocks)
        for index, (blocks, half_fed) in enumerate(held)
    ]
    num_pool = num_free + sum(blocks for blocks, _ in held)
    committed = data.draw(st.integers(1, num_pool * BLOCK_SIZE))
    asking = state(99, Need.RUN, committed, cached=0, k=0)
    decisions = plan(*dormant, asking, num_free=num_free, budget=10_000)
    taken = set(keys(decisions, Preempt))
    if taken:
        num_free += sum(d.num_blocks for d in dormant if d.key[1] in taken)
        decisions = plan(*(d for d in dormant if d.key[1] not in taken), asking, num_free=num_free, budget=10_000)
    assert keys(decisions, Admit) == [99]


def sourced(index: int, num_source: int, want: Need = Need.RUN, blocks: int = 0) -> SlotState:
    """A slot that has a start token, 4 drafts, and a source that is not encoded."""
    num_source_blocks = -(-num_source // BLOCK_SIZE)
    return SlotState((1, index), want, 1, 0, 5, blocks, 0, num_source_blocks, num_source)


def test_a_source_is_encoded_whole_and_counts_against_the_budget() -> None:
    """What is left of the budget does for one that is longer, and for none after it."""
    assert plan(sourced(1, 100)) == [Admit((1, 1)), PrefillSlot((1, 1), 100)]
    decisions = plan(*(sourced(index, 40) for index in range(1, 4)))
    assert fed_tokens(decisions) == {1: 40, 2: 40} and SkipSlot((1, 3), WaitReason.BUDGET) in decisions
    decisions = plan(sourced(1, 64), state(2), sourced(3, 1))
    assert fed_tokens(decisions) == {1: 64} and keys(decisions, Run) == [2]


def test_a_slot_with_a_source_begins_only_when_both_fit() -> None:
    """5 tokens are 2 blocks, 17 of a source 5; the running slot's own step takes 2, and 1 is left to it."""
    assert keys(plan(state(1), sourced(2, 17), num_free=9), Admit) == []
    assert keys(plan(state(1), sourced(2, 17), num_free=10), Admit) == [2]
    held = sourced(2, 17, Need.PREFILL, blocks=1)
    assert PrefillSlot((1, 2), 17) in plan(state(1), held, state(3, Need.NOTHING), num_free=6)
    assert plan(state(1), held, state(3, Need.NOTHING), num_free=5) == [Preempt((1, 3))]


def test_a_prompt_is_fed_as_far_as_memory_goes() -> None:
    assert plan(state(1, Need.PREFILL, 80, cached=22), state(2, Need.NOTHING), num_free=2) == [PrefillSlot((1, 1), 10)]
    assert plan(state(1, Need.PREFILL, 80, cached=24), state(2, Need.NOTHING), num_free=0) == [Preempt((1, 2))]


def asked(index: int, committed: int, caller: bytes = b"", **scheduling: float) -> SlotState:
    """A prompt that has not begun."""
    own = Scheduling(caller, **scheduling)  # type: ignore[arg-type]
    return blank(index, committed, Need.PREFILL)._replace(scheduling=own)


def test_a_caller_with_a_short_prompt_waits_for_one_piece_of_anothers_and_no_more() -> None:
    scheduler, many = Scheduler(BLOCK_SIZE, 64), [asked(index, 999, b"many") for index in range(8)]
    assert fed_tokens(scheduler.plan(many, 9999)) == {0: 64}
    both = [*many, asked(8, 40, b"one")]
    assert 8 in fed_tokens(scheduler.plan(both, 9999)) or 8 in fed_tokens(scheduler.plan(both, 9999))


def test_prompts_are_fed_by_weight() -> None:
    scheduler, fed = Scheduler(BLOCK_SIZE, 64), Counter[int]()
    states = [asked(1, 99999, b"a", weight=1.0), asked(2, 99999, b"b", weight=3.0)]
    for _ in range(40):
        fed.update(fed_tokens(scheduler.plan(states, 99999)))
    assert fed == {1: 640, 2: 1920}


def test_a_callers_own_prompts_go_by_priority_and_nobody_elses() -> None:
    own = asked(1, 999, b"a"), asked(2, 999, b"a", priority=-1), asked(3, 999, b"a", priority=5)
    assert fed_tokens(plan(*own, asked(4, 999, b"b", priority=-9), num_free=9999)) == {2: 64}


def busy(num_running: int) -> tuple[Scheduler, list[SlotState]]:
    """Slots that run, of a scheduler that knows its costs: beside them 10 tokens go, alone 256."""
    scheduler = Scheduler(BLOCK_SIZE, 256)
    scheduler.cost.note(0, 256, 0.256)
    scheduler.cost.note(num_running, 0, 0.020)
    return scheduler, [state(index, k=0) for index in range(num_running)]


def fed_tokens(decisions: list[Decision]) -> dict[int, int]:
    return {d.key[1]: d.num_tokens for d in decisions if isinstance(d, PrefillSlot)}


def test_those_who_run_pause_for_many_short_prompts() -> None:
    """Three beside ten are enough; two are not, and a long one does not count."""
    scheduler, running = busy(10)
    short = [state(20 + index, Need.PREFILL, 101, cached=0, blocks=1) for index in range(3)]
    long = state(30, Need.PREFILL, 2 * 256 + 1, cached=500, blocks=125)  # nearly done
    assert fed_tokens(scheduler.plan([*running, *short], 500)) == {20: 100, 21: 100, 22: 56}
    assert fed_tokens(scheduler.plan([*running, *short[:2]], 500)) == {20: 10}
    assert fed_tokens(scheduler.plan([*running, *short[:2], long], 500)) == {20: 10}


def test_nobody_pauses_for_another_callers_prompts() -> None:
    scheduler, running = busy(2)
    others = [state(20 + index, Need.PREFILL, 101, cached=0, blocks=1) for index in range(3)]
    others = [each._replace(scheduling=Scheduling(b"another")) for each in others]
    assert fed_tokens(scheduler.plan([*running, *others], 500)) == {20: 10}
    assert fed_tokens(scheduler.plan(others, 500)) == {20: 100, 21: 100, 22: 56}


def test_a_long_prompt_gets_no_more_beside_short_ones_and_keeps_none_of_them_waiting() -> None:
    scheduler, running = busy(2)
    short = state(20, Need.PREFILL, 101, cached=0, blocks=1)
    long = state(30, Need.PREFILL, 6000, cached=0, blocks=1)
    assert fed_tokens(scheduler.plan([*running, long, short], 500)) == {30: 10, 20: 100}
    assert fed_tokens(scheduler.plan([*running, short, long], 500)) == {20: 100}
    assert fed_tokens(scheduler.plan([*running, long], 500)) == {30: 10}


def test_short_prompts_pass_a_long_one_that_has_not_begun() -> None:
    scheduler, running = busy(10)
    half_fed = state(20, Need.PREFILL, 6000, cached=400, blocks=100)
    waiting = blank(21, 6000, Need.PREFILL)
    short = [blank(30 + index, 101, Need.PREFILL) for index in range(3)]
    decisions = scheduler.plan([*running, half_fed, waiting, *short], 5000)
    assert fed_tokens(decisions) == {20: 10, 30: 100, 31: 100, 32: 46}
    assert SkipSlot((1, 21), WaitReason.BUDGET) in decisions


# a whole worker's life


@dataclass
class Sequence:
    """A request as a worker sees it: rounds with pauses between them, until so many tokens are committed."""

    key: tuple[int, int]
    table: BlockTable
    ids: list[int]
    num_end: int
    source: BlockTable
    num_source: int
    """Tokens that an encoder reads; 0 without one."""
    num_cached: int = 0
    k: int = 0
    want: Need = Need.PREFILL
    num_preempted: int = 0

    def state(self, pool: KVPool) -> SlotState:
        num_after = min(len(self.ids) + self.k, self.num_end)
        first = self.num_cached // BLOCK_SIZE
        shared = any(pool.num_references(block) > 1 for block in self.table.blocks[first : first + 1])
        blocks = (len(self.table.blocks) + len(self.source.blocks), int(shared), pool.num_blocks_for(self.num_source))
        return SlotState(self.key, self.want, len(self.ids), self.num_cached, num_after, *blocks, self.num_to_encode)

    @property
    def num_to_encode(self) -> int:
        return 0 if self.source.blocks else self.num_source

    @property
    def salt(self) -> bytes:
        return bytes([self.num_source])


@dataclass
class World:
    """Applies decisions as a worker does, and checks each. Prompts often begin alike, so blocks are shared."""

    num_blocks: int
    dice: random.Random
    has_encoder: bool = False
    scheduler: Scheduler = field(init=False)
    pool: KVPool = field(init=False)
    open: list[Sequence] = field(default_factory=list)
    num_done: int = 0
    num_preempted: int = 0

    def __post_init__(self) -> None:
        self.pool = KVPool(self.num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(BLOCK_SIZE, 32)

    def arrive(self, index: int) -> None:
        num_source = self.dice.randint(1, (self.num_blocks - 1) * BLOCK_SIZE) if self.has_encoder else 0
        most = (self.num_blocks - self.pool.num_blocks_for(num_source)) * BLOCK_SIZE
        num_prompt = self.dice.randint(1, max(1, most - 2))
        num_end = self.dice.randint(num_prompt + 1, most)
        ids, source = [self.dice.randint(0, 2)] * num_prompt, self.pool.new_table()
        self.open.append(Sequence((1, index), self.pool.new_table(), ids, num_end, source, num_source))

    def step(self) -> bool:
        """False when nothing could be done."""
        while True:
            states = [sequence.state(self.pool) for sequence in self.open]
            decisions = self.scheduler.plan(states, self.pool.num_free)
            if not any(isinstance(decision, Preempt) for decision in decisions):
                break
            assert all(isinstance(decision, Preempt) for decision in decisions)
            for decision in decisions:
                self.preempt(self.find(decision))
        self.check(states, decisions)
        worked = [decision for decision in decisions if isinstance(decision, Run | PrefillSlot)]
        num_fed = sum(decision.num_tokens for decision in worked if isinstance(decision, PrefillSlot))
        for decision in decisions:
            self.apply(decision)
        if worked:
            self.scheduler.cost.note(self.num_run(states, decisions), num_fed, 0.010 + 0.001 * num_fed)
        return bool(worked)

    def num_run(self, states: list[SlotState], decisions: list[Decision]) -> int:
        """Tokens of those whose step goes and who held memory before."""
        going = [d.key for d in decisions if isinstance(d, Run)]
        return sum(d.num_after - d.num_cached for d in states if d.key in going and d.num_blocks)

    def check(self, states: list[SlotState], decisions: list[Decision]) -> None:
        going = [d.key for d in decisions if isinstance(d, Run | PrefillSlot)]
        assert len(set(going)) == len(going)
        ready = [d for d in states if d.want is Need.RUN and d.num_blocks and not d.num_to_feed]
        waiting = [d.key for d in decisions if isinstance(d, SkipSlot)]
        assert all(d.key in going or d.key in waiting for d in ready)
        num_run = self.num_run(states, decisions)
        probe = bool(num_run) and self.scheduler.cost.needs_probe(num_run)  # prompts wait for one step
        for d in states:  # the oldest that wants something gets it, unless older ones hold the memory
            wants_work = d.want is Need.RUN or (d.want is Need.PREFILL and d.num_to_feed)
            if wants_work and not any(other.num_blocks for other in states if other.key < d.key):
                younger_hold = any(other.num_blocks for other in states if other.key > d.key)
                assert d.key in going or (not d.num_blocks and younger_hold) or (d.num_to_feed and probe)
            if wants_work:
                break
        begun = [d.key for d in decisions if isinstance(d, Admit)]
        for wait in (d for d in decisions if isinstance(d, SkipSlot)):
            one = next(d for d in states if d.key == wait.key)
            overtaking = [d for d in states if d.key in begun and d.key > one.key and not one.num_blocks]
            if wait.why is WaitReason.BUDGET:  # some need none of it, or have more of it
                overtaking = [d for d in overtaking if d.num_to_feed and d.num_to_read >= one.num_to_read]
            assert not overtaking

    def find(self, decision: Decision) -> Sequence:
        return next(sequence for sequence in self.open if sequence.key == decision.key)

    def preempt(self, sequence: Sequence) -> None:
        assert sequence.table.blocks or sequence.source.blocks
        self.publish(sequence)
        sequence.table.free()
        sequence.source.free()
        sequence.num_cached = 0
        self.num_preempted += 1

    def publish(self, sequence: Sequence) -> None:
        known = min(sequence.num_cached, len(sequence.ids))
        self.pool.prefix.publish(sequence.table, sequence.ids[:known], sequence.salt)

    def apply(self, decision: Decision) -> None:
        sequence = self.find(decision)
        match decision:
            case Admit():
                sequence.num_cached = self.pool.prefix.adopt(sequence.table, sequence.ids[:-1], sequence.salt)
            case PrefillSlot() if sequence.num_to_encode:
                assert decision.num_tokens == sequence.num_source
                sequence.source.reserve(sequence.num_source)
            case PrefillSlot():
                left = len(sequence.ids) - 1 - sequence.num_cached
                sequence.num_cached += max(0, min(left, decision.num_tokens))
                sequence.table.reserve(sequence.num_cached)  # raises when the plan promised what is not there
                self.publish(sequence)
            case Run():
                end = min(len(sequence.ids) + sequence.k, sequence.num_end)
                sequence.table.reserve(end)
                sequence.num_cached = end
                self.commit(sequence)

    def commit(self, sequence: Sequence) -> None:
        """Some drafts are right; the rest leaves the cache."""
        num_known = len(sequence.ids)
        sequence.ids += [self.dice.randint(0, 1) for _ in range(1 + self.dice.randint(0, sequence.k))]
        del sequence.ids[sequence.num_end :]
        sequence.num_cached = num_known
        sequence.table.truncate(sequence.num_cached)
        self.publish(sequence)
        sequence.want = Need.NOTHING
        if len(sequence.ids) >= sequence.num_end:
            sequence.table.free()
            sequence.source.free()
            self.open.remove(sequence)
            self.num_done += 1

    def ask(self, everybody: bool) -> None:
        """Gateways send the next verify, sometimes with drafts that are still on their way."""
        for sequence in self.open:
            if sequence.want is Need.NOTHING and self.dice.random() < 0.1:
                sequence.want = Need.DORMANT
            if everybody or self.dice.random() < 0.5:
                if sequence.want in (Need.NOTHING, Need.DORMANT):
                    sequence.k = self.dice.choice((0, 1, 4))
                    sequence.want = Need.PREFILL
                if everybody or self.dice.random() < 0.7:
                    sequence.want = Need.RUN


def test_every_request_ends_in_any_pool_that_holds_the_largest() -> None:
    """No livelock, no more promised than there is, nobody overtaken, nothing held at the end."""
    num_preempted: list[int] = []

    @settings(max_examples=120)
    @given(
        num_blocks=st.integers(2, 24),
        num_requests=st.integers(1, 12),
        seed=st.integers(0, 2**32),
        has_encoder=st.booleans(),
    )
    def live(num_blocks: int, num_requests: int, seed: int, has_encoder: bool) -> None:
        world = World(num_blocks, random.Random(seed), has_encoder)
        num_arrived = num_steps = 0
        while num_arrived < num_requests or world.open:
            if num_arrived < num_requests and world.dice.random() < 0.3:
                world.arrive(num_arrived)
                num_arrived += 1
            world.ask(everybody=False)
            if not world.step() and num_arrived == num_requests:
                world.ask(everybody=True)
                assert not world.open or world.step(), "everybody wants something and nobody gets it"
            num_steps += 1
            assert num_steps < 40 * num_requests * num_blocks * BLOCK_SIZE, "no end in sight"
        assert world.num_done == num_requests
        assert world.pool.num_in_use == 0
        num_preempted.append(world.num_preempted)

    live()
    assert sum(1 for count in num_preempted if count) > len(num_preempted) / 10, "memory was never tight"
