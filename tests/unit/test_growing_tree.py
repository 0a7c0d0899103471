"""How a draft's tree grows: what is fed next, what stays when tokens are committed, where it ends, and that under
`rejection` a state has one proposal, however early it was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampling.coupled import coupled_ranked
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.drafter import Said
from outrider.engine.speculation.drawing import grow
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.ranks import MAX_RANKS, RankShares, SlotShares
from outrider.engine.speculation.tree import LEAST_CHANCE, MAX_DEPTH, MAX_FED, GrowingTree, Node, Plan
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.params import SamplingParams
from outrider.wire.speculation import Speculation
from outrider.wire.tree_shape import TreeShape

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
        scale: float = 2.0,
        world: int = 0,
        max_tokens: int = MAX_TOKENS,
        vocab_size: int = VOCAB_SIZE,
        most_fed: int = MAX_FED,
        **options: Any,
    ) -> None:
        self.params = SamplingParams(**{"temperature": 0.0, "seed": 5, "max_tokens": max_tokens, **options})
        self.committed, self.scale, self.world = list(committed), scale, world
        self.vocab_size = vocab_size
        self.state = SamplingState(self.params, PROMPT, [])
        self.shares = SlotShares(RankShares())
        plan = Plan(speculation, self.params, self.shares, takes_trees, None, most_fed=most_fed)
        self.tree = GrowingTree(self.committed, len(PROMPT) + max_tokens, self.params, plan)
        self.order: list[Node] = []

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
            assert not grow([Said(self.tree, node, self.state, self.law, self.best) for _, node in offers])
        return self

    def commit(self, ids: Sequence[int]) -> list[int]:
        self.committed += ids
        return self.tree.advance(ids)

    def all_nodes(self) -> list[Node]:
        found, queue = list[Node](), [self.tree.root]
        for node in queue:
            found += node.children
            queue += node.children
        return found

    def chain(self) -> list[tuple[int, int]]:
        return self.chain_below(self.tree.root)

    def chain_below(self, node: Node) -> list[tuple[int, int]]:
        """The LAW nodes in a row: ids and where their segment began."""
        found = list[tuple[int, int]]()
        while drawn := [child for child in node.children if child.kind is NodeKind.LAW]:
            node = drawn[0]
            assert node.segment is not None
            found.append((node.token_id, node.segment.start))
        return found

    def drawn(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """By path of ids: which LAW nodes follow, all within the root's segment."""
        queue, found = [self.tree.root], dict[tuple[int, ...], tuple[int, ...]]()
        for node in queue:
            laws = [child for child in node.children if child.kind is NodeKind.LAW]
            if laws:
                found[tuple(node.path(self.tree.root))] = tuple(child.token_id for child in laws)
            queue += laws
        return found


REJECTION: dict[str, Any] = {"temperature": 1.0}
COUPLED: dict[str, Any] = {"temperature": 1.0, "acceptance": AcceptanceRule.COUPLED}
RULES = pytest.mark.parametrize("rule", [{}, COUPLED, REJECTION], ids=["greedy", "coupled", "rejection"])


def key_of(node: Node) -> Node:
    return next(child for child in node.children if child.kind is NodeKind.KEY)


def law_of(node: Node) -> Node:
    return next(child for child in node.children if child.kind is NodeKind.LAW)


# What grows.


@RULES
def test_a_guess_that_was_too_unlikely_to_be_made_counts_when_it_comes(rule: dict[str, Any]) -> None:
    """Else its chance falls for good, because it is never made."""
    draft = Draft(**rule).grow(most=1)
    node = draft.tree.root
    token_id, _ = node.ranked[0]
    rank, before = len(node.children), draft.shares.share(len(node.children))
    draft.commit([token_id])
    assert rank > 0
    assert draft.shares.share(rank) > before


