"""Several drafters in one tree: what the budget is offered of each, and that what is accepted of all has the target's
law.

The law by enumeration of every draw that the real functions make, as in `test_tree_law.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from outrider.engine.drafters import merge
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.candidates import CandidateTree, join
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.engine.speculation.nodes import Delivery, NodeKind
from outrider.engine.speculation.ranks import RankShares, SlotShares
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.transport.codec import DenseRows
from target_service.drafting.budget import VerifyBudget, VerifyChoice
from target_service.drafting.choice import Drafting
from target_service.drafting.own_drafts import OwnDrafts
from target_service.drafting.proposal import Proposal
from target_service.drafting.slot_candidates import Candidates
from target_service.leases.draft_buffer import BufferedToken
from target_service.leases.lease import DeliveredDrafts, DraftSource, Lease
from target_service.servicer import verify_job
from target_service.step.verdicts import drafter_of, learn
from tests.enumeration import Chooser, Law, Numbers, Prefix, every_draw, every_run, random_law
from tests.unit.test_tree_law import BROKEN, NUM_TOKENS, TOLERANCE, decided, joint

__all__ = ["every_draw"]
PROMPT = [7, 8, 9]
VOCAB = 3
UNION = Drafter.NGRAM_AND_MODEL
METRICS = WorkerMetrics("target")
USUAL = (0.6, 0.5)
"""Acceptance probability of what a draft proposes first, and of the chain's."""
GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=1.0, acceptance=AcceptanceRule.COUPLED)
DRAWN = SamplingParams(temperature=1.0)
EVEN = RowLaw(VOCAB, np.zeros(VOCAB, dtype=np.float32))
Ends = Callable[[Prefix], bool]
Token = tuple[int, Any]
"""A draft token, and what it was sampled from or None."""


def chain_of(tokens: Sequence[Token], prob: float, max_len: int = 0) -> CandidateTree:
    tree = DraftTree()
    for depth, (token_id, _) in enumerate(tokens):
        tree.add(depth - 1, token_id, prob=prob ** (depth + 1))
    return CandidateTree(tree, [law for _, law in tokens], prob, max_len)


class Chain:
    """The slot's own drafter: proposes these."""

    def __init__(self, tokens: Sequence[Token], name: Drafter) -> None:
        self._tokens = tokens
        self._name = name

    def asked(self, slot: Any, **how: bool) -> Iterator[Drafter]:
        if self._tokens:
            yield self._name

    def max_len(self, drafter: Drafter) -> int:
        return 64

    def feeds_rows(self, slot: Any) -> bool:
        return False

    def candidates(self, slot: Any, name: Drafter, state: Any, shares: Any, max_tokens: int) -> CandidateTree:
        return chain_of(self._tokens[:max_tokens], shares.share(0), max_tokens)


def guesses(*ids: int) -> list[Token]:
    return [(token_id, None) for token_id in ids]


def made(
    params: SamplingParams,
    own: Sequence[Token],
    probs: Sequence[float] = USUAL,
    name: Drafter = UNION,
    **speculation: Any,
) -> tuple[Drafting, Lease]:
    """probs: of what each draft says, and last of the chain. name: of the slot's own drafter."""
    slot: Any = SimpleNamespace(committed=list(PROMPT), cached=PROMPT[:-1], max_len=99, most_cached=99, params=params)
    slot.scheduling = Scheduling()
    slot.key = (1, 1)
    *of_drafts, of_own = (SlotShares(RankShares()) for _ in probs)
    for shares, prob in zip((*of_drafts, of_own), probs, strict=True):
        shares.first = prob
    drafts = [DeliveredDrafts(Drafter.MODEL, shares, ticket, True) for ticket, shares in enumerate(of_drafts)]
    job: Any = SimpleNamespace(tickets=[(draft.ticket, True) for draft in drafts])
    spec = Speculation(**{"max_draft_tokens": 16, **speculation})
    lease = Lease(job, slot, spec, drafts, {Drafter.NGRAM: DraftSource(Drafter.NGRAM, of_own)}, 0.0)
    lease.begin_step(0.0)
    keeper: Any = SimpleNamespace(sampling_state=lambda slot: None)
    chain: Any = Chain(own, name)
    return Drafting(chain, keeper, cast(Any, None), METRICS, VOCAB, takes_trees=True, merge=merge), lease


