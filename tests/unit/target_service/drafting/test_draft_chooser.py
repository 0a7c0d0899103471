"""Which drafter a step takes its draft tokens of, and for which it waits."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.candidates import join
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.transport.codec import DenseDistributions
from target_service.drafting.budget import VerifyChoice
from target_service.drafting.draft_chooser import DraftChooser
from target_service.drafting.slot_candidates import Candidates
from target_service.leases.lease import Lease, SlotDraftWorker
from target_service.step.verdicts import drafter_of, learn
from tests.enumeration import Prefix
from tests.unit.target_service.drafting.unions import (
    COUPLED,
    GREEDY,
    METRICS,
    PROMPT,
    UNION,
    VOCAB,
    WithRows,
    add,
    deliver,
    guesses,
    made,
    park,
    proposal_of,
)

DRAWN = SamplingParams(temperature=1.0)
EVEN = TokenDistribution(VOCAB, np.zeros(VOCAB, dtype=np.float32))


def shown(tree: DraftTree) -> set[Prefix]:
    return {tree.prefix(node) for node in range(len(tree))}


def tree_of(found: Candidates) -> DraftTree:
    return join(list(found.trees.values()), found.budget_items).tree


def probs_of(found: Candidates) -> list[float]:
    return [offer.prob for offer in found.budget_items]


def pending(drafting: DraftChooser, lease: Lease) -> list[tuple[SlotDraftWorker, float]]:
    return [(draft, prob) for _, draft, prob in drafting.pending(drafting.candidates(lease))]


class TestGuesses:
    @pytest.mark.parametrize("params", [GREEDY, COUPLED])
    def test_both_are_in_one_tree_and_a_token_of_both_is_one_node(self, params: SamplingParams) -> None:
        drafting, lease = made(params, guesses(1, 2, 5))
        deliver(lease, [[1, 3, 4], [6]])
        found = drafting.candidates(lease)
        assert shown(tree_of(found)) == {(1,), (1, 3), (1, 3, 4), (6,), (1, 2), (1, 2, 5)}
        assert probs_of(found) == sorted(probs_of(found), reverse=True)
        proposal = proposal_of(drafting, found, len(found.budget_items))
        assert drafter_of(proposal) is UNION and not proposal.draws
        delivered, own = ({proposal.tree.prefix(node) for node in ranks} for ranks in proposal.slot_drafters.values())
        assert (delivered, own) == ({(1,), (1, 3), (1, 3, 4), (6,)}, {(1,), (1, 2), (1, 2, 5)})
        firsts = [proposal.drafter_of_node(node) for node in range(len(proposal.tree))]
        assert firsts.count(lease.first) == 4, "what both say is the first one's"

    def test_trees_of_two_drafts_are_one(self) -> None:
        drafting, lease = made(GREEDY, [], (0.6, 0.4, 0.5))
        deliver(lease, [[1, 3], [6]])
        deliver(lease, [[1, 4], [5]], draft=1)
        found = drafting.candidates(lease)
        proposal = proposal_of(drafting, found, len(found.budget_items))
        assert drafter_of(proposal) is Drafter.MODEL_AND_MODEL
        assert shown(proposal.tree) == {(1,), (1, 3), (6,), (1, 4), (5,)}
        assert list(proposal.slot_drafters) == list(lease.drafts)

    def test_a_named_number_is_each_drafters(self) -> None:
        drafting, lease = made(GREEDY, guesses(1, 2, 5, 6), num_draft_tokens=2)
        deliver(lease, [[3, 4, 5]])
        assert shown(tree_of(drafting.candidates(lease))) == {(3,), (3, 4), (1,), (1, 2)}

    def test_a_named_tree_has_the_chain_beside_it(self) -> None:
        drafting, lease = made(GREEDY, guesses(1, 2, 5, 6), tree=TreeShape((2, 1)))
        deliver(lease, [[3, 4, 5], [0, 4], [6, 4]])
        assert shown(tree_of(drafting.candidates(lease))) == {(3,), (3, 4), (0,), (0, 4), (1,), (1, 2)}

    def test_a_draft_that_is_late_is_absent_and_waited_for_as_long_as_it_would_be_alone(self) -> None:
        drafting, lease = made(GREEDY, guesses(1, 2), num_draft_tokens=2)
        assert pending(drafting, lease) == [(lease.first, 1.0)]
        proposal = proposal_of(drafting, drafting.candidates(lease), 2)
        assert (proposal.tree.ids, drafter_of(proposal)) == ([1, 2], Drafter.NGRAM)
        deliver(lease, [[3, 4]])
        assert pending(drafting, lease) == []
        drafting, lease = made(GREEDY, [])
        deliver(lease, [[3, 4]])
        assert drafter_of(proposal_of(drafting, drafting.candidates(lease), 2)) is Drafter.MODEL

    def test_under_auto_a_late_draft_is_worth_what_the_other_leaves_it(self) -> None:
        drafting, lease = made(GREEDY, guesses(1, 2), (0.6, 0.75))
        assert pending(drafting, lease) == [(lease.first, pytest.approx(0.6 * 0.25))]
        drafting, lease = made(GREEDY, [], (0.6, 0.75))
        assert pending(drafting, lease) == [(lease.first, 0.6)]
        drafting, lease = made(GREEDY, [], (0.6, 0.5, 0.75))
        deliver(lease, [[3]], draft=1)
        first, second = pending(drafting, lease)
        assert first == (lease.first, pytest.approx(0.6 * 0.5)) and second == (lease.drafts[1], pytest.approx(0.5**2))

    def test_what_comes_late_is_never_verified_for_another_state(self) -> None:
        drafting, lease = made(GREEDY, guesses(1, 2))
        deliver(lease, [[3, 4, 5], [6, 4]])
        proposal = proposal_of(drafting, drafting.candidates(lease), 6)
        lease.slot.committed += [3, 0]
        learn(lease, proposal, [proposal.tree.ids.index(3)], 2, [], METRICS)
        deliver(lease, [[3, 4, 5], [3, 0, 5]])
        assert shown(tree_of(drafting.candidates(lease))) == {(5,), (1,), (1, 2)}

    def test_with_lenience_the_chain_that_promises_more_goes_alone(self) -> None:
        """Lenience is of chains alone."""
        for own, ids in (([1, 2, 5], [1, 2, 5]), ([1], [3, 4])):
            drafting, lease = made(SamplingParams(lenience=0.5), guesses(*own), (0.5, 0.5))
            deliver(lease, [[3, 4]])
            found = drafting.candidates(lease)
            assert len(found.trees) == 1
            assert tree_of(found).ids == ids

    @pytest.mark.parametrize("fixed", ["auto", 2])
    def test_with_lenience_nobody_waits_for_a_second_draft_that_is_here(self, fixed: Any) -> None:
        drafting, lease = made(SamplingParams(lenience=0.5), [], (0.6, 0.5, 0.5), num_draft_tokens=fixed)
        lease.slot.max_len = len(PROMPT) + 3
        deliver(lease, [[3, 4]])
        deliver(lease, [[5, 6]], draft=1)
        assert tree_of(drafting.candidates(lease)).ids == [3, 4]
        assert pending(drafting, lease) == []


class TestChoice:
    """Of a slot's own drafter and a draft worker that are not merged."""

    @pytest.mark.parametrize(("own", "delivered"), [(0.6, 0.5), (0.5, 0.6)])
    def test_nothing_that_was_sampled_decides_who_drafts(self, own: float, delivered: float) -> None:
        """Neither the tokens, nor how long a chain is that might have been longer, nor the numbers that accept."""
        better = Drafter.NGRAM if own > delivered else Drafter.MODEL
        chains = [(0,), (1,), (0, 1), (2, 2, 2)]
        for own_ids, ids, seed in itertools.product(chains, chains, range(3)):
            tokens = [(each, EVEN) for each in own_ids]
            drafting, lease = made(replace(DRAWN, seed=seed), tokens, (delivered, own), Drafter.NGRAM)
            park(lease.first, [(each, EVEN) for each in ids])
            (slot_drafter,) = drafting.candidates(lease).trees
            assert slot_drafter.drafter is better

    def test_where_a_number_is_named_the_first_that_has_something_drafts(self) -> None:
        """So that what is learnt from other requests changes no text that a seed gives."""
        drafting, lease = made(DRAWN, [(0, EVEN)], (0.9, 0.1), Drafter.NGRAM, num_draft_tokens=3)
        park(lease.first, [(1, EVEN), (2, EVEN)])
        (slot_drafter,) = drafting.candidates(lease).trees
        assert slot_drafter.drafter is Drafter.NGRAM and pending(drafting, lease) == []

    def test_a_step_may_wait_for_a_draft_whose_tokens_promise_more_than_the_targets_own(self) -> None:
        drafting, lease = made(DRAWN, [(0, EVEN)], (0.8, 0.1), Drafter.NGRAM)
        ((draft, prob),) = pending(drafting, lease)
        assert draft is lease.first and prob == pytest.approx(0.8 * 0.9)

    @pytest.mark.parametrize(("delivered", "ids"), [([3, 4, 5], [3, 4, 5]), ([3], [1, 2])])
    def test_delivered_draft_tokens_are_counted_by_their_number(self, delivered: list[int], ids: list[int]) -> None:
        drafting, lease = made(GREEDY, guesses(1, 2), (0.7, 0.5), Drafter.NGRAM)
        deliver(lease, [delivered])
        found = drafting.candidates(lease)
        assert proposal_of(drafting, found, len(found.budget_items)).tree.ids == ids

    def test_own_draft_tokens_are_made_once_their_number_is_known(self) -> None:
        drafting, lease = made(DRAWN, [(0, EVEN), (1, EVEN), (2, EVEN)], (0.5, 0.6), Drafter.NGRAM)
        drafting.own.candidates = mock = Mock(side_effect=drafting.own.candidates)  # type: ignore[method-assign]
        found = drafting.candidates(lease)
        assert len(found.budget_items) == 9 and not mock.called, "0.6 to the tenth is below 0.01"
        assert not proposal_of(drafting, found, 0).tree.ids and not mock.called
        assert proposal_of(drafting, found, 2).tree.ids == [0, 1] and mock.call_args.args[-1] == 2

    def test_who_has_nothing_promises_nothing(self) -> None:
        drafting, lease = made(DRAWN, [], (0.001, 0.9), Drafter.NGRAM)
        assert not drafting.candidates(lease).budget_items
        park(lease.first, [(1, EVEN)])
        assert tree_of(drafting.candidates(lease)).ids == [1]


