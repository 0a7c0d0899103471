"""How a draft's tree grows: what is fed next, what stays when tokens are committed, where it ends, and that under
`rejection` a state has one proposal, however early it was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampling.coupled import coupled_ranked
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drafter import NodeDistribution
from outrider.engine.speculation.drawing import grow
from outrider.engine.speculation.growth import GrowthSetup
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.plan import LEAST_CHANCE, MAX_DEPTH, MAX_FED
from outrider.engine.speculation.ranks import MAX_RANKS, RankShares, SlotShares
from outrider.engine.speculation.tree import GrowingTree
from outrider.engine.worker.slots import BareSlot
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.params import MAX_DRAFT_TOKENS, SamplingParams
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape

VOCAB_SIZE = 24
PROMPT = [1, 2, 3]
MAX_TOKENS = 200
AUTO = Speculation(max_draft_tokens=16)


class Draft:
    """A model whose logits are a function of all tokens before, with a tree that grows by it."""

    def __init__(
        self,
        committed: Sequence[int] = PROMPT,
        speculation: Speculation = AUTO,
        *,
        takes_trees: bool = True,
        fills_blocks: bool = False,
        scale: float = 2.0,
        world: int = 0,
        max_tokens: int = MAX_TOKENS,
        vocab_size: int = VOCAB_SIZE,
        max_fed: int = MAX_FED,
        **options: Any,
    ) -> None:
        self.params = SamplingParams(**{"temperature": 0.0, "seed": 5, "max_tokens": max_tokens, **options})
        self.committed, self.scale, self.world = list(committed), scale, world
        self.vocab_size = vocab_size
        self.state = SamplingState(self.params, PROMPT, [])
        self.shares = SlotShares(RankShares())
        self.slot = BareSlot((1, 1), self.committed, len(PROMPT), self.params)
        drafter: Any = SimpleNamespace(takes_trees=takes_trees, fills_blocks=fills_blocks, max_depth=MAX_DRAFT_TOKENS)
        self.tree = GrowingTree(GrowthSetup(self.slot, speculation, self.shares, drafter, None, max_fed, ()))
        self.order: list[int] = []
        """Nodes and ROOT as they were fed, before anything was committed."""

    def law(self, row: LogitRow) -> RowLaw:
        key = [self.world, *self.committed, *row.draft_prefix]
        scores = np.random.default_rng(key).normal(0.0, self.scale, self.vocab_size).astype(np.float32)
        scores -= scores.max()
        return RowLaw(self.vocab_size, scores - np.float32(np.log(np.exp(scores).sum())))

    def best(self, row: LogitRow, num: int) -> tuple[list[int], list[float]]:
        probs = self.law(row).probs()
        ids = np.argsort(-probs, kind="stable")[:num]
        return ids.tolist(), probs[ids].tolist()

    def grow(self, num_steps: int = 1000, most: int = 4) -> Draft:
        for _ in range(num_steps):
            offers = self.tree.offers(most)
            if not offers:
                break
            for _, node in offers:
                self.tree.feed(node)
                self.order.append(node)
            said = [NodeDistribution(self.tree, node, self.state, self.law, self.best) for _, node in offers]
            assert not grow(said)
        return self

    def commit(self, ids: Sequence[int]) -> list[int]:
        self.committed += ids
        return self.tree.go_on(ids)

    def kinds_after(self, node: int, kind: NodeKind) -> list[int]:
        return [child for child in self.tree.children(node) if self.tree.kinds[child] is kind]

    def key_of(self, node: int) -> int:
        return self.kinds_after(node, NodeKind.KEY)[0]

    def law_of(self, node: int) -> int:
        return self.kinds_after(node, NodeKind.LAW)[0]

    def ids_after(self, node: int) -> list[int]:
        return [self.tree.ids[child] for child in self.tree.children(node)]

    def chain(self, node: int = ROOT) -> list[tuple[int, int]]:
        """The LAW nodes in a row: ids and where their segment began."""
        found = list[tuple[int, int]]()
        while drawn := self.kinds_after(node, NodeKind.LAW):
            node = drawn[0]
            found.append((self.tree.ids[node], self.tree.segments[node][0]))
        return found

    def drawn(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """By path of ids: which LAW nodes follow, all within the root's segment."""
        queue, found = [ROOT], dict[tuple[int, ...], tuple[int, ...]]()
        for node in queue:
            laws = self.kinds_after(node, NodeKind.LAW)
            if laws:
                found[self.tree.prefix(node)] = tuple(self.tree.ids[child] for child in laws)
            queue += laws
        return found


