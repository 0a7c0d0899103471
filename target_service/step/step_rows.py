"""The proposals of a step side by side, in arrays, and what is decided on each of them.

A slot has a row of logits after its last committed token, and one after each node of its tree. Rows of all slots lie
one after the other, and so do their draws. Whatever the rule, a slot's decision is a walk: what the target says after
the last accepted node is the next accepted one where it is a child of it, and the next token where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.engine.sampling.noise import Purpose, host_slot_uniforms
from outrider.engine.sampling.reported import Reported
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.draft_tree import ROOT, DraftTree
from outrider.wire.requests.params import SamplingParams
from target_service.drafting.proposal import Proposal


@dataclass(frozen=True, slots=True)
class Decided:
    """The decision on one slot."""

    path: tuple[int, ...]
    """Accepted nodes, from the first to the deepest."""
    next_id: int
    """The target's own token: recovered where draft tokens follow the path, else bonus, or plain."""
    reported: Sequence[Reported] = ()
    """Log-probs of the accepted tokens and of the next one, when the request asks for them."""

    @property
    def last(self) -> int:
        """Return the last accepted node, or ROOT."""
        return self.path[-1] if self.path else ROOT


def walk(tree: DraftTree, next_id: Callable[[int], int]) -> Decided:
    """Accept draft tokens as far as they are what the target says.

    next_id(node): the target's token after a node or ROOT, computed along one path alone.
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
    """Rows and draws of B proposals."""

    def __init__(self, proposals: Sequence[Proposal]) -> None:
        self.starts = [0]
        """First row of each proposal, and the number of all rows R, [B + 1]."""
        self.positions: list[int] = []
        """Position in its slot's sequence of the token that each row decides, [R]."""
        self.draw_starts = [0]
        """First draw of each proposal, and the number of all draws D, [B + 1]."""
        self.draw_rows: list[int] = []
        """Row of the node that each draw follows, [D]."""
        self.draw_places: list[int] = []
        """Place of each draw among those after its node, [D]."""
        self.draw_ids: list[int] = []
        """[D]."""
        self.distributions: list[RowLaw | None] = []
        """What each was drawn from; None: what is left of that of the draw before it, [D]."""
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
                self.draw_places.append(place)
                self.draw_ids.append(proposal.tree.ids[draw.node])
                self.distributions.append(draw.distribution)
                params.append(proposal.slot.params)
                rounds.append(self.positions[start])
                positions.append(self.positions[start + 1 + parent])
            self.starts.append(len(self.positions))
            self.draw_starts.append(len(self.draw_rows))
        self.uniforms: NDArray[np.float64] = np.empty(0)
        """Number by which each draw is accepted: that of its position and place, independent of all draws and of those
        of earlier rounds. Only one node of a depth is ever walked to, so that all of equal depth share theirs. [D]."""
        if params:
            places = self.draw_places if any(self.draw_places) else None
            (self.uniforms,) = host_slot_uniforms(params, rounds, positions, [Purpose.ACCEPT], places)


def is_block(proposal: Proposal) -> bool:
    """Return whether a proposal is a chain that one drafter drew as a whole, and exactness is asked for.

    Whether the draft tokens of two drafters make a chain follows from what was drawn, which must not choose the rule.
    """
    if len(proposal.drafted_by) > 1 or proposal.slot.params.lenience < 1.0 or not proposal.tree.is_chain:
        return False
    return bool(proposal.draws) and len(proposal.draws) == len(proposal.tree)
