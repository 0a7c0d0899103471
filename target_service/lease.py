"""What the target knows of a slot that steps by itself, and a slot as it goes into a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.sampling.chain import Chain
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.tree_acceptance import DraftTree
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.worker.slots import Slot
from outrider.wire.kinds import Drafter
from outrider.wire.speculation import Speculation
from target_service.jobs import Fallback, VerifyJob
from target_service.parked import Parked, ParkedNode

ETA_WEIGHT = 0.25
"""Weight of a new arrival in what a slot's guesses usually take. Doubling it follows twice as fast, and chance, too."""


@dataclass(slots=True)
class Lease:
    """A slot that steps by itself until it has `until_len` committed tokens."""

    job: VerifyJob
    slot: Slot
    speculation: Speculation
    until_len: int
    shares: SlotShares
    """Of what is delivered."""
    own_shares: SlotShares
    """Of what the slot's own drafter guesses."""
    ready_s: float
    """When it could go on: its Verify or Extend came, or its last verdict left."""
    live: bool
    """Guesses came since they were last waited for in vain."""
    parked: Parked = field(default_factory=Parked)
    heard: bool = False
    """Something was delivered under the ticket."""
    eta_s: float | None = None
    """How long after a verdict the next guesses usually come, where none lay ready."""
    gap_s: float | None = None
    """How long after some the next ones usually come."""
    arrived_s: float = 0.0
    """When the last ones came."""
    lacks: bool = True
    """Nothing lay ready for the next step when the last verdict left, and nothing has come since."""
    hit: bool = False
    """Something lay ready then."""
    held_s: float = 0.0
    """How long the next step has been held back for it."""
    num_wasted: int = 0
    refused: str | None = None
    """What was wrong with a delivery since the last verdict."""

    @property
    def room(self) -> int:
        """Return how many draft tokens a step may use: it commits one more than it accepts."""
        return max(0, min(self.speculation.max_draft_tokens, self.slot.max_len - len(self.slot.committed) - 1))

    @property
    def runs(self) -> bool:
        """Whether it may take another step."""
        return len(self.slot.committed) < self.until_len

    def arrived(self, now: float) -> None:
        """Note that guesses came."""
        self.live = self.heard = True
        if self.lacks:
            self.lacks = False
            self.eta_s = _mean(self.eta_s, max(0.0, now - self.ready_s))
        else:
            self.gap_s = _mean(self.gap_s, now - self.arrived_s)
        self.arrived_s = now

    @property
    def next_s(self) -> tuple[float, float] | None:
        """Return since when the next guesses are on their way, and how long that usually takes; None where that is not
        known.
        """
        since_s, takes_s = (self.ready_s, self.eta_s) if self.lacks else (self.arrived_s, self.gap_s)
        return None if takes_s is None else (since_s, takes_s)


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + ETA_WEIGHT * (new - before)


@dataclass(frozen=True)
class Ready:
    """A slot that goes into the next forward."""

    slot: Slot
    draft_ids: list[int]
    draft_laws: list[RowLaw] | None
    """What each of draft_ids was drawn from, of a tree what the children of each of its inner nodes were; None where
    that does not matter, and for plain."""
    tree: DraftTree | None = None
    """None for a chain."""
    guessed: bool = False
    """Under `rejection`: drafts are kept where the target draws the same with numbers of the position. That is as often
    as by the other rules where there was no choice, and exact even where they were copied from what the same numbers
    once said."""
    drafter: Drafter | None = None
    fallback: Fallback | None = None

    def noise_rounds(self, count: int) -> Sequence[int]:
        """Return what its noise after 0, 1, ... drafts is keyed by beside the position: the round; of guesses, which
        know no rounds like plain steps, the position again.
        """
        start = len(self.slot.committed)
        return range(start, start + count) if self.guessed else [start] * count


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a slot's step might verify, best first."""

    lease: Lease
    gains: Sequence[float]
    """The chance of each to be kept."""
    own: Chain | None = None
    """Of its own drafter; else they are `nodes`."""
    nodes: Sequence[tuple[float, ParkedNode, int]] = ()
    """Each with its chance and the index of its parent among them."""
    must: int = 0
    """So many of them are verified whatever they cost."""