def deliver(lease: Lease, paths: Sequence[Sequence[int]], draft: int = 0) -> None:
    """Guesses, of which the first path is the likeliest."""
    ids, parents, ranks, places = list[int](), list[int](), list[int](), {(): ROOT}
    for path in paths:
        for depth in range(1, len(path) + 1):
            at, parent = tuple(path[:depth]), places[tuple(path[: depth - 1])]
            if at not in places:
                places[at] = len(ids)
                ranks.append(parents.count(parent))
                ids.append(path[depth - 1])
                parents.append(parent)
    nodes = Delivery(draft, len(PROMPT), ids, parents, ranks, [NodeKind.GUESS] * len(ids), None)
    lease.drafts[draft].buffer.insert(nodes, lease.slot.committed, 1 << 20)


def park(draft: DeliveredDrafts, chain: Sequence[Token]) -> None:
    """Draws, as though they had been delivered."""
    node = ROOT
    for token_id, law in chain:
        node = add(draft, node, token_id, law)


def add(draft: DeliveredDrafts, parent: int, token_id: int, law: Any) -> int:
    draft.buffer.tokens.append(BufferedToken(NodeKind.LAW, 0, law, None, None))
    return draft.buffer.tree.add(parent, token_id)


def overlaid(*trees: CandidateTree, most: int = 9) -> list[tuple[float, Prefix]]:
    """The probability and path of each node that the budget is offered, in order."""
    offers = merge(trees, most, is_fixed=False, is_matched=True)
    tree = join(trees, offers).tree
    return [(round(offer.prob, 9), tree.prefix(node)) for node, offer in enumerate(offers)]


def shown(tree: DraftTree) -> set[Prefix]:
    return {tree.prefix(node) for node in range(len(tree))}


def tree_of(found: Candidates) -> DraftTree:
    return join(list(found.trees.values()), found.offers).tree


def probs_of(found: Candidates) -> list[float]:
    return [offer.prob for offer in found.offers]


def proposal_of(drafting: Drafting, found: Candidates, num_offers: int) -> Proposal:
    return drafting.proposal(found, VerifyChoice(num_offers, False))


def pending(drafting: Drafting, lease: Lease) -> list[tuple[DeliveredDrafts, float]]:
    return [(draft, prob) for _, draft, prob in drafting.pending(drafting.candidates(lease))]