@RULES
def test_the_likeliest_is_fed_first_and_whatever_is_fed_has_a_follower(rule: dict[str, Any]) -> None:
    draft = Draft(**rule).grow(most=1)
    chances = [node.chance for node in draft.order]
    assert chances == sorted(chances, reverse=True)
    assert all(node.children for node in draft.order)
    assert 20 < len(draft.tree.fed) <= MAX_FED
    assert max(draft.tree.depth(node) for node in draft.all_nodes()) <= MAX_DEPTH
    drawn_or_likely = (node.chance >= LEAST_CHANCE or node.kind is NodeKind.LAW for node in draft.all_nodes())
    assert all(drawn_or_likely)


def test_a_tree_of_large_laws_is_bounded_by_their_bytes_except_for_what_is_named() -> None:
    assert len(Draft(most_fed=6, temperature=1.0).grow().tree.fed) == 6
    named = Draft(speculation=Speculation(num_draft_tokens=9, max_draft_tokens=16), most_fed=6, temperature=1.0).grow()
    assert not named.tree.awaits_named
    assert len(named.tree.fed) == 8  # the ninth has nothing named after it


@RULES
def test_siblings_are_told_apart_by_rank_and_differ(rule: dict[str, Any]) -> None:
    for node in Draft(**rule).grow().order:
        assert [child.rank for child in node.children] == list(range(len(node.children)))
        assert len({child.token_id for child in node.children}) == len(node.children)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 5 * VOCAB_SIZE])
@pytest.mark.parametrize("scale", [40.0, 4000.0])
def test_keys_are_other_ids_than_what_was_drawn_however_little_is_left(vocab_size: int, scale: float) -> None:
    """Next to a likely token all the others together may be less than a float32 holds, or nothing."""
    draft = Draft(**REJECTION, scale=scale, vocab_size=vocab_size).grow()
    for node in draft.order:
        left = draft.law(LogitRow(draft.state, tuple(node.path(draft.tree.root)))).without(law_of(node).token_id)
        keys = [child.token_id for child in node.children if child.kind is NodeKind.KEY]
        assert len(set(keys)) == len(keys) and all(left.prob(key) > 0 for key in keys)


def test_keys_come_in_the_order_of_the_targets_noise() -> None:
    """By the law without what is drawn there, as the target will draw if its law is like the draft's."""
    draft = Draft(**REJECTION).grow()
    num_reordered = 0
    for node in draft.order:
        drawn = law_of(node)
        assert drawn.law is not None
        keys = [child.token_id for child in node.children if child.kind is NodeKind.KEY]
        left = drawn.law.without(drawn.token_id)
        ranked, _ = coupled_ranked(left, draft.params, node.position + 1, MAX_RANKS - 1)
        assert keys == ranked[: len(keys)]
        num_reordered += keys != [int(i) for i in np.argsort(-left.probs(), kind="stable")[: len(keys)]]
    assert num_reordered > 10


@RULES
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6])
def test_the_target_has_room_for_a_token_of_its_own(rule: dict[str, Any], max_tokens: int) -> None:
    draft = Draft(max_tokens=max_tokens, **rule).grow()
    assert max((node.position for node in draft.all_nodes()), default=2) == len(PROMPT) + max_tokens - 2
    ends = [node for node in draft.all_nodes() if draft.tree.is_end(node)]
    assert ends == [node for node in draft.all_nodes() if node.position == len(PROMPT) + max_tokens - 2]


@RULES
def test_where_no_trees_are_run_it_is_a_chain(rule: dict[str, Any]) -> None:
    draft = Draft(takes_trees=False, **rule).grow()
    assert len(draft.order) > 4 and all(len(node.children) == 1 for node in draft.order)


@RULES
def test_in_turns_nothing_is_made_past_the_next_step(rule: dict[str, Any]) -> None:
    draft = Draft(speculation=Speculation(5, 5, sequential=True), **rule).grow()
    kinds = {node.kind for node in draft.all_nodes()}
    assert kinds == {NodeKind.LAW if rule == REJECTION else NodeKind.GUESS}
    assert len(draft.all_nodes()) == 5 == max(map(draft.tree.depth, draft.all_nodes()))
    assert not draft.tree.offers(4)