REJECTION: dict[str, Any] = {"temperature": 1.0}
COUPLED: dict[str, Any] = {"temperature": 1.0, "acceptance": AcceptanceRule.COUPLED}
RULES = pytest.mark.parametrize("rule", [{}, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])


# What grows.


@RULES
@pytest.mark.parametrize("speculation", [AUTO, Speculation(3, 16)], ids=["auto", "K = 3"])
def test_what_follows_a_token_that_a_block_did_not_begin_with_waits_for_the_next_block(
    rule: dict[str, Any], speculation: Speculation
) -> None:
    draft = Draft(speculation=speculation, fills_blocks=True, **rule).grow()
    tree = draft.tree
    assert any(tree.children(node) for node in range(len(tree)))
    for node in range(len(tree)):
        assert tree.kinds[node] is not NodeKind.KEY
        assert not tree.children(node) or tree.ranks[node] == 0
    others = [node for node in tree.children(ROOT) if tree.ranks[node]]
    assert bool(others) == (tree.kinds[0] is NodeKind.GUESS)
    ids = [tree.ids[node] for node in others[:1]] or [VOCAB_SIZE - 1]
    draft.commit(ids)
    assert not len(tree) and [node for _, node in tree.offers(4)] == [ROOT]


def test_a_named_tree_of_a_block_is_whole() -> None:
    named = Speculation(tree=TreeShape.parse("2x2x2"), max_draft_tokens=16)
    tree = Draft(speculation=named, fills_blocks=True).grow().tree
    within = [node for node in range(len(tree)) if tree.depth(node) <= 3 and max(_ranks(tree, node)) < 2]
    assert len(within) == 2 + 4 + 8


@RULES
def test_a_guess_that_was_too_unlikely_to_be_made_counts_when_it_comes(rule: dict[str, Any]) -> None:
    """Else its chance falls for good, because it is never made."""
    draft = Draft(**rule).grow(most=1)
    token_id = draft.tree.ranked[ROOT][0]
    rank = len(draft.tree.children(ROOT))
    before = draft.shares.share(rank)
    draft.commit([token_id])
    assert rank > 0
    assert draft.shares.share(rank) > before


@RULES
def test_the_likeliest_is_fed_first_and_whatever_is_fed_has_a_follower(rule: dict[str, Any]) -> None:
    draft = Draft(**rule).grow(most=1)
    tree = draft.tree
    probs = [tree.probs[node] for node in draft.order if node != ROOT]
    assert probs == sorted(probs, reverse=True)
    assert all(tree.children(node) for node in draft.order)
    assert 20 < len(tree.fed) <= MAX_FED
    assert max(map(tree.depth, range(len(tree)))) <= MAX_DEPTH
    assert all(tree.probs[node] >= LEAST_CHANCE or tree.kinds[node] is NodeKind.LAW for node in range(len(tree)))


def test_a_tree_of_large_laws_is_bounded_by_their_bytes_except_for_what_is_named() -> None:
    assert len(Draft(max_fed=6, temperature=1.0).grow().tree.fed) == 6
    named = Draft(speculation=Speculation(num_draft_tokens=9, max_draft_tokens=16), max_fed=6, temperature=1.0).grow()
    assert not named.tree.is_awaited
    assert len(named.tree.fed) == 8  # the ninth has nothing named after it


