"""The interface of draft tokens that grow in a slot of a draft worker, and of rows that are fed beside them.

The table of drafters (outrider/engine/drafters.py) chooses the implementation for a request: a draft tree (tree.py), or
levels of beams for a search.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from outrider.engine.speculation.cached_tree import CachedTree
from outrider.engine.speculation.draft_tree import ROOT, moved
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.worker.jobs import JobError, OpenJob
from outrider.engine.worker.slots import BareSlot
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engine.sampling.row_law import RowLaw
    from outrider.engine.speculation.drafter import NodeDistribution, NodeDrafter

NumberKey = tuple[SamplingParams, int, int, int]
"""(parameters, committed length at which a segment begins, position, candidate) of a uniform number."""
CheckCommit = Callable[[BareSlot, int, Sequence[int]], JobError | None]
"""Returns why a slot's tokens cannot become committed[:base_len] + ids; None where they can."""


@dataclass(frozen=True, slots=True)
class GrowthSetup:
    """The slot in which draft tokens grow, and the limits of their growth."""

    slot: BareSlot
    speculation: Speculation
    shares: SlotShares
    drafter: NodeDrafter[Any]
    topk: int | None
    """Number of ids to which distributions are cut; None = whole."""
    max_fed: int
    """Maximum number of nodes in the cache, those aside that the request names."""
    eos_token_ids: Sequence[int]


class Growth(CachedTree, ABC):
    """Draft tokens that grow under the committed tokens of a slot. An Advance decides positions, by token ids or by the
    levels of a search.
    """

    topk: int | None = None
    """Number of ids to which distributions are cut; None = whole."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[int, NodeKind] = {}
        self.distributions: dict[int, RowLaw] = {}
        """What sampled nodes were drawn from."""
        self.carries: dict[int, Tensor] = {}
        """Outputs [width] of a head after fed nodes and ROOT, where one drafts."""
        self.unsent: list[int] = []
        """New nodes, parents before their children. The pusher empties it."""
        self.ended: list[int] = []
        """Nodes that nothing will follow. The pusher empties it."""
        self.is_end_known = False
        """Whether it was sent that all which the target waits for is grown."""

    def reroot(self, node: int, dropped: Container[int] = ()) -> dict[int, int]:
        new_index = super().reroot(node, dropped)
        self.kinds = moved(self.kinds, new_index)
        self.distributions = moved(self.distributions, new_index)
        self.unsent = [new_index[each] for each in self.unsent if each in new_index]
        with_root = new_index | {node: ROOT}
        self.carries = moved(self.carries, with_root)
        self.ended = [with_root[each] for each in self.ended if each in with_root]
        return new_index

    @classmethod
    def refusal(cls, drafter: NodeDrafter[Any], *, is_translated: bool) -> str | None:
        """Return why a drafter cannot draft for such a slot; None where it can."""
        return None

    @classmethod
    def shares_key(cls, params: SamplingParams) -> object:
        """Return the key of the slots whose draft tokens of a rank are taken to be accepted alike."""
        return params.greedy, params.determined

    @property
    @abstractmethod
    def committed_len(self) -> int:
        """Number of tokens that are committed; ROOT is the last."""

    @property
    def known_len(self) -> int:
        """Number of positions that are decided."""
        return self.committed_len

    @property
    def roots(self) -> Mapping[int, int]:
        """Nodes that a message need not hold, each with its name in a message's parents."""
        return {ROOT: ROOT}

    @property
    @abstractmethod
    def is_awaited(self) -> bool:
        """Whether the target waits for all of the tree, and some of it has not grown."""

    @property
    def has_drafts(self) -> bool:
        """Whether anything follows what is decided."""
        return bool(self.ids)

    @abstractmethod
    def offers(self, max_num: int) -> list[tuple[float, int]]:
        """Return up to `max_num` nodes worth feeding, each with its acceptance probability, the best first."""

    def number_keys(self, node: int) -> Sequence[NumberKey]:
        """Return the keys of the numbers with which tokens are sampled after a node, one a token."""
        return ()

    @abstractmethod
    def extend(self, distribution: NodeDistribution, numbers: Sequence[float]) -> None:
        """Make the children of a node. numbers: uniforms for those that are sampled. Raises NonFiniteLogits."""

    @abstractmethod
    def finish_step(self) -> None:
        """End a step in which nodes were extended."""

    @abstractmethod
    def check(self, base_len: int, decided: Sequence[Any], check_commit: CheckCommit) -> JobError | None:
        """Return why the slot cannot go on with what was decided from `base_len` on; None where it can."""

    @abstractmethod
    def continues(self, base_len: int, decided: Sequence[Any], *, is_new_lease: bool) -> bool:
        """Return whether the tree stays valid under what was decided from `base_len` on; else a new one begins."""

    @abstractmethod
    def go_on(self, decided: Sequence[Any]) -> list[int]:
        """Commit what was decided behind `known_len`, and grow under it. Return which of `fed` stay in the cache, as
        ascending indices: committed ones and what is below them.
        """

    def resend(self) -> None:
        """Have all nodes sent again, since messages may be lost. A target that has them is not changed by it."""
        self.unsent = list(self.kinds)
        self.is_end_known = False
        self.finish_step()

    @abstractmethod
    def restart(self) -> None:
        """Begin anew: nothing is in the cache any more."""


class RowAhead(NamedTuple):
    """A token that is fed behind a node before it is known whether it will be that node's child."""

    node: int
    """Its index, below ROOT: no node of the tree."""
    parent: int
    """A node, ROOT or another row ahead."""
    token_id: int


class RowsAhead(Protocol):
    """Has rows fed beside the nodes of a slot, step by step, and reads the distributions after them."""

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        """committed = committed[:base_len] + ids."""

    def begin_step(self) -> None: ...

    def offers(self, tree: Growth, node: int) -> Iterator[tuple[float, int]]:
        """Yield rows ahead of an offered node, as far as the tree would feed them: each with its probability of use."""

    def ask(self, node: int) -> None:
        """Have a row fed that was offered."""

    def behind(self, nodes: Sequence[int]) -> list[RowAhead]:
        """Return the rows to be fed behind these nodes, in the order of `note_fed`."""

    def note_fed(self, distributions: Sequence[NodeDistribution]) -> None:
        """Store the distributions after the rows `behind` the nodes that were fed."""

    def follow(self, distribution: NodeDistribution) -> NodeDistribution | None:
        """Return the distribution after the newly made child of a node that is in the cache; None without one."""

    def end_step(self) -> tuple[int, Sequence[int]]:
        """Return how many rows were fed, and the ascending indices of those that became nodes."""

    def close(self) -> None: ...


OpenAhead = Callable[[OpenJob, BareSlot], RowsAhead | None]
"""Creates what has further rows fed for a slot; None for a slot without."""
