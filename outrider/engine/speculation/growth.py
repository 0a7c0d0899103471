"""The interface of draft tokens that grow in a slot of a draft worker, and of the look-ahead rows that are fed with
them.

The table of drafters (outrider/engine/drafter_table.py) chooses the implementation for a request: a draft tree
(`growing_tree.py`), or levels of beams for a beam search. Called by the draft worker's grower.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from outrider.engine.speculation.draft_tree import ROOT, CachedTree, remap
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.ranks import SlotAcceptance
from outrider.engine.worker.jobs import JobError, OpenJob
from outrider.engine.worker.open_slots import BareSlot
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engine.sampling.token_distribution import TokenDistribution
    from outrider.engine.speculation.node_drafter import NodeDistribution, NodeDrafter

NumberKey = tuple[SamplingParams, int, int, int]
"""Key of a uniform number: (request's parameters, committed length at which its segment begins, position,
candidate)."""
CheckCommit = Callable[[BareSlot, int, Sequence[int]], JobError | None]
"""Function (slot, base_len, ids) that returns the error if the slot's tokens cannot become committed[:base_len] + ids;
None if they can."""


@dataclass(frozen=True, slots=True)
class GrowthSetup:
    """Slot in which draft tokens grow, and the limits of their growth."""

    slot: BareSlot
    speculation: Speculation
    acceptance: SlotAcceptance
    drafter: NodeDrafter[Any]
    topk: int | None
    """Number of likeliest ids to which distributions are cut; None to keep them whole."""
    max_fed: int
    """Maximum number of nodes in the cache, not counting those that the request fixes."""
    eos_token_ids: Sequence[int]


class Growth(CachedTree, ABC):
    """Draft tokens that grow under the committed tokens of a slot.

    The gateway's Advance commits positions: token ids, or levels of a beam search.
    """

    topk: int | None = None
    """Number of likeliest ids to which distributions are cut; None to keep them whole."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[int, NodeKind] = {}
        """Kind of each node."""
        self.distributions: dict[int, TokenDistribution] = {}
        """By sampled node: the distribution that it was drawn from."""
        self.carries: dict[int, Tensor] = {}
        """With a head: its output [width] after each fed node and ROOT."""
        self.unsent: list[int] = []
        """New nodes that have not been sent, parents before their children. The sender empties it."""
        self.ended: list[int] = []
        """Nodes, or ROOT, after which no more draft tokens will come, that have not been sent yet. The sender empties
        it."""
        self.is_end_known = False
        """Whether it has been recorded for the target that all draft tokens for which it waits are grown."""

    def reroot(self, node: int, dropped: Container[int] = ()) -> dict[int, int]:
        new_index = super().reroot(node, dropped)
        self.kinds = remap(self.kinds, new_index)
        self.distributions = remap(self.distributions, new_index)
        self.unsent = [new_index[old] for old in self.unsent if old in new_index]
        with_root = new_index | {node: ROOT}
        self.carries = remap(self.carries, with_root)
        self.ended = [with_root[old] for old in self.ended if old in with_root]
        return new_index

    @classmethod
    def refusal(cls, drafter: NodeDrafter[Any], *, is_translated: bool) -> str | None:
        """Return the reason why a drafter cannot draft for slots of this kind; None if it can.

        is_translated: whether the draft has another tokenizer than the target.
        """
        return None

    @classmethod
    def acceptance_key(cls, params: SamplingParams) -> object:
        """Return a key for these parameters. Slots with equal keys share acceptance probabilities."""
        return params.greedy, params.is_deterministic

    @property
    @abstractmethod
    def committed_len(self) -> int:
        """Number of the slot's committed tokens. The last of them is ROOT."""

    @property
    def known_len(self) -> int:
        """Number of positions that are decided. In a beam search it exceeds committed_len while the live beams
        differ.
        """
        return self.committed_len

    @property
    def roots(self) -> Mapping[int, int]:
        """Nodes that the target has without a delivery, each with the number that stands for it among a delivery's
        parents.
        """
        return {ROOT: ROOT}

    @property
    @abstractmethod
    def is_awaited(self) -> bool:
        """Whether the target waits for draft tokens that have not grown yet."""

    @property
    def has_drafts(self) -> bool:
        """Whether there are draft tokens below the committed tokens."""
        return bool(self.ids)

    @abstractmethod
    def candidates(self, max_num: int) -> list[tuple[float, int]]:
        """Return at most max_num nodes that are worth feeding, as (acceptance probability, node), the best first."""

    def number_keys(self, node: int) -> Sequence[NumberKey]:
        """Return the keys of the uniform numbers with which tokens are sampled after a node, one per token."""
        return ()

    @abstractmethod
    def extend(self, distribution: NodeDistribution, numbers: Sequence[float]) -> None:
        """Make the children of a node from its distribution. Raises NonFiniteLogits.

        numbers: uniform numbers, one for each key of the node's `number_keys`.
        """

    @abstractmethod
    def finish_step(self) -> None:
        """Finish a step, after all its nodes were extended."""

    @abstractmethod
    def check(self, base_len: int, decided: Sequence[Any], check_commit: CheckCommit) -> JobError | None:
        """Return the error if the tokens or levels cannot be committed from base_len on; None if they can.

        decided: token ids, or levels of a beam search. check_commit: function that checks token ids against the slot.
        """

    @abstractmethod
    def continues(self, base_len: int, decided: Sequence[Any], *, is_new_lease: bool) -> bool:
        """Return whether the tree stays valid when these tokens or levels are committed from base_len on. If not, a new
        tree is needed.
        """

    @abstractmethod
    def commit_decided(self, decided: Sequence[Any]) -> list[int]:
        """Commit tokens or levels after the position `known_len`, and keep growing below them.

        Returns the indices in `fed`, ascending, of the nodes that stay in the cache: the committed ones and those below
        them.
        """

    def resend(self) -> None:
        """Queue all nodes to be sent again, for example after a lost message. A target that already has them ignores
        them.
        """
        self.unsent = list(self.kinds)
        self.is_end_known = False
        self.finish_step()

    @abstractmethod
    def restart(self) -> None:
        """Drop all nodes, because the cache no longer holds them."""