@RULES
def test_siblings_are_told_apart_by_rank_and_differ(rule: dict[str, Any]) -> None:
    draft = Draft(**rule).grow()
    for node in draft.order:
        children = draft.tree.children(node)
        assert [draft.tree.ranks[child] for child in children] == list(range(len(children)))
        assert len(set(draft.ids_after(node))) == len(children)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 5 * VOCAB_SIZE])
@pytest.mark.parametrize("scale", [40.0, 4000.0])
def test_keys_are_other_ids_than_what_was_drawn_however_little_is_left(vocab_size: int, scale: float) -> None:
    """Next to a likely token all the others together may be less than a float32 holds, or nothing."""
    draft = Draft(**REJECTION, scale=scale, vocab_size=vocab_size).grow()
    for node in draft.order:
        drawn_id = draft.tree.ids[draft.law_of(node)]
        left = draft.law(LogitRow(draft.state, draft.tree.prefix(node))).without(drawn_id)
        keys = [draft.tree.ids[key] for key in draft.kinds_after(node, NodeKind.KEY)]
        assert len(set(keys)) == len(keys) and all(left.prob(key) > 0 for key in keys)


def test_keys_come_in_the_order_of_the_targets_noise() -> None:
    """By the law without what is drawn there, as the target will draw if its law is like the draft's."""
    draft = Draft(**REJECTION).grow()
    num_reordered = 0
    for node in draft.order:
        drawn = draft.law_of(node)
        keys = [draft.tree.ids[key] for key in draft.kinds_after(node, NodeKind.KEY)]
        left = draft.tree.distributions[drawn].without(draft.tree.ids[drawn])
        position = len(PROMPT) + draft.tree.depth(node)
        ranked, _ = coupled_ranked(left, draft.params, position, MAX_RANKS - 1)
        assert keys == ranked[: len(keys)]
        num_reordered += keys != [int(i) for i in np.argsort(-left.probs(), kind="stable")[: len(keys)]]
    assert num_reordered > 10


@RULES
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6])
def test_the_target_has_room_for_a_token_of_its_own(rule: dict[str, Any], max_tokens: int) -> None:
    tree = Draft(max_tokens=max_tokens, **rule).grow().tree
    nodes = range(len(tree))
    assert max(map(tree.depth, nodes), default=0) == max_tokens - 1


@RULES
def test_where_no_trees_are_run_it_is_a_chain(rule: dict[str, Any]) -> None:
    draft = Draft(takes_trees=False, **rule).grow()
    assert len(draft.order) > 4 and draft.tree.is_chain


@RULES
def test_in_turns_nothing_is_made_past_the_next_step(rule: dict[str, Any]) -> None:
    draft = Draft(speculation=Speculation(5, 5, sequential=True), **rule).grow()
    assert set(draft.tree.kinds.values()) == {NodeKind.LAW if rule == REJECTION else NodeKind.GUESS}
    assert len(draft.tree) == 5 and draft.tree.is_chain
    assert not draft.tree.offers(4)


@RULES
def test_nothing_is_made_where_every_step_is_plain(rule: dict[str, Any]) -> None:
    assert not Draft(speculation=Speculation(), **rule).tree.offers(4)


# Named drafts.


@RULES
@pytest.mark.parametrize("num", [1, 5, 20])
def test_a_named_number_is_made_however_unlikely_and_first(rule: dict[str, Any], num: int) -> None:
    draft = Draft(speculation=Speculation(num, 64), **rule).grow(most=1)
    trunk = [node for node in draft.order[:num] if node == ROOT or draft.tree.ranks[node] == 0]
    assert [draft.tree.depth(node) for node in trunk] == list(range(num))