class TestRowsBeside:
    def test_they_hang_under_the_draft_tokens_that_the_step_verifies(self) -> None:
        drafting, lease = made(GREEDY, [], name=Drafter.NGRAM)
        drafting = replace(drafting, own=WithRows(guesses(0, 1), Drafter.NGRAM))
        found = drafting.add_extra_rows(drafting.candidates(lease))
        parents = [drafting.proposal(found, VerifyChoice(num, True)).extra_rows for num in (2, 1, 0)]
        assert [rows and rows.parents for rows in parents] == [[1], [0], [-1]]


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("fixed", [0, 2])
def test_how_many_draws_are_verified_does_not_go_by_how_many_there_are(fixed: int, is_own: bool) -> None:
    """A table's chain ends where nothing follows what it drew; a draft's that is drafted for comes sooner by what it
    drew.
    """
    found = list[list[float]]()
    for num in (1, 2):
        chain = [(1, EVEN)] * num
        drafting, lease = made(DRAWN, chain if is_own else [], num_draft_tokens=fixed or "auto")
        park(lease.first, [] if is_own else chain)
        candidates = drafting.candidates(lease)
        found.append(probs_of(candidates))
        assert len(proposal_of(drafting, candidates, 9).tree) == num
    assert found[0] == found[1]


def test_what_the_second_drew_takes_nothing_of_the_tree_that_the_first_was_to_have() -> None:
    for num in (1, 2):
        drafting, lease = made(DRAWN, [], (0.3, 0.9, 0.5), tree=TreeShape((2, 1)), max_draft_tokens=5)
        for draft, num_first in zip(lease.drafts, (2, num), strict=True):
            for token_id in range(num_first):
                add(draft, add(draft, ROOT, token_id, EVEN), 0, EVEN)
        found = drafting.candidates(lease)
        assert len(found.budget_items) == 5 or num == 1
        assert len(proposal_of(drafting, found, 5).slot_drafters[lease.first]) == 4


