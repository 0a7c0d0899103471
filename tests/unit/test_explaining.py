"""What is told of a decision: the laws that it was made by, on the host and on a device, and nothing of it changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.sampling.penalties import LogitRow, SamplingState, process_unchecked
from outrider.engine.sampling.row_law import RowLaw, one_hot
from outrider.engine.sampling.sampling import distributions
from outrider.engine.sampling.tree_acceptance import DraftTree, Drawn
from outrider.engine.speculation.nodes import NodeKind, Nodes
from outrider.engine.speculation.ranks import RankShares, SlotShares
from outrider.v1 import common_pb2 as pb
from outrider.wire.kinds import Drafter
from target_service.decide import decide
from target_service.decide_on_device import Decided, decide_on_device
from target_service.explaining import NUM_BEST, Asking, explain
from target_service.lease import Delivered, Ready, Source
from target_service.parked import Parked, ParkedNode
from tests.unit.test_decide import KINDS, make_step
from tests.unit.test_tree_decision import KINDS as TREE_KINDS
from tests.unit.test_tree_decision import make, parents_of


def delivered(r: Ready) -> Ready:
    """The same with what a draft says of its nodes, as it came."""
    kind = NodeKind.GUESS if r.slot.params.determined else NodeKind.LAW
    tree = r.tree or DraftTree(tuple(r.draft_ids), tuple(r.parents))
    drafts = {
        node: ParkedNode(token_id, tree.children(tree.parents[node]).index(node), kind)
        for node, token_id in enumerate(tree.ids)
    }
    parked = Parked()
    for node, draft in drafts.items():
        above = parked.root if tree.parents[node] < 0 else drafts[tree.parents[node]]
        above.children[draft.token_id] = draft
    whose = Delivered(1, SlotShares(RankShares()), True, parked)
    ranks = {node: draft.rank for node, draft in drafts.items()}
    return dataclasses.replace(r, drafter=Drafter.MODEL, sources=[Source(whose, ranks, drafts)] if drafts else ())


def told(ready: Sequence[Ready], states: Sequence[SamplingState], decided: Sequence[Decided], logits: Tensor) -> Any:
    starts = [0]
    for r in ready:
        starts.append(starts[-1] + len(r.draft_ids) + 1)
    return explain([Asking(*each) for each in zip(ready, states, decided, starts, strict=False)], logits)


Ranked = tuple[int, float]
"""A token id and its log-prob, in nats."""


def best(log_probs: Tensor) -> list[Ranked]:
    """[V] float32 -> the best, the lowest first among equals."""
    order = sorted(range(len(log_probs)), key=lambda i: (-float(log_probs[i]), i))[:NUM_BEST]
    return [(i, float(log_probs[i])) for i in order if float(log_probs[i]) > -torch.inf]


def check_ranked(found: Sequence[pb.RankedToken], expected: Sequence[Ranked]) -> None:
    assert [token.id for token in found] == [i for i, _ in expected]
    assert [token.logprob for token in found] == pytest.approx([p for _, p in expected], abs=2e-5)


def ids_of(tokens: Sequence[pb.RankedToken]) -> list[int]:
    return [token.id for token in tokens]


def check(explanation: pb.Explanation, r: Ready, state: SamplingState, decided: Decided, raw: Tensor) -> None:
    """raw: the slot's own logits [K + 1, V]."""
    tree = r.tree or DraftTree(tuple(r.draft_ids), tuple(r.parents))
    path = list(range(decided.num_accepted)) if r.tree is None else list(decided.path)
    kind = pb.DRAFT_TOKEN_KIND_GUESS if state.params.determined else pb.DRAFT_TOKEN_KIND_DRAWN
    expected = list(zip(tree.ids, tree.parents, strict=True))
    assert [(token.id, token.parent) for token in explanation.draft] == expected
    assert [node for node, token in enumerate(explanation.draft) if token.accepted] == path
    assert {token.kind for token in explanation.draft} <= {kind}
    last = path[-1] if path else -1
    children, found = tree.children(last), explanation.rejection
    if not children or decided.next_id in [tree.ids[child] for child in children]:
        assert not explanation.HasField("rejection")
        return
    assert explanation.HasField("rejection") and (found.parent, found.token.id) == (last, decided.next_id)
    row = LogitRow(state, tree.prefix(last))
    processed = process_unchecked(raw[last + 1 : last + 2], [row])
    law = processed.log_softmax(1) if state.params.greedy else distributions(processed, [row])
    check_ranked(found.target, best(law[0]))
    assert found.target[0].id == decided.next_id or not state.params.greedy or state.params.lenience < 1.0
    if state.params.determined:
        assert not found.draft_law and ids_of(found.draft_guesses) == [tree.ids[child] for child in children][:NUM_BEST]
        return
    drew = (r.draft_laws or [])[last + 1] if r.tree is None else r.drawn[last][0].law
    check_ranked(found.draft_law, best(torch.from_numpy(drew.dense_scores().copy()).log_softmax(0)))
    assert not found.draft_guesses