@pytest.mark.parametrize("shape", ["4x2x1", "1x3", "best:12x4", "7x7"])
@pytest.mark.parametrize("rule", [{}, COUPLED], ids=["greedy", "coupled"])
def test_a_named_tree_of_guesses_is_whole_after_hits_too(rule: dict[str, Any], shape: str) -> None:
    tree = TreeShape.parse(shape)
    draft = Draft(speculation=Speculation(max_draft_tokens=tree.most_nodes, tree=tree), **rule).grow()
    for hit in range(4):
        places = draft.tree.plan.places
        queue: list[tuple[tuple[int, ...], int]] = [((), ROOT)]
        num_nodes = 0
        for place, node in queue:
            children, named = draft.tree.children(node), places.get(place, 0)
            assert len(children) >= named, (hit, place)
            num_nodes += named
            queue += [((*place, draft.tree.ranks[child]), child) for child in children[:named]]
        assert num_nodes == tree.most_nodes
        children = draft.tree.children(ROOT)
        node = children[hit % len(children)]
        draft.commit([draft.tree.ids[node], *draft.ids_after(node)[:1]])
        draft.grow()


@pytest.mark.parametrize("shape", ["4x2x1", "2x2", "best:6x3"])
def test_a_named_tree_is_drawn_with_its_numbers_of_siblings(shape: str) -> None:
    tree = TreeShape.parse(shape)
    draft = Draft(speculation=Speculation(max_draft_tokens=tree.most_nodes, tree=tree), **REJECTION).grow()
    drawn = draft.drawn()
    assert sum(map(len, drawn.values())) == tree.most_nodes
    if tree.widths:
        assert all(len(ids) == tree.widths[len(path)] for path, ids in drawn.items())


# What stays.


@RULES
def test_what_hangs_below_the_committed_tokens_stays_with_its_place_in_the_cache(rule: dict[str, Any]) -> None:
    draft = Draft(**rule).grow(12)
    tree = draft.tree
    cells = [tree.prefix(node) for node in tree.fed]
    first = tree.children(ROOT)[0]
    path = tree.prefix(tree.children(first)[0])
    prefixes = [tree.prefix(node) for node in range(len(tree))]
    keep = draft.commit(list(path))
    assert [cells[place] for place in keep[:2]] == [path[:1], path]
    assert [cells[place] for place in keep[2:]] == [(*path, *tree.prefix(node)) for node in tree.fed]
    below = [prefix[2:] for prefix in prefixes if prefix[:2] == path and len(prefix) > 2]
    assert [tree.prefix(node) for node in range(len(tree))][: len(below)] == below
    assert tree.is_root_fed and tree.committed_len == len(draft.committed)
    assert tree.probs[tree.children(ROOT)[0]] == pytest.approx(draft.shares.share(0), rel=0.2)  # as when it was made


@RULES
def test_what_was_not_guessed_begins_anew_behind_what_was(rule: dict[str, Any]) -> None:
    draft = Draft(**rule).grow(12)
    first = draft.tree.children(ROOT)[0]
    place = draft.tree.fed.index(first)
    unknown = next(i for i in range(VOCAB_SIZE) if i not in draft.ids_after(first))
    assert draft.commit([draft.tree.ids[first], unknown, 7]) == [place]
    assert not draft.tree.fed and not draft.tree.unsent and draft.tree.offers(4) == [(1.0, ROOT)]
    assert draft.tree.committed_len == len(draft.committed) and not draft.tree.is_root_fed


@RULES
def test_nodes_that_were_not_fed_become_roots_like_any_other(rule: dict[str, Any]) -> None:
    draft = Draft(**rule).grow(3, most=1)
    leaf = next(node for node in range(len(draft.tree)) if node not in draft.tree.fed)
    draft.commit(list(draft.tree.prefix(leaf)))
    assert draft.tree.offers(4) == [(1.0, ROOT)]
    draft.grow(1)
    assert draft.tree.children(ROOT)