@RULES
def test_nothing_is_made_where_every_step_is_plain(rule: dict[str, Any]) -> None:
    assert not Draft(speculation=Speculation(), **rule).tree.offers(4)


# Named drafts.


@RULES
@pytest.mark.parametrize("num", [1, 5, 20])
def test_a_named_number_is_made_however_unlikely_and_first(rule: dict[str, Any], num: int) -> None:
    draft = Draft(speculation=Speculation(num, 64), **rule).grow(most=1)
    trunk = [node for node in draft.order[:num] if not any(node.path(draft.tree.root)) or node.rank == 0]
    assert [draft.tree.depth(node) for node in trunk] == list(range(num))


@pytest.mark.parametrize("shape", ["4x2x1", "1x3", "best:12x4", "7x7"])
@pytest.mark.parametrize("rule", [{}, COUPLED], ids=["greedy", "coupled"])
def test_a_named_tree_of_guesses_is_whole_after_hits_too(rule: dict[str, Any], shape: str) -> None:
    tree = TreeShape.parse(shape)
    draft = Draft(speculation=Speculation(max_draft_tokens=tree.most_nodes, tree=tree), **rule).grow()
    for hit in range(4):
        places = draft.tree.plan.places
        queue: list[tuple[tuple[int, ...], Node]] = [((), draft.tree.root)]
        num_nodes = 0
        for place, node in queue:
            named = places.get(place, 0)
            assert len(node.children) >= named, (hit, place)
            num_nodes += named
            queue += [((*place, child.rank), child) for child in node.children[:named]]
        assert num_nodes == tree.most_nodes
        node = draft.tree.root.children[hit % len(draft.tree.root.children)]
        draft.commit([node.token_id, node.children[0].token_id] if node.children else [node.token_id])
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
    cells = list(draft.tree.fed)
    first = draft.tree.root.children[0]
    second = first.children[0]
    below = {id(node) for node in draft.all_nodes() if second.token_id in node.path(draft.tree.root)[1:2]} - {
        id(second)
    }
    keep = draft.commit([first.token_id, second.token_id])
    assert [cells[place] for place in keep[:2]] == [first, second]
    assert [cells[place] for place in keep[2:]] == draft.tree.fed
    assert {id(node) for node in draft.tree.fed} <= below
    assert draft.tree.root is second and draft.tree.committed_len == len(draft.committed)
    assert second.children[0].chance == pytest.approx(draft.shares.share(0), rel=0.2)  # as of when it was made


@RULES
def test_what_was_not_guessed_begins_anew_behind_what_was(rule: dict[str, Any]) -> None:
    draft = Draft(**rule).grow(12)
    cells, first = list(draft.tree.fed), draft.tree.root.children[0]
    unknown = next(i for i in range(VOCAB_SIZE) if i not in [child.token_id for child in first.children])
    keep = draft.commit([first.token_id, unknown, 7])
    assert [cells[place] for place in keep] == [first]
    assert not draft.tree.fed and not draft.tree.unsent and draft.tree.offers(4) == [(1.0, draft.tree.root)]
    assert draft.tree.root.position == len(draft.committed) - 1 and not draft.tree.root.is_fed


@RULES
def test_nodes_that_were_not_fed_become_roots_like_any_other(rule: dict[str, Any]) -> None:
    draft = Draft(**rule).grow(3, most=1)
    leaf = next(node for node in draft.all_nodes() if not node.is_fed)
    assert draft.commit(leaf.path(draft.tree.root)) is not None
    assert draft.tree.offers(4) == [(1.0, draft.tree.root)]
    draft.grow(1)
    assert draft.tree.root.children


@RULES
def test_the_root_has_all_the_guesses_of_one_that_nobody_foresaw(rule: dict[str, Any]) -> None:
    """A node has few when it is far from the root: those that it lacks are made when it comes near, and are sent."""
    draft = Draft(**rule).grow()
    path, node = list[int](), draft.tree.root
    for _ in range(6):
        node = node.children[0]
        path.append(node.token_id)
    num_before = len(node.children)
    assert node.is_fed
    draft.tree.unsent = []
    draft.commit(path)
    fresh = Draft(draft.committed, **rule)
    fresh.shares.first = draft.shares.first
    fresh.grow(1)
    assert num_before < len(node.children) == len(fresh.tree.root.children)
    assert set(map(id, node.children[num_before:])) <= set(map(id, draft.tree.unsent))
    if rule != REJECTION:  # there what is drawn is of another segment
        assert [n.token_id for n in node.children] == [n.token_id for n in fresh.tree.root.children]


