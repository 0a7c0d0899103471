"""What the draft's engine knows of the draft tokens that grow in a slot: protocols.

The table of drafters (outrider/engine/drafters.py) says what grows for a request. For most that is a tree (tree.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from outrider.engine.sampling.noise import Purpose
from outrider.engine.speculation.nodes import NodeKind

if TYPE_CHECKING:
    from outrider.engine.sampling.row_law import RowLaw
    from outrider.engine.speculation.drafter import NodeDrafter, Said
    from outrider.engine.worker.jobs import JobError, OpenJob
    from outrider.engine.worker.slots import BareSlot
    from outrider.wire.params import SamplingParams


NumberKey = tuple[int, int, int]
"""(committed length at which a segment begins, position, candidate) of a uniform number."""


CheckCommit = Callable[["BareSlot", int, Sequence[int]], "JobError | None"]
"""Returns why a slot's tokens cannot become committed[:base_len] + ids; None where they can."""


class Growth(Protocol):
    """Draft tokens that grow under what is committed of a slot, as drafters see them. Nodes are indices, ROOT is the
    last committed token.
    """

    ids: list[int]
    parents: list[int]
    fed: list[int]
    """Nodes in the cache, in order, after all committed tokens."""
    is_root_fed: bool
    purpose: Purpose
    """Of the numbers that nodes are sampled with."""

    @property
    def committed_len(self) -> int:
        """Number of tokens that are committed; ROOT is the last."""

    def depth(self, node: int) -> int:
        """Return the number of draft tokens up to a node."""

    def offers(self, max_num: int) -> list[tuple[float, int]]:
        """Return up to `max_num` nodes worth feeding, each with its acceptance probability, the best first."""

    def feed(self, node: int) -> None:
        """Record that a node lies in the cache behind all that was fed before."""

    def number_keys(self, node: int) -> Sequence[NumberKey]:
        """Return the keys of the numbers with which tokens are sampled after a node, one a token."""

    def extend(self, said: Said, numbers: Sequence[float]) -> None:
        """Take what follows a node. numbers: uniforms for what is sampled there. Raises NonFiniteLogits."""

    def finish_step(self) -> None:
        """Make what follows from all that was taken in a step."""

    def restart(self) -> None:
        """Grow anew: what was fed is gone."""


class SlotGrowth(Growth, Protocol):
    """What grows in a slot of a draft worker. Positions are decided by what an Advance carries: token ids, or what
    stands for them.
    """

    ranks: list[int]
    kinds: dict[int, NodeKind]
    distributions: dict[int, RowLaw]
    """What sampled nodes were drawn from."""
    topk: int | None
    """Number of ids to which these are cut; None = whole."""
    unsent: list[int]
    """New nodes, parents before their children. Whoever sends them empties it."""
    ended: list[int]
    """Nodes that nothing will follow. Whoever sends that empties it."""

    @property
    def known_len(self) -> int:
        """Number of positions that are decided."""

    @property
    def roots(self) -> Mapping[int, int]:
        """By node that a message need not hold: how it names that node."""

    @property
    def is_awaited(self) -> bool:
        """Whether the target waits for all of it, and it is not all grown."""

    @property
    def has_drafts(self) -> bool:
        """Whether anything follows what is decided."""

    @classmethod
    def refusal(cls, drafter: NodeDrafter[Any], *, is_translated: bool) -> str | None:
        """Return why a drafter cannot draft for such a slot; None where it can."""

    @classmethod
    def shares_key(cls, params: SamplingParams) -> object:
        """Return the key of the slots whose draft tokens of a rank are taken to be accepted alike."""

    def check(self, base_len: int, decided: Sequence[Any], check_commit: CheckCommit) -> JobError | None:
        """Return why the slot cannot go on with what was decided from `base_len` on; None where it can."""

    def continues(self, base_len: int, decided: Sequence[Any], *, is_new_lease: bool) -> bool:
        """Return whether it goes on under what was decided from `base_len` on; else another is to begin."""

    def go_on(self, decided: Sequence[Any]) -> list[int]:
        """Commit what was decided behind `known_len`, and grow under it. Return which of `fed` stay in the cache, as
        ascending indices: committed ones and what is below them.
        """

    def resend(self) -> None:
        """Let all that is known be sent again: what was sent may be lost. To a target that has it nothing changes."""


class RowAhead(NamedTuple):
    """A token that is fed behind a node before anybody knows whether it will be that node's child."""

    node: int
    """Its index, below ROOT: no node of the tree."""
    parent: int
    """A node, ROOT or another row ahead."""
    token_id: int


class RowsAhead(Protocol):
    """What a drafter of a draft's slot wants fed beside the nodes of one step, and what it reads of it."""

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        """committed = committed[:base_len] + ids."""

    def begin_step(self) -> None: ...

    def offers(self, tree: Growth, prob: float, node: int) -> Iterator[tuple[float, int]]:
        """Yield rows ahead of an offered node, as far as the tree would feed them: each with its probability of use."""

    def ask(self, node: int) -> None:
        """Have a row fed that was offered."""

    def behind(self, nodes: Sequence[int]) -> list[RowAhead]:
        """Return the rows to be fed behind these nodes, in the order of `note_fed`."""

    def note_fed(self, said: Sequence[Said]) -> None:
        """Take what follows the first of the rows `behind` the nodes, all that were fed."""

    def follow(self, said: Said) -> Said | None:
        """Return what follows the child of a node that has just been made which lies in the cache; None without one."""

    def end_step(self) -> tuple[int, Sequence[int]]:
        """Return how many rows were fed, and the ascending indices of those that became nodes."""

    def close(self) -> None: ...


OpenAhead = Callable[["OpenJob", "BareSlot"], RowsAhead | None]
"""Returns who has further rows fed for a slot; None where nobody does."""
