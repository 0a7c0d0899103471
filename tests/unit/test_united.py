"""Several sources in one tree: what is chosen of each, and that what is kept of all has the target's law.

The law by enumeration of every draw that the real functions make, as in `test_tree_law.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.engine.speculation.nodes import TREE_ROOT, NodeKind, Nodes
from outrider.engine.speculation.ranks import RankShares, SlotShares
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import AcceptanceRule, Drafter
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.params import SamplingParams
from outrider.wire.speculation import Speculation
from outrider.wire.tree_shape import TreeShape
from target_service.chains import as_chain
from target_service.drafts import Drafts
from target_service.hold import PendingDraft
from target_service.lease import Candidate, Candidates, Delivered, Lease, Part
from target_service.own_drafts import OwnDrafts
from target_service.parked import ParkedNode
from target_service.servicer import verify_job
from target_service.step_rows import Decided
from target_service.united import laid_over
from target_service.verify_budget import VerifyBudget
from tests.enumeration import Chooser, Law, Numbers, Prefix, every_draw, every_run, random_law
from tests.unit.test_tree_law import BROKEN, NUM_TOKENS, TOLERANCE, decided, joint

__all__ = ["every_draw"]
PROMPT = [7, 8, 9]
VOCAB = 3
UNION = Drafter.NGRAM_AND_MODEL
METRICS = WorkerMetrics("target")
USUAL = (0.6, 0.5)
"""How often what a draft says first comes, and what the chain says."""
GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=1.0, acceptance=AcceptanceRule.COUPLED)
DRAWN = SamplingParams(temperature=1.0)
Ends = Callable[[Prefix], bool]


class Chain:
    """The slot's own drafter: says these, as the part of a union."""

    def __init__(self, drafts: Sequence[ParkedNode]) -> None:
        self._drafts = drafts

    def asked(self, slot: Any, **how: bool) -> Iterator[Drafter]:
        if self._drafts:
            yield UNION

    def candidates(self, slot: Any, kind: Drafter, state: Any, shares: Any, most: int) -> list[Candidate]:
        return as_chain(self._drafts[:most], shares.share(0))


def guesses(*ids: int) -> list[ParkedNode]:
    return [ParkedNode(token_id) for token_id in ids]


def made(
    params: SamplingParams, own: Sequence[ParkedNode], chances: Sequence[float] = USUAL, **speculation: Any
) -> tuple[Drafts, Lease]:
    """chances: of what each draft says, and last of the chain."""
    slot: Any = SimpleNamespace(committed=list(PROMPT), cached=PROMPT[:-1], max_len=99, most_cached=99, params=params)
    slot.key = (1, 1)
    *of_drafts, of_own = (SlotShares(RankShares()) for _ in chances)
    drafts = [Delivered(ticket, shares, live=True) for ticket, shares in enumerate(of_drafts)]
    for shares, chance in zip((*of_drafts, of_own), chances, strict=True):
        shares.first = chance
    job: Any = SimpleNamespace(tickets=[(draft.ticket, True) for draft in drafts])
    spec = Speculation(**{"max_draft_tokens": 16, **speculation})
    lease = Lease(job, slot, spec, 99, drafts, {Drafter.NGRAM: of_own}, 0.0)
    lease.goes_on(0.0)
    keeper: Any = SimpleNamespace(sampling_state=lambda slot: None)
    chain: Any = Chain(own)
    return Drafts(chain, keeper, METRICS, VOCAB, takes_trees=True), lease


def deliver(lease: Lease, paths: Sequence[Sequence[int]], draft: int = 0) -> None:
    """Guesses, of which the first path is the likeliest."""
    ids, parents, ranks, places = list[int](), list[int](), list[int](), {(): TREE_ROOT}
    for path in paths:
        for depth in range(1, len(path) + 1):
            at, parent = tuple(path[:depth]), places[tuple(path[: depth - 1])]
            if at not in places:
                places[at] = len(ids)
                ranks.append(parents.count(parent))
                ids.append(path[depth - 1])
                parents.append(parent)
    nodes = Nodes(draft, len(PROMPT), ids, parents, ranks, [NodeKind.GUESS] * len(ids), None)
    lease.drafts[draft].parked.insert(nodes, lease.slot.committed, 1 << 20)