@RULES
def test_the_root_has_all_the_guesses_of_one_that_nobody_foresaw(rule: dict[str, Any]) -> None:
    """A node has few when it is far from the root: those that it lacks are made when it comes near, and are sent."""
    draft = Draft(**rule).grow()
    node = ROOT
    for _ in range(6):
        node = draft.tree.children(node)[0]
    num_before = len(draft.tree.children(node))
    assert node in draft.tree.fed
    draft.tree.unsent = []
    draft.commit(list(draft.tree.prefix(node)))
    fresh = Draft(draft.committed, **rule)
    fresh.shares.first = draft.shares.first
    fresh.grow(1)
    children = draft.tree.children(ROOT)
    assert num_before < len(children) == len(fresh.tree.children(ROOT))
    assert set(children[num_before:]) <= set(draft.tree.unsent)
    if rule != REJECTION:  # there what is drawn is of another segment
        assert draft.ids_after(ROOT) == fresh.ids_after(ROOT)


@RULES
def test_lost_memory_begins_anew_with_the_same_proposal(rule: dict[str, Any]) -> None:
    draft = Draft(speculation=Speculation(4, 16), **rule).grow()
    before = draft.ids_after(ROOT), draft.chain()
    draft.tree.restart()
    assert not draft.tree.fed and not draft.tree.unsent
    draft.grow()
    assert (draft.ids_after(ROOT), draft.chain()) == before


def test_an_answer_may_come_true_for_ever() -> None:
    draft = Draft(max_tokens=2000, scale=0.1)  # each guess has a probability of a few per cent
    for _ in range(1200):  # more than Python's calls may nest, and than a float's exponent holds
        draft.grow(2, most=1)
        draft.commit(draft.ids_after(ROOT)[-1:])
    assert draft.grow(3).tree.children(ROOT)


# Segments.


def test_a_key_begins_the_segment_of_the_state_that_it_leads_to() -> None:
    draft = Draft(**REJECTION).grow()
    key = draft.key_of(ROOT)
    assert draft.law_of(key) in draft.tree.segments
    assert {start for _, start in draft.chain()} == {len(PROMPT)}
    draft.commit([draft.tree.ids[key]])
    assert draft.chain() and {start for _, start in draft.chain()} == {len(PROMPT) + 1}


def test_a_chain_goes_on_where_the_target_drew_the_same_without_having_looked_at_it() -> None:
    draft = Draft(**REJECTION).grow()
    before = draft.chain()
    draft.commit([before[0][0]])
    assert draft.chain() == before[1:]
    draft.grow()
    assert draft.chain()[: len(before) - 1] == before[1:] and len(draft.chain()) >= len(before)
    assert {start for _, start in draft.chain()} == {len(PROMPT)}


def test_a_chain_that_is_over_where_the_target_stands_is_followed_by_the_next() -> None:
    draft = Draft(speculation=Speculation(3, 3), **REJECTION).grow()
    ids = [token_id for token_id, _ in draft.chain()]
    assert len(ids) == 3
    cells = [draft.tree.ids[node] for node in draft.tree.fed]
    keep = draft.commit(ids)  # by plain steps
    assert [cells[place] for place in keep] == ids[:-1]  # the last one's logits are wanted again
    draft.grow()
    assert [start for _, start in draft.chain()] == [len(PROMPT) + 3] * 3


