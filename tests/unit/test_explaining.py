"""What is told of a decision: the laws that it was made by, on the host and on a device, and nothing of it changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from target_service.parked import Parked
from torch import Tensor

from outrider.engine.sampling.penalties import LogitRow, SamplingState, process_unchecked
from outrider.engine.sampling.row_law import RowLaw, one_hot
from outrider.engine.sampling.sampling import distributions
from outrider.engine.speculation.nodes import NodeKind, Nodes
from outrider.wire.drafters import Drafter
from outrider.wire.kinds import DraftTokenKind
from target_service.decide import decide
from target_service.decide_on_device import decide_on_device
from target_service.explaining import NUM_BEST, ExplainRequest, explain, explain_request
from target_service.jobs import Explanation, Ranked, Rejection
from target_service.lease import Ready, Source
from target_service.proposal import Proposal
from target_service.servicer import _explanation
from target_service.step_rows import Decided
from tests.proposals import tree_draws
from tests.unit.test_decide import KINDS, make_step
from tests.unit.test_tree_decision import KINDS as TREE_KINDS
from tests.unit.test_tree_decision import make, parents_of


def requested(proposal: Proposal, state: SamplingState, decided: Decided, start: int = 0) -> ExplainRequest:
    """What explains a proposal that a draft delivered, of which nothing was left out."""
    kind = DraftTokenKind.GUESS if proposal.slot.params.determined else DraftTokenKind.DRAWN
    tree = proposal.tree

    def proposed_after(node: int) -> list[int]:
        return [tree.ids[child] for child in tree.children(node)]

    return ExplainRequest(proposal, state, decided, start, [kind] * len(tree), proposed_after)


def told(
    proposals: Sequence[Proposal], states: Sequence[SamplingState], decided: Sequence[Decided], logits: Tensor
) -> Any:
    start = 0
    requests = list[ExplainRequest]()
    for each in zip(proposals, states, decided, strict=True):
        requests.append(requested(*each, start))
        start += len(each[0].tree) + 1
    return explain(requests, logits)


def best(log_probs: Tensor) -> list[Ranked]:
    """[V] float32 -> the best, the lowest first among equals."""
    order = sorted(range(len(log_probs)), key=lambda i: (-float(log_probs[i]), i))[:NUM_BEST]
    return [(i, float(log_probs[i])) for i in order if float(log_probs[i]) > -torch.inf]


def check_ranked(found: Sequence[Ranked], expected: Sequence[Ranked]) -> None:
    assert [i for i, _ in found] == [i for i, _ in expected]
    assert [p for _, p in found] == pytest.approx([p for _, p in expected], abs=2e-5)


def check(explanation: Explanation, r: Proposal, state: SamplingState, decided: Decided, raw: Tensor) -> None:
    """raw: the slot's own logits [K + 1, V]."""
    tree, path = r.tree, list(decided.path)
    assert (explanation.ids, explanation.parents) == (tree.ids, tree.parents)
    assert list(explanation.accepted) == path
    kind = DraftTokenKind.GUESS if state.params.determined else DraftTokenKind.DRAWN
    assert set(explanation.kinds) <= {kind} and len(explanation.kinds) == len(tree.ids)
    last = path[-1] if path else -1
    children, found = tree.children(last), explanation.rejection
    if not children or decided.next_id in [tree.ids[child] for child in children]:
        assert found is None
        return
    assert found is not None and (found.parent, found.token_id) == (last, decided.next_id)
    row = LogitRow(state, tree.prefix(last))
    processed = process_unchecked(raw[last + 1 : last + 2], [row])
    law = processed.log_softmax(1) if state.params.greedy else distributions(processed, [row])
    check_ranked(found.target, best(law[0]))
    assert found.target[0][0] == decided.next_id or not state.params.greedy or state.params.lenience < 1.0
    if state.params.determined:
        assert not found.draft_law and list(found.draft_guesses) == [tree.ids[child] for child in children][:NUM_BEST]
        return
    if r.is_matched:
        assert not found.draft_law
        return
    drew = next(draw.distribution for draw in r.draws if draw.parent == last)
    assert drew is not None
    check_ranked(found.draft_law, best(torch.from_numpy(drew.dense_scores().copy()).log_softmax(0)))
    assert not found.draft_guesses