class TestGuesses:
    @pytest.mark.parametrize("params", [GREEDY, COUPLED])
    def test_both_are_in_one_tree_and_what_both_say_is_one_node(self, params: SamplingParams) -> None:
        drafting, lease = made(params, guesses(1, 2, 5))
        deliver(lease, [[1, 3, 4], [6]])
        found = drafting.candidates(lease)
        assert shown(tree_of(found)) == {(1,), (1, 3), (1, 3, 4), (6,), (1, 2), (1, 2, 5)}
        assert probs_of(found) == sorted(probs_of(found), reverse=True)
        proposal = proposal_of(drafting, found, len(found.offers))
        assert drafter_of(proposal) is UNION and not proposal.draws
        delivered, own = ({proposal.tree.prefix(node) for node in ranks} for ranks in proposal.sources.values())
        assert (delivered, own) == ({(1,), (1, 3), (1, 3, 4), (6,)}, {(1,), (1, 2), (1, 2, 5)})
        firsts = [proposal.source_of(node) for node in range(len(proposal.tree))]
        assert firsts.count(lease.first) == 4, "what both say is the first one's"

    def test_the_own_chain_is_worth_what_the_draft_leaves_it(self) -> None:
        tree = DraftTree()
        for parent, token_id, prob in ((ROOT, 1, 0.6), (0, 2, 0.36), (ROOT, 3, 0.2)):
            tree.add(parent, token_id, prob=prob)
        delivered, chain = CandidateTree(tree, [None] * 3, 0.6), chain_of(guesses(3, 4), 0.75)
        assert overlaid(delivered, chain) == [
            (0.6, (1,)),
            (0.36, (1, 2)),
            (0.3, (3,)),  # its own 0.2 was raised
            (0.225, (3, 4)),
        ]
        assert overlaid(delivered, chain, most=3) == [(0.6, (1,)), (0.36, (1, 2)), (0.3, (3,))]

    def test_what_follows_a_token_that_both_propose_rises_with_it(self) -> None:
        tree = DraftTree()
        for parent, token_id, prob in ((ROOT, 1, 0.2), (ROOT, 3, 0.1), (1, 4, 0.05)):
            tree.add(parent, token_id, prob=prob)
        delivered = CandidateTree(tree, [None] * 3, 0.2)
        assert overlaid(delivered, chain_of(guesses(3), 0.75)) == [(0.6, (3,)), (0.3, (3, 4)), (0.2, (1,))]

    def test_each_further_drafter_has_what_those_before_it_leave(self) -> None:
        chains = [chain_of(guesses(*ids), prob) for ids, prob in (((1, 2), 0.5), ((3,), 0.5), ((4,), 0.8))]
        assert overlaid(*chains) == [(0.5, (1,)), (0.25, (1, 2)), (0.25, (3,)), (0.2, (4,))]

    def test_trees_of_two_drafts_are_one(self) -> None:
        drafting, lease = made(GREEDY, [], (0.6, 0.4, 0.5))
        deliver(lease, [[1, 3], [6]])
        deliver(lease, [[1, 4], [5]], draft=1)
        found = drafting.candidates(lease)
        proposal = proposal_of(drafting, found, len(found.offers))
        assert drafter_of(proposal) is Drafter.MODEL_AND_MODEL
        assert shown(proposal.tree) == {(1,), (1, 3), (6,), (1, 4), (5,)}
        assert list(proposal.sources) == list(lease.drafts)

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
            (source,) = drafting.candidates(lease).trees
            assert source.drafter is better

    def test_where_a_number_is_named_the_first_that_has_something_drafts(self) -> None:
        """So that what is learnt from other requests changes no text that a seed gives."""
        drafting, lease = made(DRAWN, [(0, EVEN)], (0.9, 0.1), Drafter.NGRAM, num_draft_tokens=3)
        park(lease.first, [(1, EVEN), (2, EVEN)])
        (source,) = drafting.candidates(lease).trees
        assert source.drafter is Drafter.NGRAM and pending(drafting, lease) == []

    def test_a_step_may_wait_for_a_draft_whose_tokens_promise_more_than_the_targets_own(self) -> None:
        drafting, lease = made(DRAWN, [(0, EVEN)], (0.8, 0.1), Drafter.NGRAM)
        ((draft, prob),) = pending(drafting, lease)
        assert draft is lease.first and prob == pytest.approx(0.8 * 0.9)

    @pytest.mark.parametrize(("delivered", "ids"), [([3, 4, 5], [3, 4, 5]), ([3], [1, 2])])
    def test_guesses_that_were_delivered_count_as_many_as_they_are(self, delivered: list[int], ids: list[int]) -> None:
        drafting, lease = made(GREEDY, guesses(1, 2), (0.7, 0.5), Drafter.NGRAM)
        deliver(lease, [delivered])
        found = drafting.candidates(lease)
        assert proposal_of(drafting, found, len(found.offers)).tree.ids == ids

    def test_the_targets_own_draft_tokens_are_made_once_it_is_known_how_many_are_verified(self) -> None:
        drafting, lease = made(DRAWN, [(0, EVEN), (1, EVEN), (2, EVEN)], (0.5, 0.6), Drafter.NGRAM)
        drafting.own.candidates = mock = Mock(side_effect=drafting.own.candidates)  # type: ignore[method-assign]
        found = drafting.candidates(lease)
        assert len(found.offers) == 9 and not mock.called, "0.6 to the tenth is below 0.01"
        assert not proposal_of(drafting, found, 0).tree.ids and not mock.called
        assert proposal_of(drafting, found, 2).tree.ids == [0, 1] and mock.call_args.args[-1] == 2

    def test_who_has_nothing_promises_nothing(self) -> None:
        drafting, lease = made(DRAWN, [], (0.001, 0.9), Drafter.NGRAM)
        assert not drafting.candidates(lease).offers
        park(lease.first, [(1, EVEN)])
        assert tree_of(drafting.candidates(lease)).ids == [1]


class _WithRows(Chain):
    """It has a row fed behind the last of a step's draft tokens."""

    def feeds_rows(self, slot: Any) -> bool:
        return True

    def rows_beside(self, slot: Any, parents: Sequence[int]) -> ExtraRows:
        return ExtraRows(Drafter.NGRAM, [2], [len(parents) - 1], width=1, depth=1)