def overlaid(*parts: tuple[Sequence[Candidate], float], most: int = 9) -> list[tuple[float, int, int]]:
    shares = [chance for _, chance in parts]
    found = laid_over([Part(Drafter.NGRAM, nodes) for nodes, _ in parts], shares, most)
    return [(round(chance, 9), node.token_id, parent) for chance, node, parent in found]


def park(draft: Delivered, chain: Sequence[ParkedNode]) -> None:
    """Draws, as though they had been delivered."""
    at = draft.parked.root
    for each in chain:
        at.children[each.token_id] = each
        at = each


def shown(tree: DraftTree) -> set[Prefix]:
    return {tree.prefix(node) for node in range(len(tree.ids))}


def tree_of(found: Candidates) -> DraftTree:
    return DraftTree.of([node.token_id for _, node, _ in found.nodes], [parent for _, _, parent in found.nodes])


class TestGuesses:
    @pytest.mark.parametrize("params", [GREEDY, COUPLED])
    def test_both_are_in_one_tree_and_what_both_say_is_one_node(self, params: SamplingParams) -> None:
        drafts, lease = made(params, guesses(1, 2, 5))
        deliver(lease, [[1, 3, 4], [6]])
        found = drafts.candidates(lease)
        assert shown(tree_of(found)) == {(1,), (1, 3), (1, 3, 4), (6,), (1, 2), (1, 2, 5)}
        assert found.gains == sorted(found.gains, reverse=True)
        ready = drafts.ready(found, len(found.nodes))
        assert ready.tree is not None and ready.drafter is UNION
        delivered, own = ({ready.tree.prefix(node) for node in source.ranks} for source in ready.sources)
        assert (delivered, own) == ({(1,), (1, 3), (1, 3, 4), (6,)}, {(1,), (1, 2), (1, 2, 5)})
        assert ready.num_of(range(len(ready.draft_ids))) == [4, 2]

    def test_the_own_chain_is_worth_what_the_draft_leaves_it(self) -> None:
        delivered = [(0.6, ParkedNode(1), ROOT), (0.36, ParkedNode(2), 0), (0.2, ParkedNode(3, 1), ROOT)]
        chain = as_chain(guesses(3, 4), 0.75)
        assert overlaid((delivered, 0.6), (chain, 0.75)) == [
            (0.6, 1, ROOT),
            (0.36, 2, 0),
            (0.3, 3, ROOT),  # its own 0.2 was raised
            (0.225, 4, 2),
        ]
        assert overlaid((delivered, 0.6), (chain, 0.75), most=3) == [(0.6, 1, ROOT), (0.36, 2, 0), (0.3, 3, ROOT)]

    def test_what_hangs_under_a_guess_that_both_make_rises_with_it(self) -> None:
        delivered = [(0.2, ParkedNode(1), ROOT), (0.1, ParkedNode(3, 1), ROOT), (0.05, ParkedNode(4), 1)]
        assert overlaid((delivered, 0.2), (as_chain(guesses(3), 0.75), 0.75)) == [
            (0.6, 3, ROOT),
            (0.3, 4, 0),
            (0.2, 1, ROOT),
        ]

    def test_each_further_source_has_what_those_before_it_leave(self) -> None:
        chains = [
            (as_chain(guesses(*ids), chance), chance) for ids, chance in (((1, 2), 0.5), ((3,), 0.5), ((4,), 0.8))
        ]
        assert overlaid(*chains) == [(0.5, 1, ROOT), (0.25, 2, 0), (0.25, 3, ROOT), (0.2, 4, ROOT)]

    def test_trees_of_two_drafts_are_one(self) -> None:
        drafts, lease = made(GREEDY, [], (0.6, 0.4, 0.5))
        deliver(lease, [[1, 3], [6]])
        deliver(lease, [[1, 4], [5]], draft=1)
        found = drafts.candidates(lease)
        ready = drafts.ready(found, len(found.nodes))
        assert ready.tree is not None and ready.drafter is Drafter.MODEL_AND_MODEL
        assert shown(ready.tree) == {(1,), (1, 3), (6,), (1, 4), (5,)}
        assert [each.whose for each in ready.sources] == list(lease.drafts)
        assert ready.num_of(range(5)) == [3, 2], "what both say is the first one's"

    def test_a_named_number_is_each_sources(self) -> None:
        drafts, lease = made(GREEDY, guesses(1, 2, 5, 6), num_draft_tokens=2)
        deliver(lease, [[3, 4, 5]])
        found = drafts.candidates(lease)
        assert shown(tree_of(found)) == {(3,), (3, 4), (1,), (1, 2)} and found.must == 4

    def test_a_named_tree_has_the_chain_beside_it(self) -> None:
        drafts, lease = made(GREEDY, guesses(1, 2, 5, 6), tree=TreeShape((2, 1)))
        deliver(lease, [[3, 4, 5], [0, 4], [6, 4]])
        found = drafts.candidates(lease)
        assert shown(tree_of(found)) == {(3,), (3, 4), (0,), (0, 4), (1,), (1, 2)} and found.must == 6

    def test_a_source_that_is_late_is_absent_and_waited_for_as_long_as_it_would_be_alone(self) -> None:
        drafts, lease = made(GREEDY, guesses(1, 2), num_draft_tokens=2)
        found = drafts.candidates(lease)
        assert drafts.lacking(found) == [(lease.first, 1.0)]
        ready = drafts.ready(found, found.must)
        assert (ready.draft_ids, ready.drafter) == ([1, 2], Drafter.NGRAM)
        deliver(lease, [[3, 4]])
        assert drafts.lacking(drafts.candidates(lease)) == []
        drafts, lease = made(GREEDY, [])
        deliver(lease, [[3, 4]])
        assert drafts.ready(drafts.candidates(lease), 2).drafter is Drafter.MODEL

    def test_under_auto_a_late_source_is_worth_what_the_other_leaves_it(self) -> None:
        drafts, lease = made(GREEDY, guesses(1, 2), (0.6, 0.75))
        assert drafts.lacking(drafts.candidates(lease)) == [(lease.first, pytest.approx(0.6 * 0.25))]
        drafts, lease = made(GREEDY, [], (0.6, 0.75))
        assert drafts.lacking(drafts.candidates(lease)) == [(lease.first, 0.6)]
        drafts, lease = made(GREEDY, [], (0.6, 0.5, 0.75))
        deliver(lease, [[3]], draft=1)
        first, second = drafts.lacking(drafts.candidates(lease))
        assert first == (lease.first, pytest.approx(0.6 * 0.5)) and second == (lease.drafts[1], pytest.approx(0.5**2))

    def test_what_comes_late_is_never_verified_for_another_state(self) -> None:
        drafts, lease = made(GREEDY, guesses(1, 2))
        deliver(lease, [[3, 4, 5], [6, 4]])
        ready = drafts.ready(drafts.candidates(lease), 6)
        lease.slot.committed += [3, 0]
        drafts.committed(lease, ready, Decided((ready.draft_ids.index(3),), 0), [3, 0], [], 0.0)
        deliver(lease, [[3, 4, 5], [3, 0, 5]])
        assert shown(tree_of(drafts.candidates(lease))) == {(5,), (1,), (1, 2)}

    def test_with_lenience_the_chain_goes_first(self) -> None:
        """Which is of chains alone."""
        drafts, lease = made(SamplingParams(lenience=0.5), guesses(1, 2))
        deliver(lease, [[3, 4]])
        found = drafts.candidates(lease)
        assert (found.drafter, [node.token_id for _, node, _ in found.nodes]) == (Drafter.NGRAM, [1, 2])