def test_what_one_draft_delivers_wrong_is_dropped_and_refused_alone() -> None:
    drafting, lease = made(DRAWN, [], (0.6, 0.5, 0.5))
    refused = list[int]()
    leases: Any = SimpleNamespace(refuse=lambda ticket, why: refused.append(ticket))
    drafting = replace(drafting, leases=leases)
    park(lease.drafts[0], [(1, EVEN)])
    park(lease.drafts[1], [(2, (DenseDistributions(1, b"\0" * 4 * VOCAB), 0))])
    found = drafting.candidates(lease)
    assert not proposal_of(drafting, found, len(found.budget_items)).tree.ids
    assert refused == [1] and [len(draft.buffer.tree) for draft in lease.drafts] == [1, 0]


def test_where_draws_are_here_what_a_grammar_forces_counts_as_it_would_bring() -> None:
    drafting, lease = made(DRAWN, [], (0.6, 0.5))
    park(lease.first, [(1, EVEN)])
    lease.slot.params = SamplingParams(temperature=1.0, grammar="{}")
    for forced, drafter in (([5], Drafter.MODEL), ([5, 6, 7], None)):
        state: Any = SimpleNamespace(forced=lambda forced=forced: forced)
        drafting.keeper.sampling_state = lambda slot, state=state: state  # type: ignore[misc]
        assert [slot_drafter.drafter for slot_drafter in drafting.candidates(lease).trees] == [drafter]
