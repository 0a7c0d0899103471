"""One slot's draft tree as it grows: what may follow the committed tokens, the likeliest first, without rounds. Pure.

A node is fed to learn what follows it; its children are made then. Which node is fed next, and how many children it
gets, goes by constants of rank and depth, never by what was drawn: under `rejection` nothing that is drawn may decide
what is verified. When tokens are committed, the node that stands for the last of them becomes the root and what hangs
below it stays, so that a guess that came true has its own followers ready.

Under `rejection` a *segment* is a chain (or a tree of a named shape) of drafts whose numbers are keyed by the committed
length at which it begins. Beside it hang keys: guesses of what the target may draw itself. Below a key another segment
begins, which is what would be drawn after that token was committed: a state has one proposal, however early it is made.
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
from outrider.engine.speculation.plan import LEAST_CHANCE, Place, Plan
from outrider.engine.worker.jobs import JobError


class GrowingTree(Growth):
    """The tree of one slot."""

    def __init__(self, setup: GrowthSetup) -> None:
        self._setup = setup
        self._slot = setup.slot
        self.shares = setup.shares
        self.topk = setup.topk
        self.plan = Plan(setup.speculation, setup.slot.params, setup.shares, setup.drafter.takes_trees)
        self.segments: dict[int, tuple[int, Place]] = {}
        """Under `rejection`, by node or ROOT: the committed length at which the segment begins of what is drawn after
        it, and the ranks from there to the node."""
        self._is_determined = setup.slot.params.determined
        self.restart()

    def restart(self) -> None:
        super().__init__()  # without nodes; what is drawn after ROOT stays in its segment
        self.segments = {node: segment for node, segment in self.segments.items() if node == ROOT}
        self.ranked: dict[int, list[tuple[int, float]]] = {}
        """By node or ROOT: guesses of what else follows, best first, that are no nodes yet. What is near the root gets
        more children than what is far from it."""
        self._begin_offers()

    def _begin_offers(self) -> None:
        self._offered: list[tuple[float, int]] = []
        """Nodes that are worth feeding, the likeliest first, with their negated acceptance probabilities."""
        self._named: list[int] = []
        """Unfed nodes after which the request names others: the target waits for those."""
        self.is_end_known = False
        bounds = (self.plan.max_depth, self._setup.drafter.max_depth, self._slot.most_depth)
        self._max_depth = min(bound for bound in bounds if bound is not None)
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
            return 1.0 if (*self._rank_path(node), *(0,) * num_ahead) in self.plan.places else None
        prob = self._prob(node) * self.shares.share(0) ** num_ahead
        return prob if self._is_likely(prob) and len(self.fed) < self._setup.max_fed else None

    def feed(self, node: int) -> None:
        super().feed(node)
        entry = (-self._prob(node), node)
        if node in self._named:
            self._named.remove(node)
        elif entry in self._offered:
            self._offered.remove(entry)

    def _offer(self, node: int) -> None:
        """Have a node fed in its turn if a child of it is of use."""
        if not self._may_follow(node):
            return
        prob = self._prob(node)
        if self.plan.places and self._rank_path(node) in self.plan.places:
            self._named.append(node)
        elif node == ROOT or self._is_likely(prob):
            insort(self._offered, (-prob, node))

    def _may_follow(self, node: int, num_ahead: int = 0) -> bool:
        """Return whether a child of a node is of use, or of its first child's first child and so on."""
        depth = self.depth(node) + num_ahead
        if depth >= self._max_depth or self._is_last(depth):
            return False
        is_last_drawn = not num_ahead and self.kinds.get(node) is NodeKind.LAW and not self.num_sampled(node)
        return self.plan.has_keys or not is_last_drawn

    def _is_likely(self, prob: float) -> bool:
        return prob * self.shares.share(0) >= LEAST_CHANCE

    def _prob(self, node: int) -> float:
        return 1.0 if node == ROOT else self.probs[node]

    def _rank_path(self, node: int) -> Place:
        return tuple(self.ranks[each] for each in self.path(node))

    # what follows a node

    def num_sampled(self, node: int) -> int:
        """Return how many tokens are sampled after a node."""
        if self._is_determined:
            return 0
        return self.plan.places.get(self._segment(node)[1], 0) if self.plan.places else 1

    def number_keys(self, node: int) -> Sequence[NumberKey]:
        num_sampled = self.num_sampled(node)
        if not num_sampled:
            return ()
        start, first = self._segment(node)[0], self.plan.first_candidate
        position = self.committed_len + self.depth(node)
        return [(start, position, first + rank) for rank in range(num_sampled)]

    def _segment(self, node: int) -> tuple[int, Place]:
        """Return the segment of what is drawn after a node; a new one after a key, and where none goes on."""
        return self.segments.setdefault(node, (self.committed_len + self.depth(node), ()))

    def extend(self, distribution: NodeDistribution, numbers: Sequence[float]) -> None:
        add_children(self, distribution, numbers)
        node, children = distribution.node, self.children(distribution.node)
        is_guess = self.kinds.get(node) is NodeKind.GUESS
        if not children or (is_guess and self.kinds[children[0]] is NodeKind.LAW):
            self.ended.append(node)  # what is guessed and what is drawn do not mix
        elif self._is_last(self.depth(children[0])):
            self.ended.append(children[0])

    def _is_last(self, depth: int) -> bool:
        """Return whether nothing will follow nodes of a depth while what is committed stays as it is."""
        return self.committed_len + depth >= self._slot.max_len - 1  # the target adds one of its own

    def add_child(self, parent: int, token_id: int, kind: NodeKind, law: RowLaw | None = None) -> int:
        """Make the next child of a node and return it. law: what it was drawn from."""
        rank = len(self.children(parent))
        child = self.add(parent, token_id, rank, self._prob(parent) * self.shares.share(rank))
        self.kinds[child] = kind
        if law is not None:
            self.distributions[child] = law
        if not self._is_determined and kind is not NodeKind.KEY:
            start, place = self._segment(parent)
            self.segments[child] = start, (*place, rank)
        self.unsent.append(child)
        self._offer(child)
        return child

    def add_ranked(self, parent: int, guesses: Sequence[tuple[int, float]]) -> None:
        """Take what else may follow a node, best first with probabilities, and make those children that are wanted."""
        self.ranked[parent] = list(guesses)
        self._fill(parent)

    def _fill(self, node: int) -> None:
        """Make the children that are wanted now of those that are known."""
        ranked = self.ranked.get(node)
        if not ranked:
            return
        kind = NodeKind.GUESS if self._is_determined else NodeKind.KEY
        num_named = self.plan.places.get(self._rank_path(node), 0) if self.plan.places else 0
        num_missing = self.plan.num_ranked(num_named, self._prob(node)) - len(self.children(node))
        for token_id, _ in ranked[: max(0, num_missing)]:
            self.add_child(node, token_id, kind)
            del ranked[0]

    def finish_step(self) -> None:
        """Say, once, that all which the request names is grown: there may be fewer nodes than it names."""
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
            if self.children(node):
                self.shares.note(self._rank_of(node, token_id))
            child = self.child(node, token_id)
            if child is None:
                break
            node = child
            path.append(node)
        goes_on = len(path) == len(decided) and self._goes_on(node)
        self._slot.commit_from(self.committed_len, decided)
        if goes_on:
            return self._grow_below(node)
        behind = path[: len(decided) - 1]  # the logits after the last token are wanted again
        keep = [index for index, node in enumerate(self.fed) if node in behind]
        self.segments.clear()
        self.restart()
        return keep

    def _rank_of(self, node: int, token_id: int) -> int | None:
        """Return which of the tokens that were thought to follow a node this one is, made a child or not."""
        ids = [self.ids[child] for child in self.children(node)]
        ids += [ranked_id for ranked_id, _ in self.ranked.get(node, ())]
        return ids.index(token_id) if token_id in ids else None

    def _goes_on(self, node: int) -> bool:
        """Return whether what hangs below a node is of use once it is committed. Under `rejection` it is not where the
        segment that it belongs to is over: what follows is drawn anew. A chain outlives the step that verified its
        beginning, and goes on with its own numbers: the target's own token in place of a draft is never that draft.
        """
        return self._is_determined or self.kinds[node] is NodeKind.KEY or self.num_sampled(node) > 0

    def _grow_below(self, node: int) -> list[int]:
        """Go on below a node that is committed now. Return which of `fed` stay in the cache."""
        kept = self.reroot(node)
        new_index = {old: index for index, old in enumerate([node, *kept], start=ROOT)}
        self.ranked = moved(self.ranked, new_index)
        self.segments = moved(self.segments, new_index)
        keep = self.keep(range(len(self)))
        self._begin_offers()
        for each in (ROOT, *self.fed):
            self._fill(each)
        self.finish_step()
        return keep