class TestLearning:
    def noted(self, params: SamplingParams, ids: list[int], own: Sequence[int], delivered: Sequence[int]) -> list[Any]:
        """What is noted of the chain when these ids are committed."""
        drafts, lease = made(params, guesses(*own))
        deliver(lease, [delivered])
        seen = list[Any]()
        lease.own_shares[Drafter.NGRAM].note = seen.append  # type: ignore[method-assign]
        found = drafts.candidates(lease)
        ready = drafts.ready(found, len(found.gains))
        assert ready.tree is not None or own == delivered
        tree = ready.proposal.tree
        path, at = list[int](), ROOT
        while (node := tree.child(at, ids[len(path)])) is not None:
            path.append(node)
            at = node
        lease.slot.committed += ids[: len(path) + 1]
        drafts.committed(lease, ready, Decided(tuple(path), 0), ids[: len(path) + 1], [], 0.0)
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
        drafts, lease = made(DRAWN, own, chances, num_draft_tokens=0, max_draft_tokens=5)
        lease.slot.max_len = len(PROMPT) + 4
        park(lease.first, self.drawn(laws[0], [numbers["draft", depth] for depth in range(2)], never))
        found = drafts.candidates(lease)
        ready = drafts.ready(found, count)
        assert ready.tree is not None and ready.drafter is UNION
        return decided(target, ready.proposal, numbers)

    def drawn(self, law: Law, numbers: Sequence[Any], ends: Ends) -> list[ParkedNode]:
        found, prefix = list[ParkedNode](), Prefix()
        for number in numbers:
            if prefix and ends(prefix):
                break
            of_prefix: Any = law(prefix)
            found.append(ParkedNode(of_prefix.draw(number), 0, NodeKind.LAW, 0, of_prefix))
            prefix = (*prefix, found[-1].token_id)
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
            own = guesses(*(draft.token_id for draft in copied))
            drafts, lease = made(DRAWN, own)
            park(lease.first, self.drawn(DRAFT, [numbers["draft", depth] for depth in range(2)], never))
            found = drafts.candidates(lease)
            ready = drafts.ready(found, len(found.gains))
            return decided(TARGET, ready.proposal, numbers)

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
            drafts, lease = made(DRAWN, [], chances)
            for place, (draft, law) in enumerate(zip(lease.drafts, laws, strict=True)):
                drawn = self.drawn(law, [numbers[f"draft {place}", depth] for depth in range(1 + place)], at_zero)
                park(draft, drawn)
            found = drafts.candidates(lease)
            ready = drafts.ready(found, count)
            return decided(TARGET, ready.proposal, numbers)

        for count in range(1, 5):
            assert self.error(lambda chooser, count=count: step(count, chooser), TARGET) < TOLERANCE, count

    @pytest.mark.parametrize("is_live", [True, False], ids=["waited for", "late before"])
    def test_a_draw_of_the_second_does_not_decide_whether_the_first_is_waited_for(self, is_live: bool) -> None:
        """A table has said its last behind one of them: what comes of the first meanwhile is in the step, or is not."""
        was_held = list[bool]()

        def step(chooser: Chooser) -> Prefix:
            numbers = Numbers(chooser)
            drafts, lease = made(DRAWN, [], (0.6, 0.5, 0.5), num_draft_tokens=0 if is_live else 2)
            (second,) = chain = self.drawn(OWN, [numbers["second", 0]], never)
            park(lease.drafts[1], chain)
            second.ended = not second.token_id
            for draft in lease.drafts:
                draft.eta_s = draft.gap_s = 0.01
            lease.goes_on(0.0)
            lease.first.live, budget = is_live, VerifyBudget()
            for _ in range(60):
                budget.note(1, 1, 1 / 45)
            found = drafts.candidates(lease)
            lacking = [PendingDraft(lease, *draft) for draft in drafts.lacking(found)]
            was_held.append(bool(lacking) and (not is_live or budget.hold_until(lacking, 0.001) is not None))
            if was_held[-1]:
                lease.held_from_s = 0.0
                park(lease.first, self.drawn(DRAFT, [numbers["first", 0]], never))
                lease.first.live = True
                found = drafts.candidates(lease)
            ready = drafts.ready(found, len(found.gains))
            return decided(TARGET, ready.proposal, numbers)

        assert self.error(step, TARGET) < TOLERANCE
        assert len(set(was_held)) == (1 if is_live else 2)

    def test_three_sources(self) -> None:
        def step(chooser: Chooser) -> Prefix:
            numbers = Numbers(chooser)
            laws = (DRAFT, OWN, random_law(VOCAB, 5))
            chains = [self.drawn(law, [numbers[str(place), 0]], never) for place, law in enumerate(laws)]
            drafts, lease = made(DRAWN, chains[2], (0.5, 0.4, 0.3), num_draft_tokens=1)
            for draft, chain in zip(lease.drafts, chains, strict=False):
                park(draft, chain)
            found = drafts.candidates(lease)
            ready = drafts.ready(found, found.must)
            assert found.must == 3
            return decided(TARGET, ready.proposal, numbers)

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
    law: Any = RowLaw(VOCAB, np.zeros(VOCAB, dtype=np.float32))
    found = list[Candidates]()
    for num in (1, 2):
        chain = [ParkedNode(1, 0, NodeKind.LAW, 0, law) for _ in range(num)]
        drafts, lease = made(DRAWN, chain if is_own else [], num_draft_tokens=fixed)
        park(lease.first, [] if is_own else chain)
        found.append(drafts.candidates(lease))
        assert len(drafts.ready(found[-1], 9).draft_ids) == found[-1].num_nodes(9) == num
    assert found[0].gains == found[1].gains and found[0].must == found[1].must