class TestRowsBeside:
    def test_they_hang_under_the_draft_tokens_that_the_step_verifies(self) -> None:
        drafting, lease = made(GREEDY, [], name=Drafter.NGRAM)
        drafting = replace(drafting, own=_WithRows(guesses(0, 1), Drafter.NGRAM))
        found = drafting.with_rows_beside(drafting.candidates(lease))
        parents = [drafting.proposal(found, VerifyChoice(num, True)).rows_beside for num in (2, 1, 0)]
        assert [rows and rows.parents for rows in parents] == [[1], [0], [-1]]

    def test_the_draft_tokens_that_earlier_ones_brought_are_paid_for_with_them(self) -> None:
        drafting, lease = made(GREEDY, [], name=Drafter.NGRAM)
        own, nobodys = replace(drafting, own=_WithRows(guesses(0, 1), Drafter.NGRAM)), _WithRows([], Drafter.NGRAM)
        costs = list[int]()
        deliver(lease, [[0]])
        for each in (own, replace(drafting, own=nobodys)):
            costs.append(each.with_rows_beside(each.candidates(lease)).demand.extra_cost_rows)
        assert costs == [3, 1], "what a draft worker delivered came of none"


class TestLearning:
    def noted(self, params: SamplingParams, ids: list[int], own: Sequence[int], delivered: Sequence[int]) -> list[Any]:
        """What is noted of the chain when these ids are committed."""
        drafting, lease = made(params, guesses(*own))
        deliver(lease, [delivered])
        seen = list[Any]()
        lease.own_sources[Drafter.NGRAM].shares.note = seen.append  # type: ignore[method-assign]
        found = drafting.candidates(lease)
        proposal = proposal_of(drafting, found, len(found.offers))
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


TARGET, DRAFT, OWN = random_law(VOCAB, 1), random_law(VOCAB, 2), random_law(VOCAB, 3)


def never(prefix: Prefix) -> bool:
    return False


def at_zero(prefix: Prefix) -> bool:
    return prefix[-1] == 0


def at_its_second(prefix: Prefix) -> bool:
    return len(prefix) == 2 and prefix[-1] == 0


