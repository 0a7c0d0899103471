"""How a draft's tree grows: what is fed next, what stays when tokens are committed, where it ends, and that under
`rejection` a state has one proposal, however early it was made.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drawing import grow
from outrider.engine.speculation.growing_tree import GrowingTree
from outrider.engine.speculation.node_drafter import NodeDistribution
from outrider.engine.speculation.nodes import NodeKind
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape
from tests.unit.outrider.engine.speculation.growing import COUPLED, PROMPT, REJECTION, RULES, VOCAB_SIZE, Draft

AUTO = Speculation(max_draft_tokens=16)


@RULES
@pytest.mark.parametrize("speculation", [AUTO, Speculation(3, 16)], ids=["auto", "K = 3"])
def test_what_a_block_did_not_begin_with_waits_for_the_next(rule: dict[str, Any], speculation: Speculation) -> None:
    draft = Draft(speculation=speculation, is_block_drafter=True, **rule).grow()
    tree = draft.tree
    assert any(tree.children(node) for node in range(len(tree)))
    for node in range(len(tree)):
        assert tree.kinds[node] is not NodeKind.RECOVERY
        assert not tree.children(node) or tree.ranks[node] == 0
    others = [node for node in tree.children(ROOT) if tree.ranks[node]]
    assert bool(others) == (tree.kinds[0] is NodeKind.DETERMINISTIC)
    ids = [tree.ids[node] for node in others[:1]] or [VOCAB_SIZE - 1]
    draft.commit(ids)
    assert not len(tree) and [node for _, node in tree.candidates(4)] == [ROOT]


def test_a_named_tree_of_a_block_is_whole() -> None:
    named = Speculation(tree=TreeShape.parse("2x2x2"), max_draft_tokens=16)
    tree = Draft(speculation=named, is_block_drafter=True).grow().tree
    within = [node for node in range(len(tree)) if tree.depth(node) <= 3 and max(_ranks(tree, node)) < 2]
    assert len(within) == 2 + 4 + 8


@RULES
def test_a_draft_token_that_was_too_unlikely_to_be_made_counts_when_it_is_committed(rule: dict[str, Any]) -> None:
    """Else its chance falls for good, because it is never made."""
    draft = Draft(**rule).grow(most=1)
    token_id = draft.tree.ranked[ROOT][0]
    rank = len(draft.tree.children(ROOT))
    before = draft.shares.prob(rank)
    draft.commit([token_id])
    assert rank > 0
    assert draft.shares.prob(rank) > before


@RULES
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6])
def test_the_length_limit_leaves_a_token_for_the_target(rule: dict[str, Any], max_tokens: int) -> None:
    tree = Draft(max_tokens=max_tokens, **rule).grow().tree
    nodes = range(len(tree))
    assert max(map(tree.depth, nodes), default=0) == max_tokens - 1


@RULES
def test_where_no_trees_are_run_it_is_a_chain(rule: dict[str, Any]) -> None:
    draft = Draft(supports_trees=False, **rule).grow()
    assert len(draft.order) > 4 and draft.tree.is_chain


@pytest.mark.parametrize("shape", ["4x2x1", "1x3", "best:12x4", "7x7"])
@pytest.mark.parametrize("rule", [{}, COUPLED], ids=["greedy", "coupled"])
def test_a_requested_tree_shape_is_whole_after_accepted_tokens_too(rule: dict[str, Any], shape: str) -> None:
    tree = TreeShape.parse(shape)
    draft = Draft(speculation=Speculation(max_draft_tokens=tree.max_nodes, tree=tree), **rule).grow()
    for hit in range(4):
        places = draft.tree.plan.num_children
        queue: list[tuple[tuple[int, ...], int]] = [((), ROOT)]
        num_nodes = 0
        for place, node in queue:
            children, named = draft.tree.children(node), places.get(place, 0)
            assert len(children) >= named, (hit, place)
            num_nodes += named
            queue += [((*place, draft.tree.ranks[child]), child) for child in children[:named]]
        assert num_nodes == tree.max_nodes
        children = draft.tree.children(ROOT)
        node = children[hit % len(children)]
        draft.commit([draft.tree.ids[node], *draft.ids_after(node)[:1]])
        draft.grow()


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
        drawn = [ahead.tree.ids[child] for child in ahead.kinds_after(node, NodeKind.SAMPLED)]
        keys = [ahead.tree.ids[child] for child in ahead.kinds_after(node, NodeKind.RECOVERY)]
        ids.append(keys[guess] if guess < len(keys) else next(i for i in range(VOCAB_SIZE) if i not in drawn + keys))
        ahead.commit(ids)
        just_now = Draft(ahead.committed, speculation, world=world, **REJECTION)
        assert ahead.grow(num_drafts + 1).chain() == just_now.grow(num_drafts + 1).chain()
        assert len(ahead.chain()) == num_drafts
        ahead.grow(num_steps)


@pytest.mark.parametrize("shape", ["2x2x1", "3x1", "best:6x3"])
def test_a_state_has_one_tree_of_a_named_shape(shape: str) -> None:
    tree = TreeShape.parse(shape)
    speculation = Speculation(max_draft_tokens=tree.max_nodes, tree=tree)
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
def test_under_rejection_growth_does_not_depend_on_values(
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


def _ranks(tree: GrowingTree, node: int) -> list[int]:
    return [tree.ranks[each] for each in tree.path(node)]


def test_a_table_without_a_choice_drafts_within_the_segment_that_continues() -> None:
    draft = Draft(**REJECTION)
    tree = draft.tree
    tree.feed(ROOT)
    one = TokenDistribution(VOCAB_SIZE, np.zeros(1, dtype=np.float32), np.array([9]))
    grow([NodeDistribution(tree, ROOT, draft.state, lambda row: one)])
    (guess,) = tree.children(ROOT)
    assert (tree.ids[guess], tree.kinds[guess]) == (9, NodeKind.DETERMINISTIC)
    tree.feed(guess)
    grow([NodeDistribution(tree, guess, draft.state, draft.law)])
    assert tree.segments[draft.law_of(guess)][0] == tree.segments[guess][0] == len(PROMPT)
    assert tree.ended == [guess]  # what is guessed and what is drawn are not verified together
    before = draft.chain(guess)
    draft.commit([9])
    assert draft.chain() == before and before
