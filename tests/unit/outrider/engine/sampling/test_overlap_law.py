"""The output law of `rejection` where the target steps by itself and takes what has arrived, by enumeration.

An answer is decoded step by step by the product's own rules, with tiny vocabularies. A step's numbers stay what they
are in later steps, so that chains which outlive a step, branches that are drawn ahead and noise that the draft knows
are all what they are in service. What is compared is the joint law of the first tokens, and planted faults must show.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from outrider.engine.sampling.acceptance import Noise, accept_block_one
from outrider.engine.sampling.noise import NoiseStream
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.wire.requests.params import SamplingParams
from target_service.drafting.proposal import Proposal
from target_service.step.decide import accept_by_draws
from tests.enumeration import Chooser, Law, Number, Numbers, Prefix, every_draw, every_run, own_draw, random_law
from tests.law.table import Row, enumerated_row
from tests.proposals import PlainSlot, accept_token_one, tree_draws

__all__ = ["every_draw"]
TOLERANCE = 1e-12
BROKEN = 1e-3
"""A planted fault must be off by at least this total variation."""
Chain = tuple[int, ...]
"""Of drawn tokens, in order, the segments whose numbers they are drawn with."""
CLOCK = "clock"
"""Purpose of numbers that stand for times."""
COMPARED: list[Row] = []
"""Laws that the running test has compared, for docs/reports/laws.md."""

pytestmark = pytest.mark.usefixtures("every_draw")


@dataclass(frozen=True)
class Pair:
    target: Law
    draft: Law
    vocab_size: int


PAIRS = [Pair(random_law(2, seed), random_law(2, seed + 50), 2) for seed in (1, 4)]
WIDE = Pair(random_law(3, 7), random_law(3, 57), 3)


@dataclass(frozen=True)
class State:
    committed: Prefix = ()
    chain: tuple[int, ...] = ()
    """Segments of the tokens that are drawn after the committed ones, in order."""
    num_steps: int = 0
    known: tuple[tuple[Hashable, tuple[float, float]], ...] = ()
    """What is known of numbers that later steps may look at."""


class Step:
    """What draft and target know in a step, and the draws that they make."""

    def __init__(self, scheme: "Scheme", pair: Pair, state: State, chooser: Chooser) -> None:
        self.scheme, self.pair = scheme, pair
        self.start, self.num_steps, self.chain = state.committed, state.num_steps, state.chain
        self.numbers = Numbers(chooser, dict(state.known))
        self._tokens: dict[Chain, int] = {}
        """Last tokens of chains of these segments: what was looked at once is known."""

    @property
    def length(self) -> int:
        return len(self.start)

    def token(self, place: int) -> int:
        """Return the id of the chain that is drawn after `place` others."""
        segments = self.chain[: place + 1]
        if segments not in self._tokens:
            number = self.numbers[NoiseStream.DRAFT, self.length + place, segments[-1]]
            self._tokens[segments] = self.law(place).draw(number)
        return self._tokens[segments]

    def prefix(self, num: int) -> Prefix:
        return (*self.start, *(self.token(place) for place in range(num)))

    def law(self, place: int) -> TokenDistribution:
        """Return the draft's law after so many tokens of the chain."""
        return self.pair.draft(self.prefix(place))

    def clock(self, *edges: float) -> int:
        return self.numbers[CLOCK, self.length, self.num_steps].part(edges)

    def own_number(self, place: int) -> Number:
        """Return what the token that the target says itself after so many drafts is drawn with."""
        return self.numbers[self.scheme.own_key(self, place)]

    def guess(self, place: int) -> int:
        """Return the id that the draft takes for the target's own: what its law, without the drawn token, makes of the
        target's noise.
        """
        law = self.law(place)
        return (law.without(self.token(place)) if place < len(self.chain) else law).draw(self.own_number(place))

    def decide(self, num_drafted: int) -> tuple[int, int]:
        ids, laws = self.prefix(num_drafted)[self.length :], [self.law(place) for place in range(num_drafted)]
        return self.verdict(ids, laws)

    def verdict(self, ids: Sequence[int], laws: Sequence[TokenDistribution]) -> tuple[int, int]:
        at, now = self.length, self.length
        noise = Noise(
            [self.numbers[NoiseStream.ACCEPT, at + j, now] for j in range(len(ids))],  # type: ignore[arg-type]
            own_draw(self.own_number),
        )
        return self.scheme.rule(lambda j: self.pair.target((*self.start, *ids[:j])), laws, ids, noise)

    def after(self, committed: Prefix, chain: Chain) -> State:
        known = {key: value for key, value in self.numbers.known.items() if key[1] >= len(committed)}  # type: ignore[index]
        return State(committed, chain, self.num_steps + 1, tuple(sorted(known.items(), key=str)))


