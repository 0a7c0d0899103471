"""What is told of a decision: the laws that it was made by, on the host and on a device, and nothing of it changed."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.sampling.device_sampling import distributions
from outrider.engine.sampling.penalties import LogitRow, SamplingState, process_unchecked
from outrider.engine.sampling.token_distribution import TokenDistribution, one_hot
from outrider.engine.speculation.nodes import Delivery, NodeKind
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.v1 import common_pb2 as pb
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from target_service.drafting.proposal import Proposal
from target_service.leases.lease import SlotDrafter, SlotDraftWorker
from target_service.step.decide import decide
from target_service.step.decide_on_device import decide_on_device
from target_service.step.explaining import NUM_BEST, ExplainRequest, explain
from target_service.step.step_rows import Decided
from tests.proposals import PlainSlot, chain_proposal, tree_draws
from tests.unit.target_service.step.test_decide import KINDS, make_step
from tests.unit.target_service.step.test_decide_on_device import KINDS as TREE_KINDS
from tests.unit.target_service.step.test_decide_on_device import make, parents_of


def requested(proposal: Proposal, state: SamplingState, decided: Decided, start: int = 0) -> ExplainRequest:
    """What explains a proposal of one drafter, of which nothing was left out."""
    slot_drafter = SlotDrafter(Drafter.NGRAM, SlotAcceptance(RankAcceptance()))
    made = dataclasses.replace(proposal, slot_drafters={slot_drafter: dict(enumerate(proposal.tree.ranks))})
    return ExplainRequest(made, state, decided, start)


def explained(
    proposals: Sequence[Proposal], states: Sequence[SamplingState], decided: Sequence[Any], logits: Tensor
) -> list[pb.Explanation]:
    start = 0
    requests = list[ExplainRequest]()
    for index, each in enumerate(zip(proposals, states, decided, strict=True)):
        slot: Any = each[0].slot
        slot.key = (1, index)
        requests.append(requested(*each, start))
        start += len(each[0].tree) + 1
    return list(explain(requests, logits).values())


def best(log_probs: Tensor) -> list[tuple[int, float]]:
    """[V] float32 -> the best, the lowest first among equals."""
    order = sorted(range(len(log_probs)), key=lambda i: (-float(log_probs[i]), i))[:NUM_BEST]
    return [(i, float(log_probs[i])) for i in order if float(log_probs[i]) > -torch.inf]


def check_ranked(found: Sequence[pb.RankedToken], expected: Sequence[tuple[int, float]]) -> None:
    assert [each.id for each in found] == [i for i, _ in expected]
    assert [each.logprob for each in found] == pytest.approx([p for _, p in expected], abs=2e-5)


def check(explanation: pb.Explanation, r: Proposal, state: SamplingState, decided: Any, raw: Tensor) -> None:
    """raw: the slot's own logits [K + 1, V]."""
    tree, path, drafts = r.tree, decided.path, explanation.draft
    assert [(each.id, each.parent) for each in drafts] == list(zip(tree.ids, tree.parents, strict=True))
    assert [node for node, each in enumerate(drafts) if each.is_accepted] == list(path)
    drawn = {draw.node for draw in r.draws if not draw.is_one_token}
    kinds = [
        pb.DRAFT_TOKEN_KIND_SAMPLED if node in drawn else pb.DRAFT_TOKEN_KIND_DETERMINISTIC for node in range(len(tree))
    ]
    assert [each.kind for each in drafts] == kinds
    children, found = tree.children(decided.last), explanation.rejection
    if not children or decided.next_id in [tree.ids[child] for child in children]:
        assert not explanation.HasField("rejection")
        return
    assert (found.parent, found.token.id) == (decided.last, decided.next_id)
    row = LogitRow(state, tree.prefix(decided.last))
    processed = process_unchecked(raw[decided.last + 1 : decided.last + 2], [row])
    law = processed.log_softmax(1) if state.params.greedy else distributions(processed, [row])
    check_ranked(found.target, best(law[0]))
    assert found.target[0].id == decided.next_id or not state.params.greedy or state.params.lenience < 1.0
    if children[0] not in drawn:
        assert not found.draft_distribution
        assert [each.id for each in found.deterministic_tokens] == [tree.ids[child] for child in children][:NUM_BEST]
        return
    drew = next(draw.distribution for draw in r.draws if tree.parents[draw.node] == decided.last)
    assert drew is not None
    check_ranked(found.draft_distribution, best(torch.from_numpy(drew.dense_scores().copy()).log_softmax(0)))
    assert not found.deterministic_tokens


