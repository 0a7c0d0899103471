"""One slot's draft tree as it grows: what may follow the committed tokens, the likeliest first, without rounds. Pure.

A node is fed to learn what follows it; its children are made then. Which node is fed next, and how many children it
gets, goes by constants of rank and depth, never by what was drawn: under `rejection` nothing that is drawn may decide
what is verified. When tokens are committed, the node that stands for the last of them becomes the root and what is
below it stays, so that a draft token that was accepted has its own followers ready.

Under `rejection` a *segment* is a chain (or a tree of a named shape) of draft tokens whose numbers are keyed by the
committed length at which it begins. Beside it are keys: deterministic nodes that stand for what the target may draw
itself. Below a key another segment begins, which is what would be drawn after that token was committed: a state has one
proposal, however early it is made.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.draft_tree import ROOT, moved
from outrider.engine.speculation.drafter import NodeDistribution
from outrider.engine.speculation.drawing import add_children
from outrider.engine.speculation.growth import CheckCommit, Growth, GrowthSetup, NumberKey
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.plan import Place, Plan
from outrider.engine.speculation.ranks import LEAST_CHANCE
from outrider.engine.worker.jobs import JobError


class GrowingTree(Growth):
    """The tree of one slot."""

    def __init__(self, setup: GrowthSetup) -> None:
        self._setup = setup
        self._slot = setup.slot
        self.shares = setup.shares
        self.topk = setup.topk
        drafter = setup.drafter
        self.plan = Plan(setup.speculation, setup.slot.params, setup.shares, drafter.takes_trees, drafter.fills_blocks)
        self.segments: dict[int, tuple[int, Place]] = {}
        """Under `rejection`, by node or ROOT: the committed length at which the segment begins of what is drawn after
        it, and the ranks from there to the node."""
        self._is_determined = setup.slot.params.determined
        self.restart()

    def restart(self) -> None:
        super().__init__()  # without nodes; what is drawn after ROOT stays in its segment
        self.segments = moved(self.segments, {ROOT: ROOT})
        self.ranked: dict[int, list[int]] = {}
        """By node or ROOT: ids that may follow it, too, best first, and are no nodes yet. What is near the root gets
        more children than what is far from it."""
        self._begin_offers()

    def _begin_offers(self) -> None:
        self._offered: list[tuple[float, int]] = []
        """Nodes that are worth feeding, the likeliest first, with their negated acceptance probabilities."""
        self._named: list[int] = []
        """Unfed nodes after which the request names others: the target waits for those."""
        self.is_end_known = False
        self._last_depth = self._slot.max_len - 1 - self.committed_len
        """Depth of nodes that nothing may follow: the target adds a token of its own."""
        self._max_depth = min(
            self._last_depth, self.plan.max_depth, self._setup.drafter.max_depth, self._slot.most_depth
        )
        fed = {*self.fed, ROOT} if self.is_root_fed else set[int]()
        for node in range(ROOT, len(self)):
            if node not in fed:
                self._offer(node)

    @property
    def committed_len(self) -> int:
        return len(self._slot.committed)

    @property
    def is_awaited(self) -> bool:
        return bool(self._named)

    # what is fed next

    def offers(self, max_num: int) -> list[tuple[float, int]]:
        if self._named:  # the target waits for these, however unlikely they are
            return [(1.0, node) for node in self._named[:max_num]]
        num = min(max_num, max(0, self._setup.max_fed - len(self.fed)))
        return [(-cost, node) for cost, node in self._offered[:num]]

    def prob_ahead(self, node: int, num_ahead: int) -> float | None:
        """Return the acceptance probability of a node's first child's first child and so on, `num_ahead` below it; None
        where that would not be fed, were it made.
        """
        if not self._may_follow(node, num_ahead):
            return None
        if self._named:
            return 1.0 if self._num_named(node, num_ahead) else None
        prob = self.prob(node) * self.shares.chain_prob(num_ahead)
        return prob if self._is_likely(prob) and len(self.fed) < self._setup.max_fed else None

    def feed(self, node: int) -> None:
        super().feed(node)
        if node in self._named:
            self._named.remove(node)
        else:
            self._offered.remove((-self.prob(node), node))

    def _offer(self, node: int) -> None:
        """Have a node fed in its turn if a child of it is of use."""
        if not self._may_follow(node):
            return
        prob = self.prob(node)
        if self._num_named(node):
            self._named.append(node)
        elif node == ROOT or self._is_likely(prob):
            insort(self._offered, (-prob, node))

    def _may_follow(self, node: int, num_ahead: int = 0) -> bool:
        """Return whether a child of a node is of use, or of its first child's first child and so on."""
        if self.depth(node) + num_ahead >= self._max_depth:
            return False
        if self._setup.drafter.fills_blocks and node != ROOT and self.ranks[node] and not self._num_named(node):
            return False
        if self.plan.has_keys or num_ahead or self.kinds.get(node) is not NodeKind.LAW:
            return True
        return bool(self.number_keys(node))

    def _is_likely(self, prob: float) -> bool:
        return prob * self.shares.share(0) >= LEAST_CHANCE

    def _num_named(self, node: int, num_ahead: int = 0) -> int:
        """Return how many nodes the request names after a node, or after its first child's first child and so on."""
        if not self.plan.places:
            return 0
        ranks = [self.ranks[each] for each in self.path(node)]
        return self.plan.places.get((*ranks, *(0,) * num_ahead), 0)

    # what follows a node

    def number_keys(self, node: int) -> Sequence[NumberKey]:
        if self._is_determined:
            return ()
        start, place = self._segment(node)
        num_sampled = self.plan.places.get(place, 0) if self.plan.places else 1
        position, first = self.committed_len + self.depth(node), self.plan.first_candidate
        return [(self._slot.params, start, position, first + rank) for rank in range(num_sampled)]

    def _segment(self, node: int) -> tuple[int, Place]:
        """Return the segment of what is drawn after a node; a new one after a key, and where none goes on."""
        return self.segments.setdefault(node, (self.committed_len + self.depth(node), ()))

    def extend(self, distribution: NodeDistribution, numbers: Sequence[float]) -> None:
        add_children(self, distribution, numbers)
        node, children = distribution.node, self.children(distribution.node)
        is_guess = self.kinds.get(node) is NodeKind.GUESS
        if not children or (is_guess and self.kinds[children[0]] is NodeKind.LAW):
            self.ended.append(node)  # deterministic and sampled nodes do not mix
        elif self.depth(children[0]) >= self._last_depth:
            self.ended.append(children[0])

    def add_child(self, parent: int, token_id: int, kind: NodeKind, law: RowLaw | None = None) -> int:
        """Make the next child of a node and return it. law: what it was drawn from."""
        rank = len(self.children(parent))
        child = self.add(parent, token_id, prob=self.prob(parent) * self.shares.share(rank))
        self.kinds[child] = kind
        if law is not None:
            self.distributions[child] = law
        if not self._is_determined and kind is not NodeKind.KEY:
            start, place = self._segment(parent)
            self.segments[child] = start, (*place, rank)
        self.unsent.append(child)
        self._offer(child)
        return child

    def add_ranked(self, parent: int, ids: Sequence[int]) -> None:
        """Take what else may follow a node, best first, and make those children that are wanted."""
        self.ranked[parent] = list(ids)
        self._fill(parent)

    def _fill(self, node: int) -> None:
        """Make the children that are wanted now of those that are known."""
        ranked = self.ranked.get(node)
        if not ranked:
            return
        kind = NodeKind.GUESS if self._is_determined else NodeKind.KEY
        num_ranked = self.plan.num_ranked(self._num_named(node), self.prob(node))
        num_missing = max(0, num_ranked - len(self.children(node)))
        for token_id in ranked[:num_missing]:
            self.add_child(node, token_id, kind)
        del ranked[:num_missing]

    def finish_step(self) -> None:
        """End the tree, once, where all that the request names is grown: there may be fewer nodes than it names."""
        if self.plan.places and not self._named and not self.is_end_known:
            self.is_end_known = True
            self.ended.append(ROOT)

    # what is committed

    def check(self, base_len: int, decided: Sequence[int], check_commit: CheckCommit) -> JobError | None:
        return check_commit(self._slot, base_len, decided)

    def continues(self, base_len: int, decided: Sequence[int], *, is_new_lease: bool) -> bool:
        known = self._slot.committed[base_len:]
        return not is_new_lease and known == list(decided[: len(known)])

    def go_on(self, decided: Sequence[int]) -> list[int]:
        path = list[int]()
        node = ROOT
        for token_id in decided:
            children = self.children(node)
            ids = [self.ids[child] for child in children]
            ids += self.ranked.get(node, ())  # the likeliest that are no children: their ranks are learnt from, too
            rank = ids.index(token_id) if token_id in ids else None
            if children:
                self.shares.note(rank)
            if rank is None or rank >= len(children):
                break
            node = children[rank]
            path.append(node)
        goes_on = len(path) == len(decided) and self._goes_on(node)
        self._slot.commit_from(self.committed_len, decided)
        if goes_on:
            return self._grow_below(node)
        keep = self.keep(path[: len(decided) - 1])  # the logits after the last token are wanted again
        self.segments.clear()
        self.restart()
        return keep

    def _goes_on(self, node: int) -> bool:
        """Return whether what is below a node is of use once it is committed. Under `rejection` it is not where the
        segment that it belongs to is over: what follows is drawn anew. A chain outlives the step that verified its
        beginning, and goes on with its own numbers: the target's own token in place of a draft token is never that.
        """
        return self._is_determined or self.kinds[node] is NodeKind.KEY or bool(self.number_keys(node))

    def _grow_below(self, node: int) -> list[int]:
        """Go on below a node that is committed now. Return which of `fed` stay in the cache."""
        new_index = self.reroot(node) | {node: ROOT}
        self.ranked = moved(self.ranked, new_index)
        self.segments = moved(self.segments, new_index)
        keep = self.keep(range(len(self)))
        self._begin_offers()
        for each in (ROOT, *self.fed):
            self._fill(each)
        self.finish_step()
        return keep