def test_what_the_second_drew_takes_nothing_of_the_tree_that_the_first_was_to_have() -> None:
    law: Any = RowLaw(VOCAB, np.zeros(VOCAB, dtype=np.float32))
    for num in (1, 2):
        drafts, lease = made(DRAWN, [], (0.3, 0.9, 0.5), tree=TreeShape((2, 1)), max_draft_tokens=5)
        for draft, num_first in zip(lease.drafts, (2, num), strict=True):
            for rank in range(num_first):
                child = draft.parked.root.children[rank] = ParkedNode(rank, rank, NodeKind.LAW, 0, law)
                child.children[0] = ParkedNode(0, 0, NodeKind.LAW, 0, law)
        found = drafts.candidates(lease)
        assert found.must == 5 or num == 1
        assert found.counts(found.must)[0] == 4


def test_where_draws_are_here_what_a_grammar_forces_counts_as_it_would_bring() -> None:
    drafts, lease = made(DRAWN, [], (0.6, 0.5))
    law: Any = RowLaw(VOCAB, np.zeros(VOCAB, dtype=np.float32))
    park(lease.first, [ParkedNode(1, 0, NodeKind.LAW, 0, law)])
    lease.slot.params = SamplingParams(temperature=1.0, grammar="{}")
    for forced, drafter in (([5], Drafter.MODEL), ([5, 6, 7], None)):
        state: Any = SimpleNamespace(forced=lambda forced=forced: forced)
        drafts._keeper.sampling_state = lambda slot, state=state: state  # type: ignore[misc]
        assert drafts.candidates(lease).drafter is drafter