@given(
    st.lists(st.tuples(st.integers(0, len(KINDS) - 1), st.integers(0, 5)), min_size=1, max_size=4),
    st.integers(0, 10_000),
)
@settings(max_examples=60)
def test_a_chain_is_explained_by_the_distributions_that_decided_it(slots: list[tuple[int, int]], seed: int) -> None:
    step = make_step([kind for kind, _ in slots], [count for _, count in slots], seed)
    before = step.logits.clone()
    decided = decide(step.ready, step.states, step.logits)
    found = explained(step.ready, step.states, decided, step.logits)
    parts = step.logits.split([len(r.tree) + 1 for r in step.ready])
    for each in zip(found, step.ready, step.states, decided, parts, strict=True):
        check(*each)
    assert torch.equal(step.logits, before) and decide(step.ready, step.states, step.logits) == decided
    on_device = decide_on_device(step.ready, step.states, step.logits)
    assert explained(step.ready, step.states, on_device, step.logits) == found


@given(st.integers(0, len(TREE_KINDS) - 1), parents_of(), st.integers(0, 10_000))
@settings(max_examples=60)
def test_a_tree_is_explained_by_the_distributions_that_decided_it(kind: int, parents: list[int], seed: int) -> None:
    slot = make(kind, parents, seed)
    before = slot.logits.clone()
    (decided,) = decide([slot.ready], [slot.state], slot.logits)
    (found,) = explained([slot.ready], [slot.state], [decided], slot.logits)
    check(found, slot.ready, slot.state, decided, slot.logits)
    assert torch.equal(slot.logits, before) and decide([slot.ready], [slot.state], slot.logits) == [decided]


def test_of_several_drafters_that_drew_there_the_first_with_a_choice_is_explained() -> None:
    slot = make(4, [-1, -1], 1)
    r, flat = slot.ready, TokenDistribution(12, torch.zeros(12).numpy())
    law = r.draws[0].distribution
    assert law is not None
    other = next(i for i in range(12) if i not in r.tree.ids)
    log_probs = torch.from_numpy(law.dense_scores().copy()).log_softmax(0)
    table = one_hot(r.tree.ids[0], 12)  # what a table says, which had no other
    for drawn in ([(law, [0]), (flat, [1])], [(table, [0]), (law, [1])]):
        proposal = dataclasses.replace(r, draws=tree_draws({-1: drawn}))
        (found,) = explained([proposal], [slot.state], [Decided((), other)], slot.logits)
        check_ranked(found.rejection.draft_distribution, best(log_probs))


@pytest.mark.parametrize(
    ("drafter", "kind"), [(None, pb.DRAFT_TOKEN_KIND_FORCED), (Drafter.PREDICTION, pb.DRAFT_TOKEN_KIND_PREDICTED)]
)
def test_forced_and_predicted_tokens_are_deterministic_by_name(
    drafter: Drafter | None, kind: pb.DraftTokenKind
) -> None:
    slot = make(4, [-1, 0], 1, chain=True)
    slot_drafter = SlotDrafter(drafter, SlotAcceptance(RankAcceptance()))
    ready = dataclasses.replace(slot.ready, draws=(), slot_drafters={slot_drafter: {0: 0, 1: 0}})
    other = next(i for i in range(12) if i not in ready.tree.ids)
    (found,) = explain([ExplainRequest(ready, slot.state, Decided((0,), other), 0)], slot.logits).values()
    assert {each.kind for each in found.draft} == {kind} and not found.HasField("draft_us")
    assert not found.rejection.draft_distribution and found.rejection.parent == 0
    assert [each.id for each in found.rejection.deterministic_tokens] == ready.tree.ids[1:]


def test_a_delivery_reports_its_cost_once() -> None:
    """Of two deliveries a step verifies a part of each, and the next the rest of the second."""
    slot_drafter = SlotDraftWorker(Drafter.MODEL, SlotAcceptance(RankAcceptance()), 1, is_active=True)

    def came(ids: list[int], known: int, us: int) -> None:
        kinds = [*[NodeKind.REFERENCE] * known, *[NodeKind.DETERMINISTIC] * (len(ids) - known)]
        parents, ranks = list(range(-1, len(ids) - 1)), [0] * len(ids)
        slot_drafter.buffer.insert(Delivery(1, 3, ids, parents, ranks, kinds, None, draft_us=us), [1, 2, 3], 1 << 20)

    came([4], 0, 100)
    came([4, 5, 6], 1, 40)
    slot: Any = PlainSlot(SamplingParams(temperature=0.0), [1, 2, 3], (1, 0))
    state = SamplingState(slot.params, slot.committed, ())

    def spent(num: int) -> int | None:
        made = dataclasses.replace(
            chain_proposal(slot, [4, 5, 6, 7][:num]), slot_drafters={slot_drafter: dict.fromkeys(range(num), 0)}
        )
        request = ExplainRequest(made, state, Decided(tuple(range(num)), 0), 0)
        (found,) = explain([request], torch.zeros(num + 1, 12)).values()
        return found.draft_us if found.HasField("draft_us") else None

    assert (spent(2), spent(3)) == (140, 0)
    assert spent(3) == 0, "it was told before"
