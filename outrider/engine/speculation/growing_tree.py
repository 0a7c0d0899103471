"""The draft tree of one slot of a draft worker, which grows without waiting for rounds, likeliest nodes first. Pure.

A node is fed to get the distribution after it, from which its children are made. Rank and depth choose which node is
fed next and how many children it gets, never a drawn token: under `rejection` no drawn token may influence what is
verified. When tokens are committed, the node of the last of them becomes the root and the nodes below it stay, so that
an accepted draft token has its children ready.

    committed: the cat.  sat -> down     a step commits sat:   committed: the cat sat.  down
                         ran                                   "ran" is dropped, "down" is ready
Under `rejection` a *segment* is a chain, or a tree of a requested shape, of draft tokens whose uniform numbers are
keyed by the committed length at which it begins. Besides it there are recovery nodes: tokens that the target may draw
itself. Below a recovery node another segment begins: the one that would be drawn once that token is committed. So the
draft tokens after given committed tokens are the same however early they are made.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.draft_tree import ROOT, remap
from outrider.engine.speculation.drawing import add_children
from outrider.engine.speculation.growth import CheckCommit, Growth, GrowthSetup, NumberKey
from outrider.engine.speculation.node_drafter import NodeDistribution
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.plan import PathRanks, TreePlan
from outrider.engine.speculation.ranks import MIN_PROB
from outrider.engine.worker.jobs import JobError


class GrowingTree(Growth):
    """Draft tree that grows in one slot of a draft worker. The worker feeds the nodes that `candidates` returns, and
    calls `commit_decided` when the target has committed tokens.
    """

    def __init__(self, setup: GrowthSetup) -> None:
        self._setup = setup
        self._slot = setup.slot
        self.acceptance = setup.acceptance
        self.topk = setup.topk
        drafter = setup.drafter
        self.plan = TreePlan(
            setup.speculation, setup.slot.params, setup.acceptance, drafter.supports_trees, drafter.is_block_drafter
        )
        self.segments: dict[int, tuple[int, PathRanks]] = {}
        """Under `rejection`: segments[node] is (start, ranks) for the tokens that are drawn after a node or ROOT. A
        segment is a run of drawn tokens whose random numbers are keyed by the committed length `start` at which it
        begins. ranks: ranks of the nodes on the path from the segment's beginning to this node."""
        self._is_determined = setup.slot.params.is_deterministic
        self.restart()

    def restart(self) -> None:
        super().__init__()  # without nodes; the tokens that are drawn after ROOT stay in its segment
        self.segments = remap(self.segments, {ROOT: ROOT})
        self.ranked: dict[int, list[int]] = {}
        """Maps a node or ROOT to ids that are not its children yet, best first. Its children's number grows with its
        acceptance probability, which rises when its ancestors are committed; the first of these ids are then added."""
        self._reset_candidates()

    def _reset_candidates(self) -> None:
        self._candidates: list[tuple[float, int]] = []
        """(negated acceptance probability, node) of nodes that are worth feeding, the likeliest first."""
        self._named: list[int] = []
        """Unfed nodes that must have children because the request fixes a number or a tree shape; the target waits for
        these."""
        self.is_end_known = False
        self._last_depth = self._slot.max_len - 1 - self.committed_len
        """Depth at which nodes have no children, since the target commits one token of its own after them."""
        self._max_depth = min(
            self._last_depth, self.plan.max_depth, self._setup.drafter.max_depth, self._slot.max_depth
        )
        fed = set[int]()
        if self.is_root_fed:
            fed.update(self.fed)
            fed.add(ROOT)
        for node in range(ROOT, len(self)):
            if node not in fed:
                self._add_candidate(node)

    @property
    def committed_len(self) -> int:
        return len(self._slot.committed)

    @property
    def is_awaited(self) -> bool:
        return bool(self._named)

    # what is fed next

    def candidates(self, max_num: int) -> list[tuple[float, int]]:
        if self._named:  # the target waits for these, however unlikely they are
            return [(1.0, node) for node in self._named[:max_num]]
        num = min(max_num, max(0, self._setup.max_fed - len(self.fed)))
        return [(-cost, node) for cost, node in self._candidates[:num]]

    def prob_ahead(self, node: int, num_ahead: int) -> float | None:
        """Return the acceptance probability of the descendant that is reached from `node` by going to the first child
        `num_ahead` times, whether it exists yet or not. Return None if that descendant would not be fed.
        """
        if not self._may_follow(node, num_ahead):
            return None
        if self._named:
            if not self._num_required(node, num_ahead):
                return None
            return 1.0
        prob = self.prob(node) * self.acceptance.chain_prob(num_ahead)
        if not self._is_likely(prob) or len(self.fed) >= self._setup.max_fed:
            return None
        return prob

    def feed(self, node: int) -> None:
        super().feed(node)
        if node in self._named:
            self._named.remove(node)
        else:
            self._candidates.remove((-self.prob(node), node))

    def _add_candidate(self, node: int) -> None:
        if not self._may_follow(node):
            return
        prob = self.prob(node)
        if self._num_required(node):
            self._named.append(node)
        elif node == ROOT or self._is_likely(prob):
            insort(self._candidates, (-prob, node))

    def _may_follow(self, node: int, num_ahead: int = 0) -> bool:
        """Return whether a child of the node `num_ahead` first children below a node would be of use."""
        if self.depth(node) + num_ahead >= self._max_depth:
            return False
        if self._setup.drafter.is_block_drafter and node != ROOT and self.ranks[node] and not self._num_required(node):
            return False
        if self.plan.has_recovery_nodes or num_ahead or self.kinds.get(node) is not NodeKind.SAMPLED:
            return True
        return bool(self.number_keys(node))

    def _is_likely(self, prob: float) -> bool:
        return prob * self.acceptance.prob(0) >= MIN_PROB

    def _num_required(self, node: int, num_ahead: int = 0) -> int:
        """Return the number of children that the request fixes for the node `num_ahead` first children below a node."""
        if not self.plan.num_children:
            return 0
        ranks = [self.ranks[ancestor] for ancestor in self.path(node)]
        ranks += [0] * num_ahead
        return self.plan.num_children.get(tuple(ranks), 0)

    # what follows a node

    def number_keys(self, node: int) -> Sequence[NumberKey]:
        if self._is_determined:
            return ()
        start, ranks = self._segment(node)
        num_sampled = 1
        if self.plan.num_children:
            num_sampled = self.plan.num_children.get(ranks, 0)
        position = self.committed_len + self.depth(node)
        first = self.plan.first_sample_index
        return [(self._slot.params, start, position, first + rank) for rank in range(num_sampled)]

    def _segment(self, node: int) -> tuple[int, PathRanks]:
        # of the tokens that are drawn after a node: a new one after a recovery node, and where none goes on
        return self.segments.setdefault(node, (self.committed_len + self.depth(node), ()))

    def extend(self, distribution: NodeDistribution, numbers: Sequence[float]) -> None:
        add_children(self, distribution, numbers)
        node, children = distribution.node, self.children(distribution.node)
        is_deterministic = self.kinds.get(node) is NodeKind.DETERMINISTIC
        if not children or (is_deterministic and self.kinds[children[0]] is NodeKind.SAMPLED):
            self.ended.append(node)  # deterministic and sampled nodes do not mix
        elif self.depth(children[0]) >= self._last_depth:
            self.ended.append(children[0])

    def add_child(
        self, parent: int, token_id: int, kind: NodeKind, distribution: TokenDistribution | None = None
    ) -> int:
        """Add the next child of a node or ROOT, and return it. distribution: what it was drawn from, if it was."""
        rank = len(self.children(parent))
        child = self.add(parent, token_id, prob=self.prob(parent) * self.acceptance.prob(rank))
        self.kinds[child] = kind
        if distribution is not None:
            self.distributions[child] = distribution
        if not self._is_determined and kind is not NodeKind.RECOVERY:
            start, ranks = self._segment(parent)
            self.segments[child] = start, (*ranks, rank)
        self.unsent.append(child)
        self._add_candidate(child)
        return child

    def add_ranked(self, parent: int, ids: Sequence[int]) -> None:
        """Store further ids that may follow a node, best first. Make children of the first of them: as many as the
        limits of the tree allow now.
        """
        self.ranked[parent] = list(ids)
        self._fill(parent)

    def _fill(self, node: int) -> None:
        ranked = self.ranked.get(node)
        if not ranked:
            return
        kind = NodeKind.RECOVERY
        if self._is_determined:
            kind = NodeKind.DETERMINISTIC
        num_ranked = self.plan.num_ranked(self._num_required(node), self.prob(node))
        num_missing = max(0, num_ranked - len(self.children(node)))
        for token_id in ranked[:num_missing]:
            self.add_child(node, token_id, kind)
        del ranked[:num_missing]

    def finish_step(self) -> None:
        """If the request fixes the tree's shape and none of its nodes has to be fed any more, add ROOT to `ended`,
        once, which tells the target that no more draft tokens come. The target cannot tell by counting, since the tree
        may have fewer nodes than the request fixes.
        """
        if self.plan.num_children and not self._named and not self.is_end_known:
            self.is_end_known = True
            self.ended.append(ROOT)

    # what is committed

    def check(self, base_len: int, decided: Sequence[int], check_commit: CheckCommit) -> JobError | None:
        return check_commit(self._slot, base_len, decided)

    def continues(self, base_len: int, decided: Sequence[int], *, is_new_lease: bool) -> bool:
        known = self._slot.committed[base_len:]
        return not is_new_lease and known == list(decided[: len(known)])

    def commit_decided(self, decided: Sequence[int]) -> list[int]:
        path = list[int]()
        node = ROOT
        for token_id in decided:
            children = self.children(node)
            rank = self._rank_of(node, token_id)
            if children:
                self.acceptance.note(rank)
            if rank is None or rank >= len(children):
                break
            node = children[rank]
            path.append(node)
        can_continue = len(path) == len(decided) and self._can_continue(node)
        self._slot.commit_from(self.committed_len, decided)
        if can_continue:
            return self._grow_below(node)
        keep = self.keep(path[: len(decided) - 1])  # the last token is fed again for the logits after it
        self.segments.clear()
        self.restart()
        return keep

    def _rank_of(self, node: int, token_id: int) -> int | None:
        ids = [self.ids[child] for child in self.children(node)]
        ids += self.ranked.get(node, ())  # ids that are no nodes yet have ranks, too
        if token_id not in ids:
            return None
        return ids.index(token_id)

    def _can_continue(self, node: int) -> bool:
        """Return whether the nodes below a node are of use once it is committed.

        Under `rejection` they are not if its segment is over, since the tokens after it are drawn anew. A chain
        outlives the step that verified its beginning, and goes on with its own numbers. The target's own token in place
        of a draft token is never a node of the segment.
        """
        return self._is_determined or self.kinds[node] is NodeKind.RECOVERY or bool(self.number_keys(node))

    def _grow_below(self, node: int) -> list[int]:
        new_index = self.reroot(node) | {node: ROOT}
        self.ranked = remap(self.ranked, new_index)
        self.segments = remap(self.segments, new_index)
        keep = self.keep(range(len(self)))
        self._reset_candidates()
        for parent in (ROOT, *self.fed):
            self._fill(parent)
        self.finish_step()
        return keep
