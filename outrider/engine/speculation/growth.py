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
"""Key of the uniform number with which one draft token is sampled: (request's parameters, start, position, candidate).
start: committed length at which the token's segment begins. position: the token's index in the sequence of prompt and
output. candidate: number of the draft token among those that are drawn for this position."""
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
    """Number of likeliest ids to which distributions are cut before a draw; None to keep them whole."""
    max_fed: int
    """Maximum number of the slot's nodes in the cache. Nodes that the request fixes, by a number of draft tokens or a
    tree shape, are fed even beyond it."""
    eos_token_ids: Sequence[int]


class Growth(CachedTree, ABC):
    """Base class of the draft tree that a draft worker grows below the committed tokens of one slot. What a target
    decides for the slot, and the tree commits, are token ids or, in a beam search, levels.
    """

    topk: int | None = None
    """Number of likeliest ids to which distributions are cut before a draw; None to keep them whole."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[int, NodeKind] = {}
        """Kind of each node."""
        self.distributions: dict[int, TokenDistribution] = {}
        """By sampled node: the distribution that it was drawn from."""
        self.carries: dict[int, Tensor] = {}
        """If the drafter is a head: the hidden states [d] that it returned after each node and ROOT in the cache. They
        are its input for the next token."""
        self.unsent: list[int] = []
        """New nodes that have not been sent to the target, parents before their children. The code that sends
        deliveries empties the list."""
        self.ended: list[int] = []
        """Nodes, or ROOT, after which no more draft tokens grow, and of which the target has not been told yet. The
        code that sends deliveries empties the list."""
        self.is_end_known = False
        """Whether the target has been told, or will be with the next delivery, that no more draft tokens grow in the
        slot for now, so that no step waits for any."""

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
        """Return the reason why a draft worker's drafter cannot grow trees of this class; None if it can.

        is_translated: whether the drafter has another tokenizer than the target.
        """
        return None

    @classmethod
    def acceptance_key(cls, params: SamplingParams) -> object:
        """Return a key made from the sampling parameters on which acceptance probabilities depend. Slots with equal
        keys share these probabilities.
        """
        return params.greedy, params.is_deterministic

    @property
    @abstractmethod
    def committed_len(self) -> int:
        """Number of the slot's committed tokens. The last of them is ROOT."""

    @property
    def known_len(self) -> int:
        """Number of token positions that the target has decided. In a beam search it exceeds committed_len while the
        live beams differ.
        """
        return self.committed_len

    @property
    def roots(self) -> Mapping[int, int]:
        """Nodes that the target has without a delivery: ROOT, or the last tokens of the live beams of a beam search.
        Each maps to the number that stands for it in `Delivery.parents`.
        """
        return {ROOT: ROOT}

    @property
    @abstractmethod
    def is_awaited(self) -> bool:
        """Whether the request fixes draft tokens that have not grown yet, so that the target waits for them."""

    @property
    def has_drafts(self) -> bool:
        """Whether there are draft tokens below the committed tokens."""
        return bool(self.ids)

    @abstractmethod
    def candidates(self, max_num: int) -> list[tuple[float, int]]:
        """Return at most max_num nodes that are worth feeding, the best first, as (probability, node): the probability
        that the node and all its ancestors are accepted, or 1 if the node has to be fed.
        """

    def number_keys(self, node: int) -> Sequence[NumberKey]:
        """Return the keys of the uniform numbers with which draft tokens are sampled after a node: one for each draft
        token that is sampled there, none if they are deterministic.
        """
        return ()

    @abstractmethod
    def extend(self, distribution: NodeDistribution, numbers: Sequence[float]) -> None:
        """Make the children of a node from its distribution. Raises NonFiniteLogits if the model returned NaN or an
        infinity.

        numbers: uniform numbers, one for each key of the node's `number_keys`.
        """

    @abstractmethod
    def finish_step(self) -> None:
        """End a step, after all of its nodes were extended. If a tree of a fixed shape is complete, note it in `ended`,
        so that the target stops waiting for draft tokens. Give a beam search its next levels.
        """

    @abstractmethod
    def check(self, base_len: int, decided: Sequence[Any], check_commit: CheckCommit) -> JobError | None:
        """Return the error if the tokens or levels cannot be committed after the first base_len positions; None if they
        can.

        decided: token ids, or levels of a beam search. check_commit: function that checks token ids against the slot.
        """

    @abstractmethod
    def continues(self, base_len: int, decided: Sequence[Any], *, is_new_lease: bool) -> bool:
        """Return whether the tree stays valid when these tokens or levels are committed after the first base_len
        positions. If not, a new tree is needed. decided: token ids, or levels of a beam search. is_new_lease: whether
        the Advance message that brings them begins a new lease of the target.
        """

    @abstractmethod
    def commit_decided(self, decided: Sequence[Any]) -> list[int]:
        """Commit tokens or levels (of a beam search) after the `known_len` positions that were decided before. Keep the
        draft tokens below them.

        Returns the indices, ascending, of the nodes that stay in the cache, the committed ones and those below them, in
        `fed` (the nodes in the cache, in the order in which they were fed).
        """

    def resend(self) -> None:
        """Queue all nodes to be sent again, for example after a lost message. A target ignores those that it has."""
        self.unsent = list(self.kinds)
        self.is_end_known = False
        self.finish_step()

    @abstractmethod
    def restart(self) -> None:
        """Drop all draft tokens of the tree, because the cache no longer holds them."""


class RowAhead(NamedTuple):
    """Look-ahead row: a token that is fed after a node before it is known whether it becomes that node's child."""

    node: int
    """Index that stands for the look-ahead row. It is less than ROOT, since the row is no node of the tree."""
    parent: int
    """Node, ROOT, or other look-ahead row that this row follows."""
    token_id: int


class RowsAhead(Protocol):
    """Look-ahead rows of one slot, and the distributions after them. A look-ahead row is a predicted token that is fed
    together with the slot's nodes, before it is known whether it becomes a node. A step calls the methods in the order
    in which they are listed.
    """

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        """Replace the slot's committed tokens from base_len on by `ids`."""

    def begin_step(self) -> None:
        """Discard the look-ahead rows of the previous step."""

    def candidates(self, tree: Growth, node: int) -> Iterator[tuple[float, int]]:
        """Predict the tokens that follow a node, one after the other, for look-ahead rows of this step. Yield for each
        (probability that the token becomes a node and is accepted, number of its look-ahead row). End before the first
        token that the tree would not feed as a node.
        """

    def mark(self, node: int) -> None:
        """Choose a look-ahead row that `candidates` yielded to be fed in this step. node: its number."""

    def behind(self, nodes: Sequence[int]) -> list[RowAhead]:
        """Return the look-ahead rows that are to be fed after these nodes, i.e. for which `mark` was called. `note_fed`
        takes the distributions after them in the same order.
        """

    def note_fed(self, distributions: Sequence[NodeDistribution]) -> None:
        """Store the distributions after the rows that `behind` returned."""

    def follow(self, distribution: NodeDistribution) -> NodeDistribution | None:
        """If one of a node's new children was already fed as a look-ahead row, return the distribution after this
        child, which then counts as fed; else None. distribution: the distribution after the node itself.
        """

    def end_step(self) -> tuple[int, Sequence[int]]:
        """Return the number of look-ahead rows that were fed, and which of them became nodes: their indices among the
        fed rows, ascending.
        """

    def close(self) -> None:
        """Release what is kept for the slot."""


OpenAhead = Callable[[OpenJob, BareSlot], RowsAhead | None]
"""Function (job that opens a slot, the slot) that creates its look-ahead rows; None if the slot has none."""
