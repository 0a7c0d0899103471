"""Whatever a gateway sends, in whatever order, a slot's logits are those of a fresh prefill of its committed tokens.

The machine plays gateways over a real SlotTable and ModelRunner: rounds of both workers, retries, duplicates, stale
and early messages, truncations at any time, closes and lost streams; and a scheduler that takes a slot's memory away at
any time, while prompts that begin alike share theirs. It keeps its own record of what each slot must hold, by the rules
of the protocol alone. Hypothesis chooses the order of events and a seed for each: tokens that it
draws one by one are so often equal that guesses are hardly ever wrong. Over both paths that Llama-like models are
served by.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from outrider.engine.attention.forward_path import BLOCK_SIZE, ForwardPath
from outrider.engine.attention.fused import FusedPath
from outrider.engine.attention.paged import PagedPath
from outrider.engine.kv_pool import KVPool
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.native.build import BuildError
from outrider.engine.native.library import library
from outrider.engine.step_plan import Row
from outrider.engine.worker.open_slots import MissingTokens
from outrider.engine.worker.slots import Slot, SlotTable
from outrider.wire.errors import InvalidRequest, Overloaded
from outrider.wire.requests.params import SamplingParams
from tests.forked_table import forked
from tests.rounds import Grown
from tests.tiny_models import random_model

TOLERANCE = 1e-4
VOCAB_SIZE = 5
"""So small that guesses are often right and old guesses often come true."""
NUM_BLOCKS, MAX_SLOTS, CONTEXT = 20, 3, 96

SEED = st.integers(0, 2**32)
PICK = st.integers(0, MAX_SLOTS - 1)

SEEN: Counter[str] = Counter()
"""How often what matters happened, over all runs of the machine."""
MAX_RUNS = 3
GUESSES = ("wrong guesses dropped", "right guesses kept")
EXPECTED_EVENTS = (*GUESSES, "behind", "repeated", "overloaded", "preempted", "adopted", "evicted", "branches")


def make_model() -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": CONTEXT}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return random_model(LlamaConfig(**sizes, **heads), seed=1)


MODEL = make_model()
FACTS = ModelFacts("tiny", VOCAB_SIZE, CONTEXT, "float32", "cpu", (), 0)
UNCACHED = UncachedModel(MODEL)
TRUTH: dict[tuple[int, ...], Tensor] = {}


def tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(VOCAB_SIZE) for _ in range(count)]


def true_logits(ids: list[int]) -> Tensor:
    """[V] after the last of ids, from a forward without cache."""
    key = tuple(ids)
    if key not in TRUTH:
        TRUTH[key] = UNCACHED.forward(ids)[-1]
    return TRUTH[key]


@dataclass
class Request:
    """The gateway's view: what it knows to be committed, and what the worker must hold."""

    num_prompt: int
    max_len: int
    committed: list[int]
    worker: list[int]
    sent: list[tuple[int, list[int]]] = field(default_factory=list)
    """Every (base_len, ids) so far, to be repeated at bad moments."""