def whole_chain(step: Step) -> Chain:
    """Draw until three tokens are ready: further tokens of a chain that goes on, else a new one."""
    segment = step.chain[-1] if step.chain else step.length
    return (*step.chain, *[segment] * (3 - len(step.chain)))


def no_keys(step: Step, n: int, token_id: int) -> int:
    return 0


def goes_on(step: Step, n: int, token_id: int) -> Chain:
    """Return the rest of a chain whose n first tokens were kept, where the target then said its next one itself."""
    drawn = n < len(step.chain) and step.token(n) == token_id
    return step.chain[n + 1 :] if drawn else ()


def one_a_position(step: Step, place: int) -> Hashable:
    """The same for what is recovered and for a bonus: a position is committed once."""
    return "own", step.length + place


@dataclass(frozen=True)
class Scheme:
    """How an answer is decoded. The defaults are the product's."""

    include: Callable[[Step], int]
    """How many tokens of the chain a step verifies."""
    rule: Callable[..., tuple[int, int]] = accept_block_one
    grow: Callable[[Step], Chain] = whole_chain
    """The chain as it is when the step begins."""
    branch: Callable[[Step, int, int], int] = no_keys
    """How many tokens are ready under one that the target draws itself after n drafts, other than the drawn one."""
    keep: Callable[[Step, int, int], Chain] = goes_on
    own_key: Callable[[Step, int], Hashable] = one_a_position
    branch_segment: Callable[[Step, int], int] = field(default=lambda step, n: step.length + n + 1)


def next_state(scheme: Scheme, pair: Pair, state: State, chooser: Chooser) -> State:
    step = Step(scheme, pair, state, chooser)
    step.chain = scheme.grow(step)
    num_drafted = min(scheme.include(step), len(step.chain))
    n, token_id = step.decide(num_drafted)
    chain = scheme.keep(step, n, token_id)
    if not chain and not (n < len(step.chain) and step.token(n) == token_id):
        chain = (scheme.branch_segment(step, n),) * scheme.branch(step, n, token_id)
    return step.after((*step.prefix(n), token_id), chain)


def emitted(pair: Pair, num_tokens: int, first: Any, advance: Callable[[Any, Chooser], Any]) -> np.ndarray:
    """[V] * num_tokens: joint law of the first tokens. advance(state, chooser): the state after a step."""
    total = np.zeros((pair.vocab_size,) * num_tokens)
    states: dict[Any, float] = {first: 1.0}
    while states:
        after: dict[Any, float] = defaultdict(float)
        for state, before in states.items():
            for weight, found in every_run(lambda chooser, state=state: advance(state, chooser)):
                if len(found.committed) >= num_tokens:
                    total[found.committed[:num_tokens]] += before * weight
                else:
                    after[found] += before * weight
        states = after
    assert total.sum() == pytest.approx(1.0, abs=TOLERANCE)
    return total


def variation(pair: Pair, found: np.ndarray, rule: str) -> float:
    """Return the total variation from the target's joint law."""
    wanted = np.ones_like(found)
    for whole in itertools.product(range(pair.vocab_size), repeat=found.ndim):
        for i, token_id in enumerate(whole):
            wanted[whole] *= pair.target(whole[:i]).prob(token_id)
    differences = np.abs(found - wanted)
    COMPARED.append(enumerated_row(rule, "leases, slot on the host", found.size, float(differences.max())))
    return float(differences.sum()) / 2


def off(scheme: Scheme, pair: Pair, num_tokens: int = 4) -> float:
    found = emitted(pair, num_tokens, State(), lambda state, chooser: next_state(scheme, pair, state, chooser))
    return variation(pair, found, f"rejection by {'block' if scheme.rule is accept_block_one else 'token'}")