def test_a_draft_whose_law_did_not_come_is_refused_alone() -> None:
    drafts, lease = made(DRAWN, [], (0.6, 0.5, 0.4), num_draft_tokens=1)
    law: Any = RowLaw(VOCAB, np.zeros(VOCAB, dtype=np.float32))
    lease.first.parked.root.children[1] = ParkedNode(1, 0, NodeKind.LAW, 0, law)
    lease.drafts[1].parked.root.children[2] = ParkedNode(2, 0, NodeKind.LAW)
    assert drafts.ready(drafts.candidates(lease), 2).fallback is not None
    assert lease.first.refused is None and lease.drafts[1].refused is not None
    assert drafts.ready(drafts.candidates(lease), 2).draft_ids == [1], "the other goes on"


def test_a_law_that_did_not_come_is_refused() -> None:
    drafts, lease = made(DRAWN, [ParkedNode(1, 0, NodeKind.LAW, 0, RowLaw(VOCAB, np.zeros(VOCAB)))])  # type: ignore[arg-type]
    lease.first.parked.root.children[2] = ParkedNode(2, 0, NodeKind.LAW)
    ready = drafts.ready(drafts.candidates(lease), 2)
    assert not ready.draft_ids and ready.fallback is not None


def test_a_target_without_token_trees_offers_no_unions() -> None:
    ngram: Any = object()
    assert UNION in OwnDrafts({Drafter.NGRAM: ngram}, 9, takes_trees=True).offered
    alone = OwnDrafts({Drafter.NGRAM: ngram}, 9)
    assert UNION not in alone.offered
    refusal = alone.refuses(UNION)
    assert refusal is not None and "for ngram&model take a model and an attention_path" in refusal.message


@pytest.mark.parametrize("tickets", [[5], [6, 6], [*range(10, 18)]], ids=["the first again", "twice", "too many"])
def test_a_lease_has_a_ticket_of_its_own_for_each_of_few_drafts(tickets: list[int]) -> None:
    message = tpb.Verify(ticket=5, others=[tpb.DraftTicket(ticket=each) for each in tickets])
    with pytest.raises(InvalidRequest, match="must have 1 to 8, each once"):
        verify_job(1, message, VOCAB, lambda result: None)