class TestExactLaw:
    """Under `rejection`."""

    @pytest.fixture(autouse=True)
    def _drawn(self, every_draw: None) -> None:
        pass

    def step(
        self, target: Law, laws: Sequence[Law], count: int, ends: Ends, chances: Sequence[float], chooser: Chooser
    ) -> Prefix:
        """A step's output that verifies `count` of what two sources draw: two drafts, and up to three beside them."""
        numbers = Numbers(chooser)
        own = self.drawn(laws[1], [numbers["own draft", depth] for depth in range(min(3, count - 1))], ends)
        drafting, lease = made(DRAWN, own, chances, num_draft_tokens="auto", max_draft_tokens=5)
        lease.slot.max_len = len(PROMPT) + 4
        park(lease.first, self.drawn(laws[0], [numbers["draft", depth] for depth in range(2)], never))
        proposal = proposal_of(drafting, drafting.candidates(lease), count)
        assert drafter_of(proposal) is UNION
        return decided(target, proposal, numbers)

    def drawn(self, law: Law, numbers: Sequence[Any], ends: Ends) -> list[Token]:
        found, prefix = list[Token](), Prefix()
        for number in numbers:
            if prefix and ends(prefix):
                break
            of_prefix: Any = law(prefix)
            found.append((of_prefix.draw(number), of_prefix))
            prefix = (*prefix, found[-1][0])
        return found

    def error_of(self, target: Law, laws: Sequence[Law], count: int, ends: Ends, chances: Sequence[float]) -> float:
        return self.error(lambda chooser: self.step(target, laws, count, ends, chances, chooser), target)

    def error(self, step: Callable[[Chooser], Prefix], target: Law) -> float:
        total = np.zeros((VOCAB,) * NUM_TOKENS)
        for weight, output in every_run(step):
            for rest in itertools.product(range(VOCAB), repeat=max(0, NUM_TOKENS - len(output))):
                whole, share = (*output, *rest)[:NUM_TOKENS], weight
                for i in range(len(output), NUM_TOKENS):
                    share *= target(whole[:i]).prob(whole[i])
                total[whole] += share
        assert total.sum() == pytest.approx(1.0, abs=TOLERANCE)
        return float(np.abs(total - joint(target, VOCAB)).max())

    @pytest.mark.parametrize("ends", [never, at_its_second], ids=["long", "ended by a value"])
    @pytest.mark.parametrize("chances", [(0.5, 0.8), (0.3, 0.95)], ids=["draft first", "own first"])
    def test_whatever_is_chosen_of_each(self, chances: Sequence[float], ends: Ends) -> None:
        num_first = 2 if chances[0] > 0.4 else 4
        for count in range(num_first, 6):
            assert self.error_of(TARGET, (DRAFT, OWN), count, ends, chances) < TOLERANCE, count

    @pytest.mark.parametrize(
        "laws",
        [
            (random_law(VOCAB, 2, [1]), random_law(VOCAB, 3, [1])),
            (random_law(VOCAB, 2, [0, 1]), random_law(VOCAB, 3, [2])),
            (random_law(VOCAB, 2), random_law(VOCAB, 2)),
            (random_law(VOCAB, 1), random_law(VOCAB, 3)),
        ],
        ids=["always the same", "never the same", "one law", "the target's own"],
    )
    def test_whatever_both_say(self, laws: Sequence[Law]) -> None:
        chances = (0.5, 0.8)
        for target in (TARGET, random_law(VOCAB, 4, [0, 1])):
            for count in (2, 5):
                assert self.error_of(target, laws, count, never, chances) < TOLERANCE, count

    def test_a_guess_beside_draws_may_know_the_numbers_of_its_position(self) -> None:
        """As a copy of what the same seed gave before."""

        def step(chooser: Chooser) -> Prefix:
            numbers = Numbers(chooser)
            copied = self.drawn(TARGET, [numbers["own", place] for place in range(2)], never)
            own = guesses(*(token_id for token_id, _ in copied))
            drafting, lease = made(DRAWN, own)
            park(lease.first, self.drawn(DRAFT, [numbers["draft", depth] for depth in range(2)], never))
            found = drafting.candidates(lease)
            return decided(TARGET, proposal_of(drafting, found, len(found.offers)), numbers)

        assert self.error(step, TARGET) < TOLERANCE

    @pytest.mark.parametrize(
        "laws",
        [(DRAFT, OWN), (DRAFT, DRAFT), (random_law(VOCAB, 2, [1]), OWN), (random_law(VOCAB, 2, [0]), TARGET)],
        ids=["two laws", "one law", "always the same", "the target's own"],
    )
    @pytest.mark.parametrize("chances", [(0.5, 0.8, 0.5), (0.3, 0.95, 0.5)], ids=["first first", "second first"])
    def test_whatever_two_drafts_deliver(self, laws: Sequence[Law], chances: Sequence[float]) -> None:
        """Of which the second has a draw more, unless it ends with its first, and so many are verified."""

        def step(count: int, chooser: Chooser) -> Prefix:
            numbers = Numbers(chooser)
            drafting, lease = made(DRAWN, [], chances)
            for place, (draft, law) in enumerate(zip(lease.drafts, laws, strict=True)):
                drawn = self.drawn(law, [numbers[f"draft {place}", depth] for depth in range(1 + place)], at_zero)
                park(draft, drawn)
            return decided(TARGET, proposal_of(drafting, drafting.candidates(lease), count), numbers)

        for count in range(1, 5):
            assert self.error(lambda chooser, count=count: step(count, chooser), TARGET) < TOLERANCE, count

    @pytest.mark.parametrize("is_live", [True, False], ids=["waited for", "late before"])
    def test_a_draw_of_the_second_does_not_decide_whether_the_first_is_waited_for(self, is_live: bool) -> None:
        """A table has said its last behind one of them: what comes of the first meanwhile is in the step, or is not."""
        was_held = list[bool]()

        def step(chooser: Chooser) -> Prefix:
            numbers = Numbers(chooser)
            drafting, lease = made(DRAWN, [], (0.6, 0.5, 0.5), num_draft_tokens="auto" if is_live else 2)
            (second,) = chain = self.drawn(OWN, [numbers["second", 0]], never)
            park(lease.drafts[1], chain)
            lease.drafts[1].buffer.ended = set() if second[0] else {0}
            for draft in lease.drafts:
                draft.eta_s = draft.gap_s = 0.01
            lease.begin_step(0.0)
            lease.first.is_active, budget = is_live, VerifyBudget()
            for _ in range(60):
                budget.note(1, 1, 1 / 45)
            found = drafting.candidates(lease)
            awaited = drafting.pending(found)
            was_held.append(bool(awaited) and (not is_live or budget.hold_until(awaited, 0.001) is not None))
            if was_held[-1]:
                lease.held_from_s = 0.0
                park(lease.first, self.drawn(DRAFT, [numbers["first", 0]], never))
                lease.first.is_active = True
                found = drafting.candidates(lease)
            return decided(TARGET, proposal_of(drafting, found, len(found.offers)), numbers)

        assert self.error(step, TARGET) < TOLERANCE
        assert len(set(was_held)) == (1 if is_live else 2)

    def test_three_sources(self) -> None:
        def step(chooser: Chooser) -> Prefix:
            numbers = Numbers(chooser)
            laws = (DRAFT, OWN, random_law(VOCAB, 5))
            chains = [self.drawn(law, [numbers[str(place), 0]], never) for place, law in enumerate(laws)]
            drafting, lease = made(DRAWN, chains[2], (0.5, 0.4, 0.3), num_draft_tokens=1)
            for draft, chain in zip(lease.drafts, chains, strict=False):
                park(draft, chain)
            found = drafting.candidates(lease)
            assert len(found.offers) == 3
            return decided(TARGET, proposal_of(drafting, found, 3), numbers)

        assert self.error(step, TARGET) < TOLERANCE

    def test_two_sources_keep_more_than_either(self) -> None:
        def mean(count: int, laws: Sequence[Law]) -> float:
            chances = (0.5, 0.8)
            runs = every_run(lambda chooser: self.step(TARGET, laws, count, never, chances, chooser))
            return sum(weight * min(2, len(output)) for weight, output in runs)

        both = mean(2, (DRAFT, OWN))
        for law in (DRAFT, OWN):
            alone = 1.0 + sum(min(TARGET(()).prob(i), law(()).prob(i)) for i in range(VOCAB))
            assert both > alone + BROKEN


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
        assert len(found.offers) == 5 or num == 1
        assert len(proposal_of(drafting, found, 5).sources[lease.first]) == 4


