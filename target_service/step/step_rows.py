"""The proposals of a step as arrays, and the decision on each of them. Shared by the rules on the host and on a device.

A slot has a row of logits after its last committed token, and one after each node of its tree. The rows of all slots
lie one after the other, and so do their draws. Whatever the acceptance rule, a decision is a walk down the tree: if the
target's token after the last accepted node is one of that node's children, the child is accepted next; if not, the
token is the slot's next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.engine.sampling.noise import NoiseStream, host_slot_uniforms
from outrider.engine.sampling.reported import Reported
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.wire.requests.params import SamplingParams
from target_service.drafting.proposal import Proposal


@dataclass(frozen=True, slots=True)
class Decided:
    """The decision on one slot: the accepted draft tokens and the target's own token after them."""

    path: tuple[int, ...]
    """Accepted nodes, from the first to the deepest."""
    next_id: int
    """Id of the target's own token after the accepted ones. It is recovered if a draft token there was rejected, bonus
    if all were accepted, and plain if there were no draft tokens."""
    reported: Sequence[Reported] = ()
    """Log-probs of the accepted tokens and of the next one, if the request asks for logprobs; else empty."""

    @property
    def last(self) -> int:
        """Deepest accepted node, or ROOT if none is accepted."""
        return self.path[-1] if self.path else ROOT

    def rows(self, start: int) -> list[int]:
        """Return the indices of the rows of logits along the accepted path, [len(path) + 1]. start: index of the slot's
        first row.

            path (0, 2), start 5: [5, 6, 8]
        """
        return [start, *(start + 1 + node for node in self.path)]


def walk(tree: DraftTree, next_id: Callable[[int], int]) -> Decided:
    """Accept draft tokens along one path of the tree as long as they equal the target's tokens, and return the
    decision.

    next_id: function that returns the target's token after a node or ROOT; called only for ROOT and accepted nodes.
    """
    node = ROOT
    path = list[int]()
    while True:
        token_id = next_id(node)
        child = tree.child(node, token_id)
        if child is None:
            return Decided(tuple(path), token_id)
        path.append(child)
        node = child


class StepRows:
    """Rows and draws of B proposals, as arrays over all of them. A proposal's first row is after the last committed
    token, and row 1 + i after its node i; a row's position is that of the token that it predicts.

    proposals with parents [-1, 0, 0] and [], the last two nodes drawn after node 0, committed lengths 10 and 7:
    starts [0, 4, 5], positions [10, 11, 12, 12, 7], draw_starts [0, 2, 2], draw_rows [1, 1], draw_indices [0, 1]
    """

    def __init__(self, proposals: Sequence[Proposal]) -> None:
        self.starts = [0]
        """Index of each proposal's first row, [B + 1] for B proposals. The last entry is R, the number of all rows."""
        self.positions: list[int] = []
        """For each of the R rows, the position in its slot's sequence of the token that the row predicts, [R]."""
        self.draw_starts = [0]
        """Index of each proposal's first draw, [B + 1] for B proposals. The last entry is the number of all draws."""
        self.draw_rows: list[int] = []
        """For each draw, the row whose logits decide it: the row of the parent of the draw's node."""
        self.draw_indices: list[int] = []
        """For each draw, its index among the draws after the same node, from 0."""
        self.draw_ids: list[int] = []
        """Token id of each draw."""
        self.distributions: list[TokenDistribution | None] = []
        """For each draw, the distribution that it was drawn from. None = the distribution of the previous draw without
        that draw's token."""
        params = list[SamplingParams]()
        rounds = list[int]()
        positions = list[int]()
        for proposal in proposals:
            start = self.starts[-1]
            self.positions.append(len(proposal.slot.committed))
            for parent in proposal.tree.parents:
                self.positions.append(self.positions[start + 1 + parent] + 1)
            num_drawn: dict[int, int] = {}
            for draw in proposal.draws:
                parent = proposal.tree.parents[draw.node]
                place = num_drawn.get(parent, 0)
                num_drawn[parent] = place + 1
                self.draw_rows.append(start + 1 + parent)
                self.draw_indices.append(place)
                self.draw_ids.append(proposal.tree.ids[draw.node])
                self.distributions.append(draw.distribution)
                params.append(proposal.slot.params)
                rounds.append(self.positions[start])
                positions.append(self.positions[start + 1 + parent])
            self.starts.append(len(self.positions))
            self.draw_starts.append(len(self.draw_rows))
        self.uniforms: NDArray[np.float64] = np.empty(0)
        """For each draw, the uniform random number between 0 and 1 by which it is accepted or rejected. It depends on
        the request's seed, the committed length, the draw's position and its index there, but on no drawn token. Draws
        at equal depth with equal index share it: only one of their parents can be on the accepted path."""
        if params:
            places = None
            if any(self.draw_indices):
                places = self.draw_indices
            (self.uniforms,) = host_slot_uniforms(params, rounds, positions, [NoiseStream.ACCEPT], places)


def is_block(proposal: Proposal) -> bool:
    """Return whether a proposal is decided by block verification: its draft tokens are a chain of draws of one drafter,
    and acceptance is without lenience.

    Draft tokens of two drafters never count as a chain: whether their merged tree is one depends on the drawn tokens,
    which must not choose the way of deciding.
    """
    if len(proposal.drafted_by) > 1 or proposal.slot.params.lenience < 1.0 or not proposal.tree.is_chain:
        return False
    return bool(proposal.draws) and len(proposal.draws) == len(proposal.tree)
