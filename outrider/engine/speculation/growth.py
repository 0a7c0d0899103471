"""The interface of the draft tokens that grow in a slot of a draft worker, and of rows that are fed beside them.

The table of drafters (outrider/engine/drafter_table.py) chooses the implementation for a request: a draft tree
(`growing_tree.py`), or levels of beams for a search. Called by the draft worker's grower.
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
"""(parameters, committed length at which a segment begins, position, candidate) of a uniform number."""
CheckCommit = Callable[[BareSlot, int, Sequence[int]], JobError | None]
"""Function that returns the error where a slot's tokens cannot become committed[:base_len] + ids; None where they can.
"""


@dataclass(frozen=True, slots=True)
class GrowthSetup:
    """The slot in which draft tokens grow, and the limits of their growth."""

    slot: BareSlot
    speculation: Speculation
    shares: SlotAcceptance
    drafter: NodeDrafter[Any]
    topk: int | None
    """Number of ids to which distributions are cut; None for whole ones."""
    max_fed: int
    """Maximum number of nodes in the cache, besides those that the request names."""
    eos_token_ids: Sequence[int]


class Growth(CachedTree, ABC):
    """Draft tokens that grow under the committed tokens of a slot.

    The gateway's Advance commits positions: token ids, or levels of a search.
    """

    topk: int | None = None
    """Number of ids to which distributions are cut; None for whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[int, NodeKind] = {}
        """Kind of each node."""
        self.distributions: dict[int, TokenDistribution] = {}
        """Distribution that each sampled node was drawn from."""
        self.carries: dict[int, Tensor] = {}
        """Output [width] of a head after each fed node and ROOT, where a head drafts."""
        self.unsent: list[int] = []
        """New nodes to be sent, parents before their children. The pusher empties it."""
        self.ended: list[int] = []
        """Nodes, or ROOT, after which no more draft tokens will come. The pusher empties it."""
        self.is_end_known = False
        """Whether the target was sent that all the draft tokens for which it waits are grown."""

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
        """Return why a drafter cannot draft for a slot of this kind; None where it can.

        is_translated: whether the draft has another tokenizer than the target.
        """
        return None

    @classmethod
    def shares_key(cls, params: SamplingParams) -> object:
        """Return the key of the acceptance probabilities that slots with these parameters share."""
        return params.greedy, params.is_deterministic

    @property
    @abstractmethod
    def committed_len(self) -> int:
        """Number of committed tokens, of which ROOT is the last."""

    @property
    def known_len(self) -> int:
        """Number of committed positions: more than committed_len for a search, whose beams may differ."""
        return self.committed_len

    @property
    def roots(self) -> Mapping[int, int]:
        """Nodes that the target has without a delivery, each with its number among a delivery's parents."""
        return {ROOT: ROOT}

    @property
    @abstractmethod
    def is_awaited(self) -> bool:
        """Whether the target waits for draft tokens that have not grown."""

    @property
    def has_drafts(self) -> bool:
        """Whether there are draft tokens after the committed ones."""
        return bool(self.ids)

    @abstractmethod
    def offers(self, max_num: int) -> list[tuple[float, int]]:
        """Return at most max_num (acceptance probability, node) of nodes worth feeding, the best first."""

    def number_keys(self, node: int) -> Sequence[NumberKey]:
        """Return the keys of the uniform numbers with which tokens are sampled after a node, one for each token."""
        return ()

    @abstractmethod
    def extend(self, distribution: NodeDistribution, numbers: Sequence[float]) -> None:
        """Make the children of a node from its distribution. Raises NonFiniteLogits.

        numbers: a uniform number for each of its `number_keys`.
        """

    @abstractmethod
    def finish_step(self) -> None:
        """End a step in which nodes were extended."""

    @abstractmethod
    def check(self, base_len: int, decided: Sequence[Any], check_commit: CheckCommit) -> JobError | None:
        """Return the error where the tokens or levels from base_len on cannot be committed; None where they can.

        decided: token ids, or levels of a search. check_commit: checks token ids against the slot.
        """

    @abstractmethod
    def continues(self, base_len: int, decided: Sequence[Any], *, is_new_lease: bool) -> bool:
        """Return whether the tree stays valid when these are committed from base_len on; else it is restarted."""

    @abstractmethod
    def go_on(self, decided: Sequence[Any]) -> list[int]:
        """Commit tokens, or levels, after `known_len`, and go on below them.

        Returns which of `fed` stay in the cache, as ascending indices: the committed nodes and those below them.
        """

    def resend(self) -> None:
        """Have all nodes sent again, as after a lost message. A target that has them ignores them."""
        self.unsent = list(self.kinds)
        self.is_end_known = False
        self.finish_step()

    @abstractmethod
    def restart(self) -> None:
        """Drop all nodes: the cache is empty."""


class RowAhead(NamedTuple):
    """A row ahead: a token that is fed after a node before it is known whether it becomes that node's child."""

    node: int
    """Index of the row ahead, below ROOT: it is no node of the tree."""
    parent: int
    """A node, ROOT or another row ahead that it follows."""
    token_id: int


class RowsAhead(Protocol):
    """The rows ahead of one slot, fed beside its nodes, and the distributions after them. Methods are in a step's
    order.
    """

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        """Replace the slot's committed tokens from base_len on by these."""

    def begin_step(self) -> None:
        """Forget the rows of the previous step."""

    def offers(self, tree: Growth, node: int) -> Iterator[tuple[float, int]]:
        """Yield (probability of use, row ahead) after an offered node, as far as the tree would feed such nodes."""

    def ask(self, node: int) -> None:
        """Have an offered row ahead fed in this step."""

    def behind(self, nodes: Sequence[int]) -> list[RowAhead]:
        """Return the rows to be fed after these nodes, in the order of `note_fed`."""

    def note_fed(self, distributions: Sequence[NodeDistribution]) -> None:
        """Store the distributions after the rows that `behind` returned."""

    def follow(self, distribution: NodeDistribution) -> NodeDistribution | None:
        """Return the distribution after a node's new child that was fed as a row ahead; None where none was."""

    def end_step(self) -> tuple[int, Sequence[int]]:
        """Return the number of rows that were fed, and the ascending indices of those that became nodes."""

    def close(self) -> None:
        """Forget the slot."""


OpenAhead = Callable[[OpenJob, BareSlot], RowsAhead | None]
"""Function that creates the rows ahead of a new slot; returns None for a slot without."""
