"""The protocol of a draft worker's drafters: they return the distribution after a node of a growing draft tree.

Nothing else is theirs: `drawing` makes children from a distribution, `tree` chooses the nodes that are fed. A child is
*sampled* from the distribution, which is sent with it, or *deterministic*: accepted where the target chooses the same
token. That is where the distribution has one token, or the acceptance rule needs no distribution. A poor distribution
costs acceptance, never exactness.
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
    """The distribution of the token after one node of a draft tree."""

    tree: Growth
    node: int
    state: SamplingState
    law: Callable[[LogitRow], TokenDistribution | None]
    """Function that returns the distribution under the request's parameters; None where nothing is known to follow.
    Raises NonFiniteLogits."""
    best: Callable[[LogitRow, int], tuple[Sequence[int], Sequence[float]]] | None = None
    """Function that returns at most so many of the likeliest ids at temperature 0, best first, and their probabilities;
    None for a table, whose `law` is called instead."""


SlotT = TypeVar("SlotT", contravariant=True)
"""A slot of a draft worker with its draft tree."""


class NodeDrafter(Protocol[SlotT]):
    """One drafter of a draft worker, for all its slots, on the engine thread. The defaults suit one without a cache."""

    takes_trees: bool = True
    """Whether a step may feed nodes of one slot that are not on one path."""
    can_refeed: bool = False
    """Whether a node that left the cache can be fed again by its token alone."""
    max_depth: int = MAX_DRAFT_TOKENS
    """Maximum depth under the last committed token at which it has distributions."""
    fills_blocks: bool = False
    """Whether one forward after the last committed token returns the distributions of all depths, whatever the nodes
    are. Draft tokens after a token of the target's own are then made once it is committed, and not before."""

    def propose(self, requests: Sequence[tuple[SlotT, Sequence[int]]], now: float) -> Sequence[NodeDistribution] | None:
        """Run one step: return the distributions after these nodes, or after those that have room now.

        It also does other work that is due, such as prefill. requests: slots with their nodes. now: monotonic time, in
        seconds. Returns None where there was nothing to do.
        """

    def keep_fed(self, asked: SlotT, num_fed: int, keep: Sequence[int]) -> None:
        """Drop the state of the last num_fed nodes that were fed, without those at the ascending indices `keep`."""

    def knows(self, asked: SlotT) -> bool:
        """Return whether the state of all fed nodes of a slot is still there."""
        return True

    def is_ready(self, asked: SlotT) -> bool:
        """Return whether nodes of a slot can be fed now; for example not before its prefill."""
        return True

    def next_wake(self) -> float | None:
        """Return the monotonic time at which to call `propose` again though nothing happens till then; None: never."""
        return None


def distribution_of_logits(
    tree: Growth, node: int, state: SamplingState, host: HostLogits, index: int
) -> NodeDistribution:
    """Return a model's distribution after a node. index: row of `host` with the logits after it."""

    def law(row: LogitRow) -> TokenDistribution | None:
        return host.distribution_if_any(index, row)

    def best(row: LogitRow, num: int) -> tuple[Sequence[int], Sequence[float]]:
        return host.ranked(index, row, num)

    return NodeDistribution(tree, node, state, law, best)


def distribution_of_table(
    tree: Growth,
    node: int,
    state: SamplingState,
    counts_after: Callable[[Sequence[int]], Counts | None],
    vocab_size: int,
) -> NodeDistribution:
    """Return a table's distribution after a node, with counts in place of logits.

    counts_after: returns the counts after the ids of a path; None where the table has none.
    """

    def law(row: LogitRow) -> TokenDistribution | None:
        counts = counts_after(row.draft_prefix)
        if counts is None:
            return None
        return distribution_of_counts(counts, row, vocab_size)

    return NodeDistribution(tree, node, state, law)