@given(
    st.lists(st.tuples(st.integers(0, len(KINDS) - 1), st.integers(0, 5)), min_size=1, max_size=4),
    st.integers(0, 10_000),
)
@settings(max_examples=60)
def test_a_chain_is_told_of_by_the_laws_that_decided_it(slots: list[tuple[int, int]], seed: int) -> None:
    step = make_step([kind for kind, _ in slots], [count for _, count in slots], seed)
    before = step.logits.clone()
    decided = decide(step.ready, step.states, step.logits)
    found = told(step.ready, step.states, decided, step.logits)
    parts = step.logits.split([len(r.tree) + 1 for r in step.ready])
    for each in zip(found, step.ready, step.states, decided, parts, strict=True):
        check(*each)
    assert torch.equal(step.logits, before) and decide(step.ready, step.states, step.logits) == decided
    on_device = decide_on_device(step.ready, step.states, step.logits)
    assert told(step.ready, step.states, on_device, step.logits) == found


@given(st.integers(0, len(TREE_KINDS) - 1), parents_of(), st.integers(0, 10_000))
@settings(max_examples=60)
def test_a_tree_is_told_of_by_the_laws_that_decided_it(kind: int, parents: list[int], seed: int) -> None:
    slot = make(kind, parents, seed)
    before = slot.logits.clone()
    (decided,) = decide([slot.ready], [slot.state], slot.logits)
    (found,) = told([slot.ready], [slot.state], [decided], slot.logits)
    check(found, slot.ready, slot.state, decided, slot.logits)
    assert torch.equal(slot.logits, before) and decide([slot.ready], [slot.state], slot.logits) == [decided]


def test_of_several_that_drew_there_the_first_with_a_choice_is_told_of() -> None:
    slot = make(4, [-1, -1], 1)
    r, flat = slot.ready, RowLaw(12, torch.zeros(12).numpy())
    law = r.draws[0].distribution
    assert law is not None
    other = next(i for i in range(12) if i not in r.tree.ids)
    log_probs = torch.from_numpy(law.dense_scores().copy()).log_softmax(0)
    table = one_hot(r.tree.ids[0], 12)  # what a table says, which had no other
    for drawn in ([(law, [0]), (flat, [1])], [(table, [0]), (law, [1])]):
        proposal = dataclasses.replace(r, draws=tree_draws({-1: drawn}))
        (found,) = told([proposal], [slot.state], [Decided((), other)], slot.logits)
        check_ranked(found.rejection.draft_law, best(log_probs))


@pytest.mark.parametrize(
    ("drafter", "kind"), [(None, DraftTokenKind.FORCED), (Drafter.PREDICTION, DraftTokenKind.PREDICTED)]
)
def test_what_is_forced_and_what_is_predicted_are_guesses_by_name(
    drafter: Drafter | None, kind: DraftTokenKind
) -> None:
    slot = make(4, [-1, 0], 1, chain=True)
    ids = list(slot.ready.tree.ids)
    ready = Ready(slot.ready.slot, ids, None, guessed=True, drafter=drafter)
    other = next(i for i in range(12) if i not in ids)
    (found,) = explain([explain_request(ready, slot.state, Decided((0,), other), 0)], slot.logits)
    assert set(found.kinds) == {kind} and found.draft_us is None
    assert found.rejection is not None and not found.rejection.draft_law
    assert (found.rejection.parent, found.rejection.draft_guesses) == (0, ids[1:])


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
        ready = Ready(slot.ready.slot, list(slot.ready.tree.ids), None, drafter=Drafter.MODEL, sources=[source])
        return explain_request(ready, slot.state, Decided((0, 1, 2), 0), 0).draft_us

    assert (spent(0, 1), spent(2)) == (140, 0)
    came([4, 5, 6, 7], 3, 0)
    chain = parked.chain(8)
    assert spent(3) is None, "a draft that does not say is not known"


def test_what_lies_behind_an_end_was_never_said() -> None:
    rejection = Rejection(1, 9, [(9, -0.1)], [], [5])
    explanation = Explanation((4, 5, 6), (-1, 0, 1), [DraftTokenKind.GUESS] * 3, (0, 1), rejection, None)
    assert explanation.cut(3) == explanation
    assert explanation.cut(2) == dataclasses.replace(explanation, rejection=None)


def test_whatever_drafts_say_that_they_took_can_be_told() -> None:
    most = 64 * (2**32 - 1)
    assert _explanation(Explanation((4,), (-1,), [DraftTokenKind.GUESS], (), None, most)).draft_us == most
