"""The protocol of a draft worker's drafters: they return the distribution after a node of a growing draft tree.

They do nothing else: `drawing` makes children from a distribution, `growing_tree` chooses the nodes that are fed. A
child is either *sampled* from the distribution, which is sent with it, or *deterministic*: accepted if the target
chooses the same token. It is deterministic if the distribution has one token, or if the acceptance rule needs no
distribution. A poor distribution costs acceptance, never exactness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from outrider.drafting.sequence_drafter import Counts
from outrider.engine.sampling.count_distribution import distribution_of_counts
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.growth import Growth
from outrider.wire.requests.params import MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True)
class NodeDistribution:
    """Distribution of the token after one node of a draft tree."""

    tree: Growth
    node: int
    state: SamplingState
    distribution: Callable[[LogitRow], TokenDistribution | None]
    """Function that returns the distribution under the request's parameters; None if the drafter has none for this
    node, as a table without an entry. Raises NonFiniteLogits if the model returned NaN or an infinity."""
    best: Callable[[LogitRow, int], tuple[Sequence[int], Sequence[float]]] | None = None
    """Function (row, n) that returns at most n likeliest ids, best first, and their probabilities at temperature 1. It
    serves greedy requests and beam searches. None for a table, whose `distribution` is called instead."""


SlotT = TypeVar("SlotT", contravariant=True)
"""Slot of a draft worker with its draft tree."""


class NodeDrafter(Protocol[SlotT]):
    """Drafter of a draft worker, for all its slots, on the engine thread. Defaults suit a drafter without a cache."""

    supports_trees: bool = True
    """Whether a step may feed nodes of one slot that do not lie on one path."""
    can_refeed: bool = False
    """Whether a node that left the cache can be fed again from its token alone."""
    max_depth: int = MAX_DRAFT_TOKENS
    """Maximum depth below the last committed token for which the drafter has distributions."""
    is_block_drafter: bool = False
    """Whether one forward after the last committed token returns the distributions of all depths, whatever the nodes
    are. If so, the tree has no recovery nodes: after a token that the target draws itself, draft tokens are made only
    once that token is committed."""

    def propose(self, requests: Sequence[tuple[SlotT, Sequence[int]]], now: float) -> Sequence[NodeDistribution] | None:
        """Run one step. Return the distributions after the requested nodes, or after those for which the step has room.

        The step also does other work that is due, such as prefill. requests: slots, each with the nodes to feed. now:
        monotonic time, in seconds. Returns None if there was nothing to do.
        """

    def keep_fed(self, asked: SlotT, num_fed: int, keep: Sequence[int]) -> None:
        """Of the last num_fed nodes that were fed for a slot, keep only those at the indices `keep` in the cache.
        Indices are counted from the first of these nodes and ascend.
        """
        return

    def is_cached(self, asked: SlotT) -> bool:
        """Return whether the cache still holds all fed nodes of a slot."""
        return True

    def is_ready(self, asked: SlotT) -> bool:
        """Return whether nodes of a slot can be fed now. They cannot, for example, before its prompt is prefilled."""
        return True

    def next_wake(self) -> float | None:
        """Return the monotonic time, in seconds, at which the engine thread calls `propose` again if no message arrives
        before; None = only a message leads to the next call.
        """
        return None


def distribution_of_logits(
    tree: Growth, node: int, state: SamplingState, host: HostLogits, index: int
) -> NodeDistribution:
    """Return the distribution after a node from a model's logits, which are in row `index` of `host`."""

    def next_distribution(row: LogitRow) -> TokenDistribution | None:
        return host.distribution_if_any(index, row)

    def best(row: LogitRow, num: int) -> tuple[Sequence[int], Sequence[float]]:
        return host.ranked(index, row, num)

    return NodeDistribution(tree, node, state, next_distribution, best)


def distribution_of_table(
    tree: Growth,
    node: int,
    state: SamplingState,
    counts_after: Callable[[Sequence[int]], Counts | None],
    vocab_size: int,
) -> NodeDistribution:
    """Return the distribution after a node, from the counts of a table instead of a model's logits.

    counts_after: function that returns the counts after the token ids of a path; None if the table has none.
    """

    def next_distribution(row: LogitRow) -> TokenDistribution | None:
        counts = counts_after(row.draft_prefix)
        if counts is None:
            return None
        return distribution_of_counts(counts, row, vocab_size)

    return NodeDistribution(tree, node, state, next_distribution)
