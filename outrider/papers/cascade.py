"""CS Drafting: a table predicts the tokens that a draft model samples next, and they are fed as look-ahead rows.

The rows are fed in the same forward as the requested nodes. If a predicted token is then sampled, the distribution
after it is known without another forward (Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference",
arXiv 2312.11462).

Samples depend only on the model's logits and the random numbers of a position, so the draft tokens are the same as
without a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from outrider.drafting.sequence_drafter import SequenceDrafter
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.growing_tree import GrowingTree
from outrider.engine.speculation.growth import Growth, RowAhead
from outrider.engine.speculation.node_drafter import NodeDistribution
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.worker.jobs import OpenJob
from outrider.engine.worker.open_slots import BareSlot


def open_cascade(
    table: SequenceDrafter, acceptance: dict[tuple[bool, bool], RankAcceptance], job: OpenJob, slot: BareSlot
) -> Cascade | None:
    """Return the look-ahead rows of a new slot, whose tokens `table` predicts. None for a beam search, in which nothing
    is sampled.

    `acceptance`: measured probabilities that a prediction is right, shared by all slots. The key is (`greedy`,
    `is_deterministic`) of a slot's sampling parameters; a missing entry is added.
    """
    if job.params.beams is not None:
        return None
    kind = (job.params.greedy, job.params.is_deterministic)
    return Cascade(table, job, slot, SlotAcceptance(acceptance.setdefault(kind, RankAcceptance())))


class Cascade:
    """Look-ahead rows of one slot, made anew for each step: tokens that a table predicts, and that are fed with the
    draft tree's nodes before it is known whether they become nodes.
    """

    def __init__(self, table: SequenceDrafter, job: OpenJob, slot: BareSlot, acceptance: SlotAcceptance) -> None:
        """Create the look-ahead rows of a slot. `table`: the drafter that predicts. `acceptance`: probability that a
        prediction is right, in this slot.
        """
        self._num_source = len(job.source_ids)  # the output may copy from the encoder's source
        num_prompt = self._num_source + slot.num_prompt
        self.follower = table.open([*job.source_ids, *slot.committed], num_prompt, job.corpus_id)
        self._acceptance = acceptance
        self.begin_step()

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        self.follower.truncate(self._num_source + base_len)
        self.follower.append(ids)

    def begin_step(self) -> None:
        self._predicted: dict[int, RowAhead] = {}
        """By node or look-ahead row: the look-ahead row that is predicted after it."""
        self._marked = set[int]()
        self._fed: dict[int, tuple[int, NodeDistribution]] = {}
        """By look-ahead row: its index among the fed ones, and the distribution after it."""
        self._drawn = list[int]()
        """Indices of the fed look-ahead rows whose token was then sampled, ascending."""

    def candidates(self, tree: Growth, node: int) -> Iterator[tuple[float, int]]:
        assert isinstance(tree, GrowingTree), "a search draws nothing"
        walk = self.follower.walk()
        behind = node
        for token_id in tree.prefix(node):
            walk.step(token_id)
        for num_ahead in count(1):
            prob_ahead = tree.prob_ahead(node, num_ahead)
            counts = walk.next()
            if prob_ahead is None or counts is None:
                return
            ids, nums = counts
            predicted = RowAhead(ROOT - 1 - len(self._predicted), behind, int(ids[nums.argmax()]))
            self._predicted[behind] = predicted
            yield prob_ahead * self._acceptance.prob(0) ** num_ahead, predicted.node
            walk.step(predicted.token_id)
            behind = predicted.node

    def mark(self, node: int) -> None:
        self._marked.add(node)

    def behind(self, nodes: Sequence[int]) -> list[RowAhead]:
        found = list[RowAhead]()
        level = list(nodes)
        while level:
            below = list[int]()
            for node in level:
                predicted = self._predicted.get(node)
                if predicted is not None and predicted.node in self._marked:
                    found.append(predicted)
                    below.append(predicted.node)
            level = below
        return found

    def note_fed(self, distributions: Sequence[NodeDistribution]) -> None:
        for index, distribution in enumerate(distributions):
            self._fed[distribution.node] = index, distribution

    def follow(self, distribution: NodeDistribution) -> NodeDistribution | None:
        tree = distribution.tree
        predicted = self._predicted.pop(distribution.node, None)
        assert isinstance(tree, GrowingTree), "a search draws nothing"
        if predicted is None:
            return None
        child = tree.child(distribution.node, predicted.token_id)
        self._acceptance.note(None if child is None else 0)
        if child is None or predicted.node not in self._fed or tree.prob_ahead(child, 0) is None:
            return None
        index, following = self._fed[predicted.node]
        tree.feed(child)
        self._drawn.append(index)
        if predicted.node in self._predicted:
            self._predicted[child] = self._predicted.pop(predicted.node)
        return replace(following, node=child)

    def end_step(self) -> tuple[int, Sequence[int]]:
        return len(self._fed), self._drawn

    def close(self) -> None:
        self.follower.close()
