"""What a target keeps of a tree, on the host and on a device: in words, against chains, and with what is reported."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine import memory
from outrider.engine.sampling import coupled
from outrider.engine.sampling.coupled import coupled_id
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, SamplingState
from outrider.engine.sampling.token_distribution import TokenDistribution, truncate_topk
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.params import SamplingParams
from target_service.drafting.proposal import Proposal
from target_service.step import decide_on_device as device_rules
from target_service.step.decide import decide
from target_service.step.decide_on_device import decide_on_device
from tests.live_bytes import LiveBytes
from tests.proposals import PlainSlot, by_token, chain_proposal, tree_draws
from tests.unit.target_service.step.test_decide import PROMPT, waiting_once

VOCAB = 12
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 1.5, "bad_words": ((7,), (1, 2))},
    {"acceptance": AcceptanceRule.COUPLED},
    {"acceptance": AcceptanceRule.COUPLED, "top_k": 6, "temperature": 0.6, "repetition_penalty": 1.3},
    {},
    {"top_k": 5, "presence_penalty": 0.7},
)


@dataclass
class Slot:
    ready: Proposal
    state: SamplingState
    logits: Tensor


def make(kind: int, parents: list[int], seed: int, chain: bool = False, **params: Any) -> Slot:
    """A tree (or, of one branch, a chain) whose siblings are the draft's best, or drawn from its law."""
    generator = torch.Generator().manual_seed(seed)
    numbers = np.random.default_rng(seed)
    made = SamplingParams(max_tokens=100, seed=seed, **KINDS[kind], **params)
    state = SamplingState(made, PROMPT, (0,))
    own = 2 * torch.randn(len(parents) + 1, VOCAB, generator=generator)
    off = HostLogits(own + 0.7 * torch.randn(own.shape, generator=generator))
    ids, laws, left = list[int](), dict[int, TokenDistribution](), dict[int, TokenDistribution]()
    for node, parent in enumerate(parents):
        prefix = DraftTree.of(ids, parents[:node]).prefix(parent)
        if parent not in laws:
            laws[parent] = left[parent] = off.distribution(parent + 1, LogitRow(state, prefix)).normalised()
        if made.greedy:
            ranked = off.ranked(parent + 1, LogitRow(state, prefix), VOCAB)[0]
            ids.append(next(i for i in ranked if i not in [ids[c] for c in range(node) if parents[c] == parent]))
        elif made.is_deterministic:
            ids.append(coupled_id(left[parent], made, len(PROMPT) + len(prefix)))
        else:
            ids.append(left[parent].draw(float(numbers.uniform(1e-9, 1))))
        left[parent] = left[parent].without(ids[-1])
    slot: Any = PlainSlot(made, PROMPT)
    if chain:
        return Slot(chain_proposal(slot, ids, None if made.is_deterministic else list(laws.values())), state, own)
    tree = DraftTree.of(ids, parents)
    draws = [] if made.is_deterministic else tree_draws({at: [(law, tree.children(at))] for at, law in laws.items()})
    return Slot(Proposal(slot, tree, draws), state, own)


def decided(*slots: Slot) -> list[Any]:
    with by_token():
        return decide([s.ready for s in slots], [s.state for s in slots], torch.cat([s.logits for s in slots]))


@st.composite
def parents_of(draw: st.DrawFn) -> list[int]:
    """Of at most 8 nodes, no more than 4 siblings."""
    parents: list[int] = []
    for node in range(draw(st.integers(1, 8))):
        open_ = [p for p in range(-1, node) if parents.count(p) < 4]
        parents.append(draw(st.sampled_from(open_)))
    return parents


@given(st.sampled_from([0, 1, 2, 3]), parents_of(), st.integers(0, 10_000))
@settings(max_examples=80)
def test_draft_tokens_are_walked_as_far_as_they_match(kind: int, parents: list[int], seed: int) -> None:
    slot = make(kind, parents, seed)
    tree = slot.ready.tree
    found = decided(slot)[0]
    node, host = ROOT, HostLogits(slot.logits)
    for kept in (*found.path, None):
        row, position = LogitRow(slot.state, tree.prefix(node)), len(PROMPT) + tree.depth(node)
        best = host.best_id(node + 1, row)
        says = (
            best
            if slot.state.params.greedy
            else coupled_id(host.distribution(node + 1, row), slot.state.params, position)
        )
        if kept is None:
            assert found.next_id == says and says not in [tree.ids[c] for c in tree.children(node)]
        else:
            assert tree.parents[kept] == node and tree.ids[kept] == says
            node = kept


@given(st.integers(0, len(KINDS) - 1), st.integers(1, 5), st.integers(0, 10_000))
@settings(max_examples=80)
def test_a_tree_of_one_branch_is_decided_as_the_chain(kind: int, num: int, seed: int) -> None:
    """Of the same numbers of the generator: by token, under `rejection`."""
    parents = list(range(-1, num - 1))
    tree, chain = (decided(make(kind, parents, seed, chain=is_chain))[0] for is_chain in (False, True))
    assert tree == chain and tree.path == tuple(range(len(tree.path)))