class RowAhead(NamedTuple):
    """Look-ahead row: a token that is fed after a node before it is known whether it becomes that node's child."""

    node: int
    """Number of the look-ahead row, below ROOT, since it is no node of the tree."""
    parent: int
    """The node, ROOT, or other look-ahead row that it follows."""
    token_id: int


class RowsAhead(Protocol):
    """Look-ahead rows of one slot, fed together with its nodes, and the distributions after them. The methods are
    listed in the order in which a step calls them.
    """

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        """Replace the slot's committed tokens from base_len on by `ids`."""

    def begin_step(self) -> None:
        """Discard the look-ahead rows of the previous step."""

    def candidates(self, tree: Growth, node: int) -> Iterator[tuple[float, int]]:
        """Yield (probability of use, look-ahead row) for the rows after an offered node, as far as the tree would feed
        nodes there.
        """

    def mark(self, node: int) -> None:
        """Mark an offered look-ahead row as one to feed in this step."""

    def behind(self, nodes: Sequence[int]) -> list[RowAhead]:
        """Return the marked look-ahead rows that follow these nodes, in the order in which `note_fed` takes their
        distributions.
        """

    def note_fed(self, distributions: Sequence[NodeDistribution]) -> None:
        """Store the distributions after the rows that `behind` returned."""

    def follow(self, distribution: NodeDistribution) -> NodeDistribution | None:
        """Return the distribution after a node's new child, if the child was fed as a look-ahead row; else None."""

    def end_step(self) -> tuple[int, Sequence[int]]:
        """Return the number of look-ahead rows that were fed, and the indices among them, ascending, of those that
        became nodes.
        """

    def close(self) -> None:
        """Release what is kept for the slot."""


OpenAhead = Callable[[OpenJob, BareSlot], RowsAhead | None]
"""Function that creates the look-ahead rows of a new slot; returns None if the slot has none."""