def both(scheme: Scheme, num_tokens: int = 4) -> list[float]:
    """By token and by block, of each pair."""
    rules = (accept_token_one, accept_block_one)
    return [off(replace(scheme, rule=rule), pair, num_tokens) for rule in rules for pair in PAIRS]


def fixed(num: int) -> Callable[[Step], int]:
    return lambda step: num


def by_clock(step: Step) -> int:
    return (1, 3)[step.clock(0.4)]


def by_earlier_tokens(step: Step) -> int:
    return 1 if step.token(0) == 0 else 2 if step.token(1) == 1 else 3


def by_law(step: Step) -> int:
    """Up to a law whose best token is not likely enough."""
    return next((j for j in range(3) if step.law(j).probs().max() < 0.7), 3)


def alternating(step: Step) -> int:
    """Nothing, then something: a chain outlives a plain step."""
    return (0, 2, 1)[step.num_steps % 3]


INCLUSIONS = {
    "fixed": fixed(2),
    "by a clock": by_clock,
    "by earlier tokens": by_earlier_tokens,
    "by the law it is drawn from": by_law,
    "one of a longer chain": fixed(1),
    "none, two, one": alternating,
}


def best_ids(step: Step, n: int, token_id: int) -> bool:
    """The best id but for the drawn one is a key at every place, as a draft without noise ranks them."""
    law = step.law(n)
    law = law.without(step.token(n)) if n < len(step.chain) else law
    return int(np.argmax(law.weights)) == token_id


def one_under_best(step: Step, n: int, token_id: int) -> int:
    return 1 * best_ids(step, n, token_id)


def no_more_than_is_there(step: Step) -> Chain:
    """Draw a chain only where there is none: what a key had ready is what a step has."""
    return step.chain or (step.length,) * 3


@pytest.mark.usefixtures("recorded")
class TestExactLaw:
    @pytest.mark.parametrize("name", INCLUSIONS)
    def test_chains_that_outlive_a_step(self, name: str) -> None:
        assert max(both(Scheme(INCLUSIONS[name]))) < TOLERANCE

    @pytest.mark.parametrize("name", ["fixed", "by a clock", "none, two, one"])
    def test_keys(self, name: str) -> None:
        keys = Scheme(INCLUSIONS[name], branch=one_under_best, grow=no_more_than_is_there)
        assert max(both(keys)) < TOLERANCE

    def test_three_ids(self) -> None:
        keys = Scheme(fixed(2), branch=one_under_best, grow=no_more_than_is_there)
        for rule in (accept_token_one, accept_block_one):
            assert off(replace(keys, rule=rule), WIDE, 3) < TOLERANCE


def test_what_is_recovered_is_never_the_draft_that_it_replaces() -> None:
    """So no chain has to be given up after a recovered token: it lies beside it.

    By block, too: something is left of the draft's own id only where kept * target > draft, and then the prefix with it
    is kept for sure.
    """
    pairs = [Pair(random_law(3, seed), random_law(3, seed + 50), 3) for seed in range(3)]
    for rule, pair in itertools.product((accept_token_one, accept_block_one), pairs):
        scheme, seen = Scheme(fixed(3), rule=rule), 0

        def decided(chooser: Chooser, scheme: Scheme = scheme, pair: Pair = pair) -> tuple[int, bool]:
            step = Step(scheme, pair, State(), chooser)
            step.chain = scheme.grow(step)
            n, token_id = step.decide(3)
            return n, n < 3 and step.token(n) == token_id

        for _, (n, same) in every_run(decided):
            seen += n < 3
            assert not same
        assert seen > 10


class TestPlantedFaults:
    def test_a_branch_drawn_with_the_trunks_numbers(self) -> None:
        trunk = Scheme(fixed(3), branch=lambda *_: 2, branch_segment=lambda step, n: step.chain[0])
        by_token, by_block = both_rules(trunk)
        assert by_token < TOLERANCE and by_block > BROKEN


def both_rules(scheme: Scheme) -> tuple[float, float]:
    """Return the largest by token, the smallest or (where all are exact) largest by block."""
    found = both(scheme)
    by_block = found[len(PAIRS) :]
    return max(found[: len(PAIRS)]), min(by_block) if min(by_block) > BROKEN else max(by_block)


