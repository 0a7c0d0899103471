"""Draft tokens for a beam search in the target. Draft workers deliver levels of beams of their own, below the live
beams.

A step that feeds one of these levels can decide one level more, if all beams that become live are among the fed nodes.
"""

from __future__ import annotations

from outrider.engine.speculation.beam import draft_shape
from outrider.engine.speculation.beam_tree import BeamTree
from outrider.engine.speculation.candidates import BudgetItem
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import MAX_BUFFERED_NODES, Delivery, InsertedNodes, NodeKind
from outrider.engine.speculation.ranks import SlotAcceptance
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation


class BeamDrafts:
    """Draft tokens of one beam search in the target: nodes of its tree below the live beams."""

    def __init__(self, tree: BeamTree, max_len: int, params: SamplingParams, speculation: Speculation) -> None:
        """Create the draft tokens of a search, none at first. `tree`: tree of the search. `max_len`: maximum length of
        a beam, in tokens, with the prompt.
        """
        self._tree = tree
        self._max_len = max_len
        self._width, self._max_depth = draft_shape(params, speculation)
        self.is_ended = False
        """Whether no more draft tokens will be delivered below the present live beams."""

    @property
    def max_depth(self) -> int:
        """Maximum number of levels of draft tokens that a step may feed. One level is left for the target, which adds
        it to those that it accepts.
        """
        return max(0, min(self._max_depth, self._max_len - self._tree.length - 1))

    @property
    def depth(self) -> int:
        """Number of levels of draft tokens below the live beams that a step may feed. Each of them has arrived with at
        least as many nodes as there are live beams.
        """
        return len(self._levels())

    def insert(self, delivery: Delivery) -> InsertedNodes:
        """Insert a delivery below the beams that were live when each beam had `delivery.root_len` tokens, prompt
        included. Return how many of the delivery's tokens were late or dropped.
        """
        tree = self._tree
        if len(tree.drafts()) + len(delivery.ids) > MAX_BUFFERED_NODES:
            return InsertedNodes(num_dropped=len(delivery.ids))
        node_of: dict[int, int | None] = {}
        for beam, active in enumerate(tree.active_at.get(delivery.root_len, ())):
            node_of[ROOT - beam] = active
        num_late = num_dropped = 0
        for index, (token_id, above, kind) in enumerate(
            zip(delivery.ids, delivery.parents, delivery.kinds, strict=True)
        ):
            parent = node_of.get(above)
            if parent is None:
                num_dropped += kind is not NodeKind.REFERENCE
                continue
            node = tree.child(parent, token_id)
            if tree.depth(parent) < tree.active_depth:
                num_late += node is not None and kind is NodeKind.DETERMINISTIC
            elif kind is NodeKind.DETERMINISTIC:
                node = tree.find_or_add(parent, token_id)
                tree.ranks[node] = delivery.ranks[index]
            node_of[index] = node
        self.is_ended |= bool(delivery.ends) and delivery.root_len == tree.length
        return InsertedNodes(num_late, num_dropped)

    def _levels(self) -> list[list[int]]:
        tree, levels = self._tree, list[list[int]]()
        above = tree.active
        while len(levels) < self.max_depth:
            below = list[int]()
            for node in above:
                below += tree.children(node)
            if len(below) < len(tree.active):
                break
            below.sort(key=tree.ranks.__getitem__)
            above = below[: self._width]
            levels.append(above)
        return levels

    def budget_items(self, acceptance: SlotAcceptance, max_drafts: int) -> list[BudgetItem]:
        """Return at most `max_drafts` draft tokens that the next step might feed, level by level.

        `acceptance`: of its probabilities, that of rank 0 is the probability that the target accepts a whole level.
        """
        budget_items = list[BudgetItem]()
        prob = 1.0
        for level in self._levels():
            prob *= acceptance.prob(0)
            for node in level:
                budget_items.append(BudgetItem(prob / len(level), ((0, node),)))
        return budget_items[: max(0, max_drafts)]

    def chosen(self, num_drafts: int) -> tuple[list[int], int]:
        """Return (nodes, number of levels): indices, in the search's tree, of the first `num_drafts` draft tokens below
        the live beams, level by level and best first.

        The last level is left out if it has fewer nodes than there are live beams.

            2 live beams, levels of 3 nodes, `num_drafts` 4: 3 nodes of one level, since 1 of the second is too few
        """
        nodes = list[int]()
        depth = 0
        for level in self._levels():
            taken = level[: max(0, num_drafts - len(nodes))]
            if len(taken) < len(self._tree.active):
                break
            nodes += taken
            depth += 1
        return nodes, depth

    def pending_prob(self, acceptance: SlotAcceptance) -> float | None:
        """Return the probability that the target accepts all levels that have arrived and one more; None if no more
        will arrive or could be fed.
        """
        depth = self.depth
        if depth >= self.max_depth or self.is_ended:
            return None
        return acceptance.chain_prob(depth + 1)

    def learn(self, acceptance: SlotAcceptance, depth: int, num_accepted: int) -> None:
        """Update `acceptance`, in which rank 0 stands for a whole level, after a step that fed `depth` levels of draft
        tokens and accepted `num_accepted` of these levels.
        """
        for _ in range(num_accepted):
            acceptance.note(0)
        if num_accepted < depth:
            acceptance.note(None)
        if not depth:
            acceptance.forget()
