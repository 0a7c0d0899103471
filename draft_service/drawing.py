"""Makes the children of nodes that were fed: guesses of what the target says, or draws from laws with guesses beside.

A law that will be sent cut is cut and renormalised *before* the draw: what the target gets is what was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from draft_service.tree import GrowingTree, Node
from outrider.engine.sampling.coupled import coupled_ranked
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.noise import Purpose, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.row_law import RowLaw, draw_place, exactly_best, truncate_topk
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.ranks import MAX_RANKS


@dataclass(frozen=True, slots=True)
class Fed:
    """A node that was fed, and what is known of the token after it."""

    tree: GrowingTree
    node: Node
    state: SamplingState
    law: Callable[[LogitRow], RowLaw | None]
    """What follows, under the request's parameters; None where nothing is known. Raises NonFiniteLogits."""
    best: Callable[[LogitRow, int], tuple[Sequence[int], Sequence[float]]] | None = None
    """The ids that follow most likely at temperature 0, and their probabilities; None: by the law."""


def of_logits(tree: GrowingTree, node: Node, state: SamplingState, host: HostLogits, index: int) -> Fed:
    """Return a node that a model was fed, the logits after which are row `index` of `host`."""
    return Fed(tree, node, state, lambda row: host.law(index, row), lambda row, num: host.ranked(index, row, num))


def uniforms(fed: Sequence[Fed]) -> list[list[float]]:
    """Return the numbers that each node's children are drawn with; all at once, for what a call costs."""
    counts = [0 if f.state.params.determined else f.tree.num_laws(f.node) for f in fed]
    if not any(counts):
        return [[] for _ in fed]
    drawn = [(f, rank) for f, count in zip(fed, counts, strict=True) for rank in range(count)]
    numbers: Iterator[float] = iter(
        host_slot_uniforms(
            [f.state.params for f, _ in drawn],
            [f.tree.segment_after(f.node).start for f, _ in drawn],
            [f.node.position + 1 for f, _ in drawn],
            [Purpose.DRAFT],
            [rank for _, rank in drawn],
        )[0].tolist()
    )
    return [[next(numbers) for _ in range(count)] for count in counts]


def make_children(fed: Fed, numbers: Sequence[float]) -> None:
    """Make the children of a node; none where nothing is known to follow. Raises NonFiniteLogits."""
    tree, node, params = fed.tree, fed.node, fed.state.params
    row = LogitRow(fed.state, tuple(node.path(tree.root)))
    most = tree.plan.most_ranked
    if params.greedy and fed.best is not None:
        tree.add_ranked(node, list(zip(*fed.best(row, most), strict=True)))
        return
    law = fed.law(row)
    if law is None:
        return
    if params.greedy:
        tree.add_ranked(node, [(law.id_of(0), 1.0)])
    elif params.determined:
        tree.add_ranked(node, list(zip(*coupled_ranked(law, params, node.position + 1, most), strict=True)))
    elif fed.best is None and law.scores.size == 1:  # a table that has no choice guesses
        tree.add(node, law.id_of(0), NodeKind.GUESS, 1.0)
    else:
        _draw(fed, law, numbers)


def _draw(fed: Fed, whole: RowLaw, numbers: Sequence[float]) -> None:
    """Draw children, one after the other without replacement, and guess beside them what the target may draw itself."""
    tree, node = fed.tree, fed.node
    topk = tree.segment_after(node).topk
    law = (whole if topk is None else truncate_topk(whole, topk)).normalised()
    weights = law.weights.copy()
    for u in numbers:
        if not weights.any():
            return
        place = draw_place(weights, u)
        weights[place] = 0.0
        token_id = law.id_of(place)
        tree.add(node, token_id, NodeKind.LAW, law.prob(token_id), law)
    left = weights.astype(np.float32)  # of what this rounds to 0 none is a guess
    num_keys = min(MAX_RANKS - len(numbers), int(np.count_nonzero(left)))
    if tree.plan.has_keys and num_keys > 0:
        places = exactly_best(left, num_keys)
        places = places[np.argsort(-weights[places], kind="stable")]
        tree.add_ranked(node, [(law.id_of(place), law.prob(law.id_of(place))) for place in places.tolist()])