@RULES
def test_lost_memory_begins_anew_with_the_same_proposal(rule: dict[str, Any]) -> None:
    draft = Draft(speculation=Speculation(4, 16), **rule).grow()
    before = [node.token_id for node in draft.tree.root.children], draft.chain()
    draft.tree.restart()
    assert not draft.tree.fed and not draft.tree.unsent
    draft.grow()
    assert ([node.token_id for node in draft.tree.root.children], draft.chain()) == before


def test_an_answer_may_come_true_for_ever() -> None:
    draft = Draft(max_tokens=2000, scale=0.1)  # each guess has a probability of a few per cent
    for _ in range(1200):  # more than Python's calls may nest, and than a float's exponent holds
        draft.grow(2, most=1)
        draft.commit([draft.tree.root.children[-1].token_id])
    assert draft.tree.root.chance == 1.0 and draft.grow(3).tree.root.children


# Segments.


def test_a_key_begins_the_segment_of_the_state_that_it_leads_to() -> None:
    draft = Draft(**REJECTION).grow()
    key = key_of(draft.tree.root)
    assert law_of(key).segment is not None
    assert {start for _, start in draft.chain()} == {len(PROMPT)}
    draft.commit([key.token_id])
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
    cells = list(draft.tree.fed)
    keep = draft.commit(ids)  # by plain steps
    assert [cells[place].token_id for place in keep] == ids[:-1]  # the last one's logits are wanted again
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
        node, ids = ahead.tree.root, list[int]()
        for _ in range(min(num_accepted, num_drafts)):
            node = law_of(node)
            ids.append(node.token_id)
        drawn = [child.token_id for child in node.children if child.kind is NodeKind.LAW]
        keys = [child.token_id for child in node.children if child.kind is NodeKind.KEY]
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
        key = key_of(law_of(ahead.tree.root))
        ahead.commit(key.path(ahead.tree.root))
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
        return [_ranks(node) for node in draft.order], [(_ranks(node), node.kind) for node in draft.all_nodes()]

    assert places(worlds[0], seeds[0]) == places(worlds[1], seeds[1])


def test_drafts_of_one_answer_draw_with_numbers_of_their_own() -> None:
    """Else two of one model would say the same, and the second's draw would be tested as though it might be another."""
    drafts = [Draft(speculation=Speculation(3, 16, place=place), **REJECTION).grow(most=1) for place in range(4)]
    drawn = {tuple(node.token_id for node in draft.all_nodes() if node.kind is NodeKind.LAW) for draft in drafts}
    assert len(drawn) == len(drafts)


def _ranks(node: Node) -> list[int]:
    return [] if node.parent is None else [*_ranks(node.parent), node.rank]


# Tables under rejection.


def test_a_table_without_a_choice_guesses_within_the_segment_that_goes_on() -> None:
    draft = Draft(**REJECTION)
    draft.tree.feed(draft.tree.root)
    one = RowLaw(VOCAB_SIZE, np.zeros(1, dtype=np.float32), np.array([9]))
    grow([Said(draft.tree, draft.tree.root, draft.state, lambda row: one)])
    (guess,) = draft.tree.root.children
    assert (guess.token_id, guess.kind) == (9, NodeKind.GUESS)
    draft.tree.feed(guess)
    grow([Said(draft.tree, guess, draft.state, draft.law)])
    assert law_of(guess).segment == guess.segment and draft.tree.segment_after(guess).start == len(PROMPT)
    assert draft.tree.ended == [guess]  # what is guessed and what is drawn are not verified together
    before = draft.chain_below(guess)
    draft.commit([9])
    assert draft.chain() == before and before