def peeking(step: Step, num: int = 3) -> Chain:
    """Rank the keys of every place, of all that is drawn, before anything is verified."""
    step.chain = step.chain or (step.length,) * num
    for place in range(len(step.chain)):
        step.guess(place)
    return step.chain


def one_under_guessed(step: Step, n: int, token_id: int) -> int:
    """So that the next step has one draft after a hit, and two after a miss."""
    return 1 * (step.guess(n) == token_id)


KNOWN = Scheme(fixed(2), grow=peeking, branch=one_under_guessed)
"""The draft knows what the target draws its own tokens with, and has a chain ready under what it makes of it."""


@pytest.mark.usefixtures("recorded")
class TestNoiseThatTheDraftKnows:
    @pytest.mark.parametrize("name", ["fixed", "by a clock", "by earlier tokens", "none, two, one"])
    def test_exact(self, name: str) -> None:
        assert max(both(replace(KNOWN, include=INCLUSIONS[name]))) < TOLERANCE

    def test_three_ids(self) -> None:
        for rule in (accept_token_one, accept_block_one):
            known = replace(KNOWN, rule=rule, grow=lambda step: peeking(step, 2))
            assert off(known, WIDE, 2) < TOLERANCE


class TestPlantedFaultsOfKnownNoise:
    def test_a_draft_in_or_out_by_the_noise_that_would_replace_it(self) -> None:
        faulty = Scheme(lambda step: step.own_number(0).part([0.5]))
        for rule in (accept_token_one, accept_block_one):
            assert off(replace(faulty, rule=rule), WIDE, 2) > BROKEN


def with_own_drafts(rule: Callable[..., tuple[int, int]], pair: Pair, purpose: NoiseStream) -> float:
    """Every other step verifies two drafts that the target makes itself, of another law, while the draft's chain lies
    there, which goes on where it has foreseen what was committed. purpose: of the numbers of the target's drafts.
    """
    other, scheme = random_law(pair.vocab_size, 12), Scheme(fixed(2), rule=rule)

    def advance(state: State, chooser: Chooser) -> State:
        if state.num_steps % 2:
            return next_state(scheme, pair, state, chooser)
        step = Step(scheme, pair, state, chooser)
        step.chain = scheme.grow(step)
        ids, laws = list[int](), list[TokenDistribution]()
        for place in range(2):
            laws.append(other((*step.start, *ids)))
            ids.append(laws[-1].draw(step.numbers[purpose, step.length + place, step.length]))
        n, token_id = step.verdict(ids, laws)
        new = (*ids[:n], token_id)
        goes_on = all(place < len(step.chain) and step.token(place) == each for place, each in enumerate(new))
        chain = step.chain[len(new) :] if goes_on else ()
        return step.after((*step.start, *new), chain)

    return variation(pair, emitted(pair, 4, State(), advance), "rejection by block")


@pytest.mark.usefixtures("recorded")
class TestDraftsOfTheTargetsOwn:
    @pytest.mark.parametrize("rule", [accept_token_one, accept_block_one])
    def test_exact(self, rule: Callable[..., tuple[int, int]]) -> None:
        assert max(with_own_drafts(rule, pair, NoiseStream.OWN_DRAFT) for pair in PAIRS) < TOLERANCE

    def test_a_block_drawn_with_the_numbers_of_the_chain_beside_it_is_not(self) -> None:
        assert min(with_own_drafts(accept_block_one, pair, NoiseStream.DRAFT) for pair in PAIRS) > BROKEN


@dataclass(frozen=True)
class TreeState:
    committed: Prefix = ()
    segment: int = 0
    known: tuple[tuple[Hashable, tuple[float, float]], ...] = ()


Arrived = Callable[["TreeStep", Prefix], int]
"""(step, prefix): how many of the siblings that are drawn after a prefix have arrived."""


