"""Makes the children of nodes from what a drafter says: guesses of what the target says, or draws from laws with
guesses beside. Written once, for every drafter, in the draft worker and in the target.

A law that will be sent cut is cut and renormalised *before* the draw: what the target gets is what was drawn from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from outrider.engine.sampling.coupled import coupled_ranked, uniforms
from outrider.engine.sampling.noise import host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits
from outrider.engine.sampling.row_law import RowLaw, Weights, draw_place, exactly_best, truncate_topk
from outrider.engine.speculation.drafter import Said
from outrider.engine.speculation.growing_beams import GrowingBeams
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.ranks import MAX_RANKS
from outrider.engine.speculation.tree import GrowingTree, Node

NUM_LIKELY = 64
"""Ids of a law among which the target's noise looks for what it may pick. Doubling it doubles the numbers made for each
node, and finds what the draft thinks has a chance of a hundredth or less."""


def grow(said: Sequence[Said]) -> list[tuple[GrowingTree, str]]:
    """Make the children of these nodes; none where nothing is known to follow. Return the trees that cannot go on, for
    NaN or infinity in their logits, and why.
    """
    failed: dict[int, tuple[GrowingTree, str]] = {}
    for each, numbers in zip(said, _uniforms(said), strict=True):
        tree = each.tree
        if id(tree) in failed:
            continue
        try:
            _make_children(each, numbers)
        except NonFiniteLogits as error:
            failed[id(tree)] = (tree, error.message)
            continue
        tree.ended.extend(_ends(each))
    for tree in {id(each.tree): each.tree for each in said}.values():
        tree.note_grown()
    return list(failed.values())


def grow_beams(said: Sequence[Said]) -> list[tuple[GrowingBeams, str]]:
    """Do as `grow` for nodes of searches: levels are made once all of the one above is known."""
    failed: dict[int, tuple[GrowingBeams, str]] = {}
    for each in said:
        tree = each.tree
        assert isinstance(tree, GrowingBeams) and each.best is not None, "a model drafts for a search"
        try:
            tree.learn(each.node, *each.best(LogitRow(each.state, ()), tree.num_wanted))
        except NonFiniteLogits as error:
            failed[id(tree)] = (tree, error.message)
    for tree in {id(each.tree): each.tree for each in said}.values():
        if id(tree) not in failed:
            tree.grow()
    return list(failed.values())


def _uniforms(said: Sequence[Said]) -> list[list[float]]:
    """Return the numbers that each node's children are drawn with; all at once, for what a call costs."""
    counts = [0 if s.state.params.determined else s.tree.num_laws(s.node) for s in said]
    if not any(counts):
        return [[] for _ in said]
    drawn = [(s, rank) for s, count in zip(said, counts, strict=True) for rank in range(count)]
    numbers: Iterator[float] = iter(
        host_slot_uniforms(
            [s.state.params for s, _ in drawn],
            [s.tree.segment_after(s.node).start for s, _ in drawn],
            [s.node.position + 1 for s, _ in drawn],
            [drawn[0][0].tree.plan.purpose],
            [s.tree.plan.first_candidate + rank for s, rank in drawn],
        )[0].tolist()
    )
    return [[next(numbers) for _ in range(count)] for count in counts]


def _make_children(said: Said, numbers: Sequence[float]) -> None:
    """Raises NonFiniteLogits."""
    tree, node, params = said.tree, said.node, said.state.params
    row = LogitRow(said.state, tuple(node.path(tree.root)))
    if said.state.failure(row.draft_prefix) is not None:
        return  # here the target ends the answer
    most = tree.plan.most_ranked
    if params.greedy and said.best is not None:
        tree.add_ranked(node, list(zip(*said.best(row, most), strict=True)))
        return
    law = said.law(row)
    if law is None:
        return
    if params.greedy:
        tree.add_ranked(node, [(law.id_of(0), 1.0)])
    elif params.determined:
        tree.add_ranked(node, list(zip(*coupled_ranked(law, params, node.position + 1, most), strict=True)))
    elif said.best is None and law.scores.size == 1:  # a table that has no choice guesses
        tree.add(node, law.id_of(0), NodeKind.GUESS)
    else:
        _draw(said, law, numbers)


def _draw(said: Said, whole: RowLaw, numbers: Sequence[float]) -> None:
    """Draw children, one after the other without replacement, and guess beside them what the target may draw itself."""
    tree, node = said.tree, said.node
    topk = tree.segment_after(node).topk
    law = (whole if topk is None else truncate_topk(whole, topk)).normalised()
    weights = law.weights.copy()
    for u in numbers:
        if not weights.any():
            return
        place = draw_place(weights, u)
        weights[place] = 0.0
        token_id = law.id_of(place)
        tree.add(node, token_id, NodeKind.LAW, law)
    num_keys = min(MAX_RANKS - len(numbers), int(np.count_nonzero(weights)))
    if tree.plan.has_keys and num_keys > 0:
        tree.add_ranked(node, _keys(said, law, weights, num_keys))


def _keys(said: Said, law: RowLaw, weights: Weights, num: int) -> list[tuple[int, float]]:
    """Return the ids that the target most likely draws after a node, were its law the draft's without what is drawn
    there: by the numbers that it will draw with. They order the ids of this place and decide nothing else.
    """
    likely = np.flatnonzero(weights)
    if likely.size > NUM_LIKELY:
        likely = likely[exactly_best(law.scores[likely], NUM_LIKELY)]
    ids = likely if law.ids is None else law.ids[likely]
    u = uniforms(said.state.params, said.node.position + 1, ids)
    order = np.argsort(np.log(-np.log(u)) - law.scores[likely])[:num]  # the largest score + Gumbel first
    return list(zip(ids[order].tolist(), weights[likely[order]].tolist(), strict=True))


def _ends(said: Said) -> Sequence[Node]:
    """Return the nodes that the target is not to wait for more after, now that a node's children are made."""
    if not said.node.children:
        return [said.node]
    first, is_guess = said.node.children[0], said.node is not said.tree.root and said.node.kind is NodeKind.GUESS
    if is_guess and first.kind is NodeKind.LAW:  # what is guessed and what is drawn do not mix
        return [said.node]
    return [first] if said.tree.is_end(first) else []
