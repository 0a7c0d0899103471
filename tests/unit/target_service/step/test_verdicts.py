"""What a verdict measures: the times of a step, who drafted, and what is learnt of each drafter."""

from collections.abc import Sequence
from typing import Any

import pytest

from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.drafting.proposal import Proposal
from target_service.leases.lease import SlotDrafter
from target_service.leases.lease_jobs import Timings
from target_service.step.verdicts import StepClock, drafter_of, learn
from tests.unit.target_service.drafting.unions import COUPLED, GREEDY, METRICS, deliver, guesses, made, proposal_of
from tests.unit.target_service.leases.course import Course


class TestLearning:
    def noted(self, params: SamplingParams, ids: list[int], own: Sequence[int], delivered: Sequence[int]) -> list[Any]:
        """What is noted of the chain when these ids are committed."""
        drafting, lease = made(params, guesses(*own))
        deliver(lease, [delivered])
        seen = list[Any]()
        lease.own_drafters[Drafter.NGRAM].acceptance.note = seen.append  # type: ignore[method-assign]
        found = drafting.candidates(lease)
        proposal = proposal_of(drafting, found, len(found.budget_items))
        tree, path, at = proposal.tree, list[int](), ROOT
        while (node := tree.child(at, ids[len(path)])) is not None:
            path.append(node)
            at = node
        lease.slot.committed += ids[: len(path) + 1]
        learn(lease, proposal, path, len(path) + 1, [], METRICS)
        return seen

    @pytest.mark.parametrize("params", [GREEDY, COUPLED])
    def test_the_chain_is_judged_where_the_draft_was_wrong(self, params: SamplingParams) -> None:
        assert self.noted(params, [1, 2, 0], own=[1, 2], delivered=[3, 4]) == [0, 0]
        assert self.noted(params, [1, 0], own=[1, 2], delivered=[3, 4]) == [0, None]
        assert self.noted(params, [0], own=[1, 2], delivered=[3, 4]) == [None]
        assert self.noted(params, [3, 4, 0], own=[1, 2], delivered=[3, 4]) == []
        assert self.noted(params, [1, 4, 0], own=[1, 2], delivered=[1, 4]) == []
        assert self.noted(params, [0], own=[1, 2], delivered=[1, 4]) == []


def test_a_prediction_is_learnt_from_whether_it_was_verified_or_not() -> None:
    """Else texts of no use would have the next one never tried."""
    course, shares, metrics = Course(), RankAcceptance(), WorkerMetrics("target")
    for _ in range(500):
        shares.note(None)
    lease = course.lease
    prediction = lease.own_drafters[Drafter.PREDICTION] = SlotDrafter(Drafter.PREDICTION, SlotAcceptance(shares))
    assert prediction.acceptance.prob(0) < 0.02
    for _ in range(32):
        lease.slot.committed.append(1)
        learn(lease, Proposal(lease.slot, DraftTree()), [], 1, [True], metrics)
    assert prediction.acceptance.prob(0) > 0.7


def test_rows_beside_of_which_a_step_has_no_drafts_are_worth_less() -> None:
    """Else ones that never bring anything would be paid for in every step."""
    course, metrics = Course(), WorkerMetrics("target")
    lease, slot = course.lease, course.lease.slot
    own = lease.own_drafters[Drafter.LOOKAHEAD] = SlotDrafter(Drafter.LOOKAHEAD, SlotAcceptance(RankAcceptance()))
    rows = ExtraRows(Drafter.LOOKAHEAD, [5], [-1], width=2, depth=3)
    before = rows.gain(own.acceptance)
    slot.committed += [1, 2]
    learn(lease, Proposal(slot, DraftTree.of([1], [-1]), (), {own: {0: 0}}, rows), [0], 2, [], metrics)
    assert rows.gain(own.acceptance) > before
    for _ in range(32):
        slot.committed.append(1)
        learn(lease, Proposal(slot, DraftTree(), extra_rows=rows), [], 1, [], metrics)
    assert rows.gain(own.acceptance) < 0.3


@pytest.mark.parametrize(
    ("held_from_s", "wait_us", "queue_us"), [(None, 0, 4_000_000), (8.5, 1_500_000, 2_500_000), (11.0, 0, 4_000_000)]
)
def test_the_time_that_a_slot_was_held_is_no_time_in_the_queue(
    held_from_s: float | None, wait_us: int, queue_us: int
) -> None:
    """Ready at 6, the forward from 10 to 10.25, decided at 10.375."""
    lease = Course().lease
    lease.ready_s, lease.held_from_s = 6.0, held_from_s
    clock = StepClock(10.0, num_slots=3, num_tokens=40, forwarded_s=10.25, decided_s=10.375)
    assert clock.timings(lease) == Timings(wait_us, queue_us, 250_000, 125_000, 3, 40)


def test_a_node_that_two_proposed_counts_for_the_first_alone() -> None:
    """The draft delivers 1 and 3 after it, the target's own chain is 1 and 2; 1 and 2 are accepted."""
    drafting, lease = made(GREEDY, guesses(1, 2))
    deliver(lease, [[1, 3]])
    found = drafting.candidates(lease)
    proposal = proposal_of(drafting, found, len(found.budget_items))
    tree = proposal.tree
    path = [node for node in range(len(tree)) if tree.prefix(node) in ((1,), (1, 2))]
    lease.slot.committed += [1, 2, 0]
    delivered, own = learn(lease, proposal, path, 3, [], METRICS)
    assert (delivered.num_drafted, delivered.num_accepted, delivered.is_verified) == (2, 1, True)
    assert (own.num_drafted, own.num_accepted, own.is_verified) == (1, 1, True)


def test_who_drafted_is_all_that_did_and_nobody_where_the_grammar_forced() -> None:
    shares = SlotAcceptance(RankAcceptance())
    grammar, ngram, model = (SlotDrafter(drafter, shares) for drafter in (None, Drafter.NGRAM, Drafter.MODEL))
    for slot_drafters, drafter in (
        ({}, None),
        ({grammar: {0: 0}}, None),
        ({model: {}, ngram: {0: 0}}, Drafter.NGRAM),
        ({model: {0: 0}, ngram: {0: 0}}, Drafter.NGRAM_AND_MODEL),
    ):
        assert (
            drafter_of(Proposal(Course().lease.slot, DraftTree.of([1], [ROOT]), slot_drafters=slot_drafters)) is drafter
        )