class TreeStep:
    """Two siblings at the first place and one under each; cousins are drawn with the same numbers."""

    WIDTHS = (2, 1)

    def __init__(self, pair: Pair, state: TreeState, numbers: Numbers) -> None:
        self.pair, self.start, self.segment, self.numbers = pair, state.committed, state.segment, numbers

    def siblings(self, prefix: Prefix, num: int) -> list[int]:
        law, found = self.pair.draft((*self.start, *prefix)), list[int]()
        for candidate in range(num):
            at = len(self.start) + len(prefix)
            found.append(law.draw(self.numbers[NoiseStream.DRAFT, at, self.segment, candidate]))
            law = law.without(found[-1])
        return found

    def tree(self, arrived: Arrived) -> DraftTree:
        ids, parents, queue = list[int](), list[int](), [(ROOT, Prefix())]
        for node, prefix in queue:
            if len(prefix) == len(self.WIDTHS):
                continue
            for token_id in self.siblings(prefix, min(self.WIDTHS[len(prefix)], arrived(self, prefix))):
                queue.append((len(ids), (*prefix, token_id)))
                ids.append(token_id)
                parents.append(node)
        return DraftTree.of(ids, parents)

    def decide(self, tree: DraftTree) -> tuple[Prefix, int]:
        """Return what is kept and the next id."""
        now = len(self.start)
        parents = dict.fromkeys(tree.parents)
        draws = tree_draws(
            {node: [(self.pair.draft((*self.start, *tree.prefix(node))), tree.children(node))] for node in parents}
        )
        uniforms: Any = [
            self.numbers[NoiseStream.ACCEPT, now + tree.depth(draw.node) - 1, now, tree.ranks[draw.node]]
            for draw in draws
        ]
        noise = Noise(uniforms, own_draw(lambda place: self.numbers["own", now + place]))
        slot: Any = PlainSlot(SamplingParams(), [])
        proposal = Proposal(slot, tree, draws)
        decided = accept_by_draws(proposal, lambda node: self.pair.target((*self.start, *tree.prefix(node))), noise)
        return tree.prefix(decided.last), decided.next_id


def next_tree_state(pair: Pair, arrived: Arrived, state: TreeState, chooser: Chooser) -> TreeState:
    """A segment goes on under a drawn token that the target says itself, one that had not arrived."""
    step = TreeStep(pair, state, Numbers(chooser, dict(state.known)))
    kept, token_id = step.decide(step.tree(arrived))
    committed = (*state.committed, *kept, token_id)
    goes_on = len(kept) < 2 and token_id in step.siblings(kept, step.WIDTHS[len(kept)])
    known = {
        (purpose, at, *rest): value
        for (purpose, at, *rest), value in step.numbers.known.items()  # type: ignore[misc]
        if purpose in (NoiseStream.DRAFT, "own") and at >= len(committed)  # others are keyed with the step
    }
    return TreeState(committed, state.segment if goes_on else len(committed), tuple(sorted(known.items(), key=str)))


def tree_off(arrived: Arrived, pair: Pair = WIDE, num_tokens: int = 2) -> float:
    def advance(state: TreeState, chooser: Chooser) -> TreeState:
        return next_tree_state(pair, arrived, state, chooser)

    found = emitted(pair, num_tokens, TreeState(), advance)
    return variation(pair, found, "rejection in a tree")


def tree_by_clock(step: TreeStep, prefix: Prefix) -> int:
    return step.numbers[CLOCK, len(step.start)].part([0.3, 0.6])


def tree_by_earlier_tokens(step: TreeStep, prefix: Prefix) -> int:
    return (sum(prefix) + len(prefix) + len(step.start)) % 3


def first_with_children(step: TreeStep, prefix: Prefix) -> int:
    """The chain of first siblings has arrived, and the second sibling at the root without what follows it."""
    return 2 if not prefix else int(prefix[0] == step.siblings((), 1)[0])


@pytest.mark.usefixtures("recorded")
class TestTreesThatArriveInPart:
    @pytest.mark.parametrize("arrived", [tree_by_clock, tree_by_earlier_tokens, first_with_children])
    def test_exact(self, arrived: Arrived) -> None:
        assert tree_off(arrived) < TOLERANCE


class TestPlantedFaultsOfTrees:
    def test_a_sibling_left_out_for_its_value(self) -> None:
        assert tree_off(lambda step, prefix: 1 + (step.siblings((), 2)[1] == 0)) > BROKEN