@given(
    st.lists(st.tuples(st.integers(0, len(KINDS) - 1), st.integers(0, 5)), min_size=1, max_size=4),
    st.integers(0, 10_000),
)
@settings(max_examples=60)
def test_a_chain_is_told_of_by_the_laws_that_decided_it(slots: list[tuple[int, int]], seed: int) -> None:
    step = make_step([kind for kind, _ in slots], [count for _, count in slots], seed)
    ready, before = [delivered(r) for r in step.ready], step.logits.clone()
    decided = decide(ready, step.states, step.logits)
    found = told(ready, step.states, decided, step.logits)
    parts = step.logits.split([len(r.draft_ids) + 1 for r in ready])
    for each in zip(found, ready, step.states, decided, parts, strict=True):
        check(*each)
    assert torch.equal(step.logits, before) and decide(step.ready, step.states, step.logits) == decided
    on_device = decide_on_device(step.ready, step.states, step.logits)
    assert told(ready, step.states, on_device, step.logits) == found


@given(st.integers(0, len(TREE_KINDS) - 1), parents_of(), st.integers(0, 10_000))
@settings(max_examples=60)
def test_a_tree_is_told_of_by_the_laws_that_decided_it(kind: int, parents: list[int], seed: int) -> None:
    slot = make(kind, parents, seed)
    ready, before = delivered(slot.ready), slot.logits.clone()
    (decided,) = decide([ready], [slot.state], slot.logits)
    (found,) = told([ready], [slot.state], [decided], slot.logits)
    check(found, ready, slot.state, decided, slot.logits)
    assert torch.equal(slot.logits, before) and decide([slot.ready], [slot.state], slot.logits) == [decided]


def test_of_several_that_drew_there_the_first_with_a_choice_is_told_of() -> None:
    slot = make(4, [-1, -1], 1)
    r, flat = delivered(slot.ready), RowLaw(12, torch.zeros(12).numpy())
    first = r.drawn[-1][0]
    both = [Drawn(first.law, first.nodes[:1]), Drawn(flat, first.nodes[1:])]
    other = next(i for i in range(12) if i not in r.draft_ids)
    (found,) = told([dataclasses.replace(r, drawn={-1: both})], [slot.state], [Decided(0, other)], slot.logits)
    log_probs = torch.from_numpy(first.law.dense_scores().copy()).log_softmax(0)
    check_ranked(found.rejection.draft_law, best(log_probs))
    table = Drawn(one_hot(r.draft_ids[0], 12), first.nodes[:1])  # what a table says, which had no other
    drawn = {-1: [table, Drawn(first.law, first.nodes[1:])]}
    (found,) = told([dataclasses.replace(r, drawn=drawn)], [slot.state], [Decided(0, other)], slot.logits)
    check_ranked(found.rejection.draft_law, best(log_probs))


@pytest.mark.parametrize(
    ("drafter", "kind"),
    [(None, pb.DRAFT_TOKEN_KIND_FORCED), (Drafter.PREDICTION, pb.DRAFT_TOKEN_KIND_PREDICTED)],
)
def test_what_is_forced_and_what_is_predicted_are_guesses_by_name(drafter: Drafter | None, kind: Any) -> None:
    slot = make(4, [-1, 0], 1, chain=True)
    ready = dataclasses.replace(slot.ready, draft_laws=None, guessed=True, drafter=drafter)
    other = next(i for i in range(12) if i not in ready.draft_ids)
    (found,) = told([ready], [slot.state], [Decided(1, other)], slot.logits)
    assert {token.kind for token in found.draft} == {kind} and not found.HasField("draft_us")
    assert (found.rejection.parent, ids_of(found.rejection.draft_guesses)) == (0, ready.draft_ids[1:])
    assert not found.rejection.draft_law


def test_a_delivery_tells_once_what_it_took() -> None:
    """Of two deliveries a step verifies a part of each, and the next the rest of the second."""
    parked = Parked()

    def came(ids: list[int], known: int, us: int) -> None:
        kinds = [*[NodeKind.KNOWN] * known, *[NodeKind.GUESS] * (len(ids) - known)]
        parents, ranks = list(range(-1, len(ids) - 1)), [0] * len(ids)
        parked.insert(Nodes(1, 3, ids, parents, ranks, kinds, None, draft_us=us), [1, 2, 3], 1 << 20)

    came([4], 0, 100)
    came([4, 5, 6], 1, 40)
    chain = parked.chain(8)
    slot = make(0, [-1, 0, 1], 1, chain=True)

    def spent(*nodes: int) -> int | None:
        drafts: dict[int, Any] = {place: chain[node] for place, node in enumerate(nodes)}
        source = Source(Drafter.MODEL, dict.fromkeys(drafts, 0), drafts)
        ready = dataclasses.replace(slot.ready, drafter=Drafter.MODEL, sources=[source])
        (found,) = told([ready], [slot.state], [Decided(3, 0)], slot.logits)
        return found.draft_us if found.HasField("draft_us") else None

    assert (spent(0, 1), spent(2)) == (140, 0)
    came([4, 5, 6, 7], 3, 0)
    chain = parked.chain(8)
    assert spent(3) is None, "a draft that does not say is not known"
