"""The protocol of everything that drafts: it gives the distribution of what follows a node of a growing tree.

Sampling, noise, penalties, cuts, sending and accepting are not its business: `drawing` makes children from a
distribution, `tree` tells which nodes are worth feeding. A drafter gives a *law*, from which a token is drawn and which
is sent with it, or, where the law leaves no choice or the rule needs no law, a *guess*, kept where the target chooses
the same. A drafter proves nothing: what a law was computed from is free, and costs acceptance alone.
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
from outrider.wire.params import MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True)
class NodeDistribution:
    """What is known of the token after a node."""

    tree: Growth
    node: int
    state: SamplingState
    law: Callable[[LogitRow], RowLaw | None]
    """What follows, under the request's parameters; None where nothing is known. Raises NonFiniteLogits."""
    best: Callable[[LogitRow, int], tuple[Sequence[int], Sequence[float]]] | None = None
    """The ids that follow most likely at temperature 0, and their probabilities; None: by the law."""


SlotT = TypeVar("SlotT", contravariant=True)
"""A slot as its worker keeps it, with what grows there."""


class NodeDrafter(Protocol[SlotT]):
    """Serves all slots of a worker, on its engine thread. Has of itself what holds for a drafter without a cache."""

    takes_trees: bool = True
    """Whether a step may feed several nodes of a slot that do not lie on one path."""
    can_refeed: bool = False
    """Whether a node that was let go can be fed again by its token alone."""
    max_depth: int = MAX_DRAFT_TOKENS
    """Depth under the last committed token up to which it has distributions."""

    def propose(self, requests: Sequence[tuple[SlotT, Sequence[int]]], now: float) -> Sequence[NodeDistribution] | None:
        """Return what follows these nodes, or those of them that there is room for now; and do what else is due, such
        as reading prompts. None: there was nothing to do.
        """

    def keep_fed(self, asked: SlotT, num_fed: int, keep: Sequence[int]) -> None:
        """Keep, of the last num_fed nodes that it was asked for, what is known of those at the ascending indices
        `keep`.
        """

    def knows(self, asked: SlotT) -> bool:
        """Return whether what it was asked for before is still known."""
        return True

    def is_ready(self, asked: SlotT) -> bool:
        """Return whether it can be asked for nodes of a slot now: not before prompts are read, for one."""
        return True

    def next_wake(self) -> float | None:
        """Return when to call `propose` again, though nothing happens until then."""
        return None


def of_logits(tree: Growth, node: int, state: SamplingState, host: HostLogits, index: int) -> NodeDistribution:
    """Return a model's: the logits after the node are row `index` of `host`."""
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
    """Return a table's. counts_after: takes the ids of the path to the node; counts stand for logits."""

    def law(row: LogitRow) -> RowLaw | None:
        counts = counts_after(row.draft_prefix)
        return None if counts is None else law_of_counts(counts, row, vocab_size)

    return NodeDistribution(tree, node, state, law)