def on_device(*slots: Slot) -> list[Any]:
    """What a device decides; the host waits for that once."""
    ready, states = [slot.ready for slot in slots], [slot.state for slot in slots]
    logits = torch.cat([slot.logits for slot in slots])
    with by_token():
        return waiting_once(logits, lambda there: decide(ready, states, there))  # type: ignore[no-any-return]


@given(st.lists(st.tuples(st.integers(0, len(KINDS) - 1), parents_of(), st.booleans()), min_size=2, max_size=5))
@settings(max_examples=40)
def test_trees_and_chains_in_one_step(wanted: list[tuple[int, list[int], bool]]) -> None:
    """Each as if it were alone, and on a device as on the host, with what is reported."""
    slots = []
    for seed, (kind, parents, chain) in enumerate(wanted):
        parents = list(range(-1, len(parents) - 1)) if chain else parents
        slots.append(make(kind, parents, seed, chain=chain, num_logprobs=(None, 0, 3)[seed % 3]))
    together = decided(*slots)
    assert together == [decided(slot)[0] for slot in slots]
    for here, there in zip(together, on_device(*slots), strict=True):
        assert dataclasses.replace(there, reported=()) == dataclasses.replace(here, reported=())
        assert len(there.reported) == len(here.reported)
        for found, expected in zip(there.reported, here.reported, strict=True):
            assert found[1] == expected[1] and found[0] == pytest.approx(expected[0], abs=1e-6)


def merged(seed: int, vocab_size: int = VOCAB, **params: Any) -> Slot:
    """A tree that two drafters drew and a third guessed: draws of both may be one node."""
    numbers = np.random.default_rng(seed)
    own = SamplingParams(max_tokens=100, seed=seed, temperature=1.0, top_k=int(numbers.integers(4, 9)))
    own = dataclasses.replace(own, **params)
    state = SamplingState(own, PROMPT, (0,))
    ids, parents, drawn = list[int](), list[int](), dict[int, list[tuple[TokenDistribution, list[int]]]]()
    for parent in range(ROOT, 3):
        if parent >= len(ids):
            break
        children: dict[int, int] = {}

        def child(token_id: int, parent: int = parent, children: dict[int, int] = children) -> int:
            if token_id not in children:
                children[token_id] = len(ids)
                ids.append(token_id)
                parents.append(parent)
            return children[token_id]

        for _ in range(int(numbers.integers(0, 3))):
            law = TokenDistribution(vocab_size, numbers.normal(size=vocab_size).astype(np.float32) * 2)
            if numbers.integers(2):
                law = truncate_topk(law, 5)
            law, left, nodes = law.normalised(), law, list[int]()
            for _ in range(int(numbers.integers(1, 4))):
                token_id = left.draw(float(numbers.uniform(1e-9, 1)))
                left = left.without(token_id)
                nodes.append(child(token_id))
            drawn.setdefault(parent, []).append((law, nodes))
        child(int(numbers.integers(vocab_size)))
    slot: Any = PlainSlot(own, PROMPT)
    logits = torch.from_numpy(2 * numbers.normal(size=(len(ids) + 1, vocab_size)).astype(np.float32))
    draws = tree_draws(drawn)
    return Slot(Proposal(slot, DraftTree.of(ids, parents), draws), state, logits)


def test_draws_of_several_drafters_and_deterministic_tokens_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [merged(seed) for seed in range(60)]
    expected = decided(*slots)
    assert on_device(*slots) == expected
    num_accepted = [len(found.path) for found in expected]
    assert 0 in num_accepted and max(num_accepted) > 1
    monkeypatch.setattr(device_rules, "MAX_NUMBERS", 7 * VOCAB)  # in parts of a few rows
    assert on_device(*slots) == expected


def test_what_trees_hold_on_a_device_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = 16384
    slots = [merged(seed, vocab_size, repetition_penalty=1.2) for seed in range(6)]
    logits = torch.cat([slot.logits for slot in slots])
    for module in (coupled, memory, device_rules):
        monkeypatch.setattr(module, "MAX_NUMBERS", logits.numel())
    with torch.inference_mode(), LiveBytes(logits) as live:
        decide_on_device([slot.ready for slot in slots], [slot.state for slot in slots], logits)
    counted = memory.decision_bytes(logits.numel())
    assert 0.9 * counted <= live.peak <= counted, live.peak / logits.nbytes


@pytest.mark.parametrize("where", ["host", "device"])
def test_logits_off_the_path_may_be_anything(where: str) -> None:
    decide_there = decided if where == "host" else on_device
    slot = make(0, [-1, -1, 0, 1], 3)
    before = decide_there(slot)[0]
    off = next(node for node in range(4) if node not in before.path)
    slot.logits[off + 1] = torch.nan
    assert decide_there(slot)[0] == before
    slot.logits[0] = torch.nan
    sound, failed = decide_there(make(0, [-1], 1), slot)
    assert sound == decide_there(make(0, [-1], 1))[0]
    assert isinstance(failed, NonFiniteLogits) and failed.rows == (2,)