@settings(max_examples=60)
@given(
    num_drafts=st.integers(1, 5),
    steps=st.integers(1, 40),
    rounds=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=4),
    world=st.integers(0, 99),
)
def test_a_state_has_one_proposal_however_early_it_is_made(
    num_drafts: int, steps: int, rounds: list[tuple[int, int, int]], world: int
) -> None:
    """After rounds that accept some and draw a token, guessed or not: what a draft proposes that ran ahead is what one
    proposes that is told of it only now.
    """
    speculation = Speculation(num_drafts, num_drafts)
    ahead = Draft(speculation=speculation, world=world, **REJECTION).grow(steps)
    for num_accepted, guess, num_steps in rounds:
        ahead.grow(num_drafts + 1)
        node = ROOT
        for _ in range(min(num_accepted, num_drafts)):
            node = ahead.law_of(node)
        ids = list(ahead.tree.prefix(node))
        drawn = [ahead.tree.ids[child] for child in ahead.kinds_after(node, NodeKind.LAW)]
        keys = [ahead.tree.ids[child] for child in ahead.kinds_after(node, NodeKind.KEY)]
        ids.append(keys[guess] if guess < len(keys) else next(i for i in range(VOCAB_SIZE) if i not in drawn + keys))
        ahead.commit(ids)
        just_now = Draft(ahead.committed, speculation, world=world, **REJECTION)
        assert ahead.grow(num_drafts + 1).chain() == just_now.grow(num_drafts + 1).chain()
        assert len(ahead.chain()) == num_drafts
        ahead.grow(num_steps)


@pytest.mark.parametrize("shape", ["2x2x1", "3x1", "best:6x3"])
def test_a_state_has_one_tree_of_a_named_shape(shape: str) -> None:
    tree = TreeShape.parse(shape)
    speculation = Speculation(max_draft_tokens=tree.most_nodes, tree=tree)
    ahead = Draft(speculation=speculation, **REJECTION).grow()
    for _ in range(3):
        key = ahead.key_of(ahead.law_of(ROOT))
        ahead.commit(list(ahead.tree.prefix(key)))
        ahead.grow()
        assert ahead.drawn() == Draft(ahead.committed, speculation, **REJECTION).grow().drawn()


@settings(max_examples=30)
@given(
    worlds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    most=st.integers(1, 8),
    num=st.sampled_from([0, 4]),
)
def test_under_rejection_growth_knows_no_values(
    worlds: tuple[int, int], seeds: tuple[int, int], most: int, num: int
) -> None:
    """Two models that agree in nothing, drawn from with other numbers, feed the same places in the same order, and have
    the same nodes at each.
    """

    def places(world: int, seed: int) -> tuple[list[list[int]], list[tuple[list[int], NodeKind]]]:
        wish = Speculation(num, 16)
        draft = Draft(speculation=wish, world=world, **{**REJECTION, "seed": seed}).grow(most=most)
        tree = draft.tree
        nodes = [(_ranks(tree, node), tree.kinds[node]) for node in range(len(tree))]
        return [_ranks(tree, node) for node in draft.order], nodes

    assert places(worlds[0], seeds[0]) == places(worlds[1], seeds[1])


def test_drafts_of_one_answer_draw_with_numbers_of_their_own() -> None:
    """Else two of one model would say the same, and the second's draw would be tested as though it might be another."""
    drafts = [Draft(speculation=Speculation(3, 16, place=place), **REJECTION).grow(most=1) for place in range(4)]
    drawn = {tuple(draft.chain()) for draft in drafts}
    assert len(drawn) == len(drafts)


def _ranks(tree: GrowingTree, node: int) -> list[int]:
    return [tree.ranks[each] for each in tree.path(node)]


# Tables under rejection.


def test_a_table_without_a_choice_guesses_within_the_segment_that_goes_on() -> None:
    draft = Draft(**REJECTION)
    tree = draft.tree
    tree.feed(ROOT)
    one = RowLaw(VOCAB_SIZE, np.zeros(1, dtype=np.float32), np.array([9]))
    grow([NodeDistribution(tree, ROOT, draft.state, lambda row: one)])
    (guess,) = tree.children(ROOT)
    assert (tree.ids[guess], tree.kinds[guess]) == (9, NodeKind.GUESS)
    tree.feed(guess)
    grow([NodeDistribution(tree, guess, draft.state, draft.law)])
    assert tree.segments[draft.law_of(guess)][0] == tree.segments[guess][0] == len(PROMPT)
    assert tree.ended == [guess]  # what is guessed and what is drawn are not verified together
    before = draft.chain(guess)
    draft.commit([9])
    assert draft.chain() == before and before