class Workers(RuleBasedStateMachine):
    runner: ModelRunner
    """Over the path in question, of each subclass."""

    @initialize()
    def start(self) -> None:
        self.runner.set_pool(KVPool(NUM_BLOCKS, BLOCK_SIZE))
        self.table = SlotTable(self.runner.pool, MAX_SLOTS, CONTEXT)
        self.fill_the_prefix_cache()
        self.requests: dict[tuple[int, int], Request] = {}
        self.num_thrown = 0

    def fill_the_prefix_cache(self) -> None:
        """With what no request asks for: whatever is fed evicts something."""
        num_tokens, table = NUM_BLOCKS * BLOCK_SIZE, self.runner.pool.new_table()
        table.reserve(num_tokens)
        self.runner.pool.prefix.publish(table, [VOCAB_SIZE] * num_tokens)
        table.free()
        assert self.runner.pool.num_cached == NUM_BLOCKS

    def dice(self, seed: int) -> random.Random:
        """Hypothesis repeats its favourite seeds; a course of events must not repeat itself."""
        self.num_thrown += 1
        return random.Random(f"{seed} {self.num_thrown}")

    def pick(self, which: int) -> tuple[Slot, Request]:
        key = sorted(self.requests)[which % len(self.requests)]
        slot = self.table.get(*key)
        assert slot is not None
        return slot, self.requests[key]

    # What a gateway sends -------------------------------------------------------------------------------------------

    @rule(owner=st.integers(1, 2), slot_id=st.integers(1, 3), seed=SEED)
    def open(self, owner: int, slot_id: int, seed: int) -> None:
        """Also over a slot of the same key, and with output committed already, as after a restart."""
        dice = self.dice(seed)
        key, old = (owner, slot_id), self.requests.get((owner, slot_id))
        num_prompt, max_tokens = dice.choice((1, 5, 15, 16, 17, 40)), dice.choice((2, 12, 25, 48))
        family = random.Random(dice.randrange(3))  # so that prompts begin alike
        committed = tokens(family, num_prompt + dice.choice((0, 0, min(5, max_tokens - 1))))
        max_len = num_prompt + max_tokens
        others = [request for other, request in self.requests.items() if other != key]
        fits = len(others) < MAX_SLOTS
        try:
            self.table.open(owner, slot_id, committed, num_prompt, SamplingParams(max_tokens=max_tokens))
        except Overloaded:
            assert not fits
            assert self.requests.get(key) is old
            SEEN["overloaded"] += 1
        else:
            assert fits
            self.requests[key] = Request(num_prompt, max_len, list(committed), list(committed))

    @precondition(lambda self: self.requests)
    @rule(picks=st.lists(PICK, min_size=1, max_size=3), seed=SEED, num_rounds=st.integers(1, 4))
    def verify(self, picks: list[int], seed: int, num_rounds: int) -> None:
        """As the target does: forwards over K + 1 positions of several slots, ragged K. A verdict may get lost."""
        dice = self.dice(seed)
        for _ in range(num_rounds):
            batch = []
            for slot, request in {id(pair[0]): pair for pair in map(self.pick, picks)}.values():
                if len(request.committed) < request.max_len and self.commit(slot, request, dice):
                    room = request.max_len - len(slot.committed) - 1
                    batch.append((slot, request, tokens(dice, dice.randint(0, min(5, room)))))
            self.verify_batch(batch, dice)

    def verify_batch(self, batch: list[tuple[Slot, Request, list[int]]], dice: random.Random) -> None:
        for slot, _, _ in batch:
            self.begin(slot)
        rows = [Row.of(s.table, [*s.committed, *guesses], len(s.cached), len(guesses) + 1) for s, _, guesses in batch]
        parts = self.runner.forward(rows).split([row.num_logits for row in rows])
        for (slot, request, guesses), logits in zip(batch, parts, strict=True):
            slot.fed([*slot.committed, *guesses][len(slot.cached) :])
            for j in range(len(guesses) + 1):
                self.compare(slot.committed + guesses[:j], logits[j])
            new = [*guesses[: dice.randint(0, len(guesses))], *tokens(dice, 1)]
            slot.commit_from(len(slot.committed), new)
            request.worker.extend(new)
            if dice.random() < 0.8 and request.committed == request.worker[: -len(new)]:
                request.committed = list(request.worker)

    @precondition(lambda self: self.requests)
    @rule(which=PICK, seed=SEED, num_rounds=st.integers(1, 4))
    def verify_trees(self, which: int, seed: int, num_rounds: int) -> None:
        """Token trees in two feeds, one path of each kept; the next message drops what was fed before a failure."""
        slot, request = self.pick(which)
        dice = self.dice(seed)
        for _ in range(num_rounds):
            if len(request.committed) == request.max_len or not self.commit(slot, request, dice):
                return
            self.begin(slot)
            start, room = len(slot.cached), request.max_len - len(slot.committed) - 1
            tree = Grown(self.runner, slot.table, list(slot.cached), slot.committed[start:], [])
            tree.parents = list(range(-1, len(tree.nodes) - 1))
            last = len(tree.nodes) - 1
            for _ in range(dice.randint(0, 7)):
                node = dice.randint(last, len(tree.nodes) - 1)
                if len(tree.path_to(node)) - 1 - last < room:
                    tree.parents.append(node)
                    tree.nodes += tokens(dice, 1)
            cut = dice.randint(1, len(tree.nodes))
            parts = [self.runner.forward([tree.row(0, cut)])]
            if cut < len(tree.nodes):
                parts.append(self.runner.forward([tree.row(cut, len(tree.nodes))]))
            for node, logits in enumerate(torch.cat(parts)):
                self.compare(tree.chain_to(node), logits)
            SEEN["branches"] += len(tree.leaves()) > 1
            if dice.random() < 0.1:
                slot.reconcile()
                continue
            tree.keep(dice.randint(last, len(tree.nodes) - 1))
            slot.fed(tree.ids[start:])
            new = [*tree.ids[len(slot.committed) :], *tokens(dice, 1)]
            slot.commit_from(len(slot.committed), new)
            if dice.random() < 0.8 and request.committed == request.worker:
                request.committed = [*request.worker, *new]
            request.worker.extend(new)

    @precondition(lambda self: self.requests)
    @rule(which=PICK, seed=SEED, num_rounds=st.integers(1, 4))
    def propose(self, which: int, seed: int, num_rounds: int) -> None:
        """As the draft does: feeds its own guesses one by one, all but the last, and leaves them in the cache."""
        slot, request = self.pick(which)
        dice = self.dice(seed)
        for _ in range(num_rounds):
            if not self.commit(slot, request, dice):
                continue
            ids = list(slot.committed)
            for _ in range(min(dice.randint(1, 6), request.max_len - len(ids))):
                self.compare(ids, self.feed(slot, ids))
                ids += tokens(dice, 1)
                if dice.random() < 0.1:  # the RPC, while a proposal is under way
                    slot.truncate(dice.randint(1, len(ids)))
                elif dice.random() < 0.05:
                    self.take_memory(slot)
            self.learn(request, ids[len(slot.committed) :], dice)

    def learn(self, request: Request, guesses: list[int], dice: random.Random) -> None:
        """The target's verdict on a proposal and plain steps after it; this worker hears with the next message.

        Without the plain steps the first wrong guess would always be at the last committed token, which is never kept.
        """
        new = [*guesses[: dice.randint(0, len(guesses))], *tokens(dice, dice.choice((1, 1, 2, 4)))]
        if request.committed == request.worker:
            request.committed = [*request.committed, *new][: request.max_len - 1]

    @precondition(lambda self: self.requests)
    @rule(which=PICK, seed=SEED)
    def prefill_a_piece(self, which: int, seed: int) -> None:
        slot, request = self.pick(which)
        dice = self.dice(seed)
        if self.commit(slot, request, dice):
            end = dice.randint(0, len(slot.committed) - 1)
            self.begin(slot)
            if len(slot.cached) < end:
                new_ids = slot.committed[len(slot.cached) : end]
                self.runner.forward([Row(slot.table, new_ids, len(slot.cached), 0, slot.cached)])
                slot.fed_committed(new_ids)

    @precondition(lambda self: self.requests)
    @rule(which=PICK)
    def preempt(self, which: int) -> None:
        """An older slot needs the memory."""
        slot, _ = self.pick(which)
        self.take_memory(slot)

    @precondition(lambda self: any(request.sent for request in self.requests.values()))
    @rule(which=PICK, message=st.integers(0, 100))
    def repeat_a_message(self, which: int, message: int) -> None:
        """A duplicate, or a message overtaken by newer ones. It decides, as any message does."""
        slot, request = self.pick(which)
        if not request.sent:
            return
        base_len, ids = request.sent[message % len(request.sent)]
        if base_len > len(request.worker):
            with pytest.raises(MissingTokens):
                slot.commit_from(base_len, ids)
            return
        slot.commit_from(base_len, ids)
        request.worker[base_len:] = ids
        SEEN["repeated"] += 1
        if message % 2:
            self.check_reconcile(slot)

    @precondition(lambda self: self.requests)
    @rule(which=PICK)
    def send_nonsense(self, which: int) -> None:
        """Too short, too long, or past the end: refused, and nothing changes."""
        slot, request = self.pick(which)
        with pytest.raises(MissingTokens) as caught:
            slot.commit_from(len(request.worker) + 1, [1])
        assert caught.value.committed_len == len(request.worker)
        with pytest.raises(InvalidRequest):
            slot.commit_from(0, [1] * (request.num_prompt - 1))
        with pytest.raises(InvalidRequest):
            slot.commit_from(len(request.worker), [0] * (request.max_len - len(request.worker) + 1))

    @precondition(lambda self: self.requests)
    @rule(which=PICK, committed_len=st.integers(0, CONTEXT))
    def truncate(self, which: int, committed_len: int) -> None:
        slot, _ = self.pick(which)
        in_use, kept = self.table.pool.num_in_use, slot.cached[: max(committed_len - 1, 0)]
        freed = slot.truncate(committed_len)
        assert slot.cached == kept
        assert self.table.pool.num_in_use == in_use - freed
        assert slot.truncate(committed_len) == 0

    @precondition(lambda self: self.requests)
    @rule(which=PICK, really=st.integers(0, 2))
    def close(self, which: int, really: int) -> None:
        if really:  # rarely, or no slot would live long enough to see much
            return
        slot, _ = self.pick(which)
        held = sum(self.table.pool.num_references(block) == 1 for block in slot.table.blocks)
        assert self.table.close(*slot.key) == held
        assert self.table.close(*slot.key) == 0
        del self.requests[slot.key]

    @rule(owner=st.integers(1, 10))
    def lose_an_owner(self, owner: int) -> None:
        keys = [key for key in self.requests if key[0] == owner]
        assert self.table.close_owner(owner) == len(keys)
        for key in keys:
            del self.requests[key]

    @precondition(lambda self: self.requests)
    @rule(which=PICK)
    def fail_a_forward(self, which: int) -> None:
        """A token that the model cannot take, as from a broken peer: the slot is as before."""
        slot, _ = self.pick(which)
        before = (list(slot.cached), len(slot.table.blocks), slot.table.num_tokens)
        with pytest.raises(InvalidRequest):
            self.runner.forward([Row.of(slot.table, [*slot.cached, VOCAB_SIZE], len(slot.cached), 1)])
        assert (slot.cached, len(slot.table.blocks), slot.table.num_tokens) == before

    # What a worker does ---------------------------------------------------------------------------------------------

    def commit(self, slot: Slot, request: Request, dice: random.Random) -> bool:
        """The gateway's next message, from any length that it may think agreed. False when the slot was behind."""
        base_len = min(len(request.worker), len(request.committed))
        if dice.random() < 0.4:
            base_len = dice.randint(0, len(request.committed))
        ids = request.committed[base_len:]
        request.sent.append((base_len, ids))
        if base_len > len(request.worker):
            with pytest.raises(MissingTokens) as caught:
                slot.commit_from(base_len, ids)
            assert caught.value.committed_len == len(request.worker)
            SEEN["behind"] += 1
            return False
        slot.commit_from(base_len, ids)
        request.worker[base_len:] = ids
        self.check_reconcile(slot)
        return True

    def check_reconcile(self, slot: Slot) -> None:
        """The longest prefix that is committed stays, but never the last committed token."""
        known, cached = list(slot.committed), list(slot.cached)
        num_cached = slot.reconcile()
        agreed = next((i for i, (a, b) in enumerate(zip(cached, known, strict=False)) if a != b), None)
        if agreed is None:
            agreed = min(len(cached), len(known))
        expected = min(agreed, len(known) - 1)
        SEEN["wrong guesses dropped"] += agreed < min(len(cached), len(known) - 1)
        assert (num_cached, slot.cached, slot.committed) == (expected, known[:expected], known)
        SEEN["right guesses kept"] += expected == len(cached) > 0

    def begin(self, slot: Slot) -> None:
        """As at a slot's admission: what is committed, published and under the same salt need not be fed."""
        if not slot.table.blocks:
            evictions, num_known = self.table.pool.num_evictions, len(slot.committed)
            num_adopted = slot.adopt()
            assert slot.cached == slot.committed[:num_adopted] and num_adopted < num_known
            assert self.table.pool.num_evictions == evictions
            SEEN["adopted"] += num_adopted > 0

    def take_memory(self, slot: Slot) -> None:
        before = list(slot.committed)
        slot.free_cache()
        assert (slot.committed, slot.cached, slot.table.blocks) == (before, [], [])
        SEEN["preempted"] += 1

    def feed(self, slot: Slot, ids: list[int]) -> Tensor:
        """Bring the cache up to ids in one forward; [V] logits after the last."""
        self.begin(slot)
        logits = self.runner.forward([Row.of(slot.table, ids, len(slot.cached), 1)])
        slot.fed(ids[len(slot.cached) :])
        return logits[0]

    def compare(self, ids: list[int], logits: Tensor) -> None:
        assert float((logits - true_logits(ids)).abs().max()) < TOLERANCE

    # What must hold at all times ------------------------------------------------------------------------------------

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        if not hasattr(self, "table"):
            return
        slots, pool = list(self.table), self.table.pool
        blocks = [block for slot in slots for block in slot.table.blocks]
        assert len(set(blocks)) == pool.num_in_use
        assert all(pool.num_references(block) == count for block, count in Counter(blocks).items())
        assert self.table.num_in_use == len(slots) == len(self.requests)

    @invariant()
    def slots_hold_what_was_said(self) -> None:
        for slot in getattr(self, "table", ()):
            request = self.requests[slot.key]
            assert slot.committed == request.worker
            assert slot.table.num_tokens == len(slot.cached) <= request.max_len
            assert len(slot.table.blocks) == -(-len(slot.cached) // BLOCK_SIZE)

    @invariant()
    def cached_entries_are_what_a_fresh_prefill_gives(self) -> None:
        """On a fork, so that looking changes nothing: the next token's logits on top of every slot's cache."""
        for slot in getattr(self, "table", ()):
            ids = [*slot.cached, slot.committed[-1]]
            if len(ids) <= CONTEXT and self.table.pool.num_in_use < NUM_BLOCKS:
                fork = forked(self.table.pool, slot.table)
                self.compare(ids, self.runner.forward([Row.of(fork, ids, len(slot.cached), 1)])[0])
                fork.free()

    def teardown(self) -> None:
        for owner in (1, 2):
            self.table.close_owner(owner)
        assert self.table.pool.num_in_use == 0
        SEEN["evicted"] += self.table.pool.num_evictions
        TRUTH.clear()


def paths() -> Iterator[tuple[ForwardPath, int]]:
    """With the runs of the machine that each is worth."""
    yield PagedPath(MODEL, VOCAB_SIZE), 20
    try:
        library()
    except BuildError:  # such models are then served by the paged path alone
        return
    yield FusedPath(MODEL, FACTS), 40


def run_machines() -> None:
    for path, num_examples in paths():
        runner = ModelRunner(path, FACTS, KVPool(1, BLOCK_SIZE), MODEL.device)
        runner.tree_refusal = None
        machine = type(f"WorkersOf{type(path).__name__}", (Workers,), {"runner": runner})
        course = settings(max_examples=num_examples, stateful_step_count=50)
        run_state_machine_as_test(machine, settings=course)


def test_every_order_of_messages_leaves_what_a_fresh_prefill_gives() -> None:
    """The machine is of no use if the cases it is for do not happen: by chance the rare ones may need another run."""
    SEEN.clear()
    for _ in range(MAX_RUNS):
        run_machines()
        missing = [name for name in EXPECTED_EVENTS if not SEEN[name]]
        if not missing:
            break
    assert not missing, SEEN
