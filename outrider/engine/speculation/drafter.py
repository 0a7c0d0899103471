"""The protocol of a draft worker's drafters: they give the distribution of the token that follows a node of a growing
tree.

Sampling, noise, penalties, cuts, sending and accepting stand elsewhere: `drawing` makes children from a distribution,
`tree` chooses which nodes are fed. A child is *sampled* from the distribution, which is sent with it, or
*deterministic*, accepted where the target chooses the same: where the distribution leaves no choice, or the acceptance
rule needs none. What a distribution is computed from costs acceptance alone, never exactness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from outrider.drafting.drafter import Counts
from outrider.engine.sampling.count_law import law_of_counts
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.growth import Growth
from outrider.wire.requests.params import MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True)
class NodeDistribution:
    """The distribution of the token that follows a node."""

    tree: Growth
    node: int
    state: SamplingState
    law: Callable[[LogitRow], RowLaw | None]
    """Returns the distribution under the request's parameters; None where there is none. Raises NonFiniteLogits."""
    best: Callable[[LogitRow, int], tuple[Sequence[int], Sequence[float]]] | None = None
    """Returns up to so many of the likeliest ids at temperature 0, best first, and their probabilities; None for a
    table, for which `law` does."""


SlotT = TypeVar("SlotT", contravariant=True)
"""A slot of a draft worker, with its tree."""


class NodeDrafter(Protocol[SlotT]):
    """Serves all slots of a worker, on its engine thread. Its defaults hold for a drafter without a cache."""

    takes_trees: bool = True
    """Whether a step may feed several nodes of a slot that do not lie on one path."""
    can_refeed: bool = False
    """Whether a node that left the cache can be fed again by its token alone."""
    max_depth: int = MAX_DRAFT_TOKENS
    """Depth under the last committed token up to which it has distributions."""
    fills_blocks: bool = False
    """Whether one forward after the last committed token gives the distributions of all depths, whatever the nodes are.
    What follows a token that the target chooses itself is then made once that token is committed, and not before."""

    def propose(self, requests: Sequence[tuple[SlotT, Sequence[int]]], now: float) -> Sequence[NodeDistribution] | None:
        """Return the distributions after these nodes, or after those of them that have room now; and do other work that
        is due, such as prefill. None: there was nothing to do.
        """

    def keep_fed(self, asked: SlotT, num_fed: int, keep: Sequence[int]) -> None:
        """Keep the state of those of the last num_fed nodes that were fed which are at the ascending indices `keep`."""

    def knows(self, asked: SlotT) -> bool:
        """Return whether the state of the nodes that were fed is still there."""
        return True

    def is_ready(self, asked: SlotT) -> bool:
        """Return whether nodes of a slot can be fed now: not before its prefill, for one."""
        return True

    def next_wake(self) -> float | None:
        """Return when to call `propose` again, though nothing happens until then."""
        return None


def of_logits(tree: Growth, node: int, state: SamplingState, host: HostLogits, index: int) -> NodeDistribution:
    """Return a model's distribution: the logits after the node are row `index` of `host`."""
    return NodeDistribution(
        tree, node, state, lambda row: host.law_if_any(index, row), lambda row, num: host.ranked(index, row, num)
    )


def of_table(
    tree: Growth,
    node: int,
    state: SamplingState,
    counts_after: Callable[[Sequence[int]], Counts | None],
    vocab_size: int,
) -> NodeDistribution:
    """Return a table's distribution. counts_after: takes the ids of the path to the node; counts stand for logits."""

    def law(row: LogitRow) -> RowLaw | None:
        counts = counts_after(row.draft_prefix)
        return None if counts is None else law_of_counts(counts, row, vocab_size)

    return NodeDistribution(tree, node, state, law)