def test_what_one_draft_delivers_wrong_is_dropped_and_refused_alone() -> None:
    drafting, lease = made(DRAWN, [], (0.6, 0.5, 0.5))
    refused = list[int]()
    leases: Any = SimpleNamespace(refuse=lambda ticket, why: refused.append(ticket))
    drafting = replace(drafting, leases=leases)
    park(lease.drafts[0], [(1, EVEN)])
    park(lease.drafts[1], [(2, (DenseRows(1, b"\0" * 4 * VOCAB), 0))])
    found = drafting.candidates(lease)
    assert not proposal_of(drafting, found, len(found.offers)).tree.ids
    assert refused == [1] and [len(draft.buffer.tree) for draft in lease.drafts] == [1, 0]


def test_where_draws_are_here_what_a_grammar_forces_counts_as_it_would_bring() -> None:
    drafting, lease = made(DRAWN, [], (0.6, 0.5))
    park(lease.first, [(1, EVEN)])
    lease.slot.params = SamplingParams(temperature=1.0, grammar="{}")
    for forced, drafter in (([5], Drafter.MODEL), ([5, 6, 7], None)):
        state: Any = SimpleNamespace(forced=lambda forced=forced: forced)
        drafting.keeper.sampling_state = lambda slot, state=state: state  # type: ignore[misc]
        assert [source.drafter for source in drafting.candidates(lease).trees] == [drafter]


def test_a_target_without_token_trees_offers_no_unions() -> None:
    ngram: Any = object()
    assert UNION in OwnDrafts({Drafter.NGRAM: ngram}, takes_trees=True).offered
    alone = OwnDrafts({Drafter.NGRAM: ngram})
    assert UNION not in alone.offered
    refusal = alone.refuses(UNION)
    assert refusal is not None and "ngram&model takes a model and an attention_path" in refusal.message


@pytest.mark.parametrize("tickets", [[], [6, 6], [*range(10, 19)]], ids=["none", "twice", "too many"])
def test_a_lease_has_a_ticket_of_its_own_for_each_of_few_drafts(tickets: list[int]) -> None:
    message = tpb.Verify(tickets=[tpb.DraftTicket(ticket=each) for each in tickets])
    with pytest.raises(InvalidRequest, match="must have 1 to 8, each once"):
        verify_job(1, message, VOCAB, lambda result: None)
