"""What the scheduler reads of each slot, and what it decides on it: plain values. No torch.

`StepScheduler` creates a `SlotDemand` for each slot, `Scheduler.plan` returns decisions, and `StepScheduler` applies
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from outrider.engine.worker.jobs import MAX_NARROW, SlotKey
from outrider.wire.requests.scheduling import Scheduling


class Need(Enum):
    """The reason why a slot needs the next forward."""

    STEP = auto()
    """A verify, or one more draft token, is ready to run."""
    PREFILL = auto()
    """The prompt has to be fed: no step was requested yet, or the requested step waits for a proposal."""
    NOTHING = auto()
    """The slot is between two rounds and will be back."""
    DORMANT = auto()
    """No step was requested for `DORMANT_S` or longer: its memory is taken first."""


class SlotState(NamedTuple):
    """State of one slot, as the scheduler reads it."""

    key: SlotKey
    want: Need
    num_committed: int
    num_cached: int
    num_after: int
    """Number of tokens in the cache after the next step; never more than fit the pool alone."""
    num_blocks: int
    """Number of blocks that the slot holds."""
    num_copied: int = 0
    """Number of blocks that copy-on-write costs the next token: 1 when its block is shared, else 0."""
    num_source_blocks: int = 0
    """Number of blocks of the encoder's source, held or not."""
    num_to_encode: int = 0
    """Number of source tokens that the encoder has yet to read, all in one forward."""
    most_narrow: int = MAX_NARROW
    """Maximum number of uncached tokens that run in the slot's step without a prefill before it."""
    scheduling: Scheduling = Scheduling()
    """Caller, its weight, and the request's priority."""

    @property
    def num_to_read(self) -> int:
        """Return the number of committed tokens plus source tokens that are not encoded."""
        return self.num_committed + self.num_to_encode

    @property
    def has_memory(self) -> bool:
        """Return whether the slot holds blocks and is not dormant, so that it may keep them."""
        return self.num_blocks > 0 and self.want is not Need.DORMANT

    @property
    def is_waiting(self) -> bool:
        """Return whether the slot waits to be admitted or prefilled."""
        if self.want is Need.STEP:
            return bool(not self.num_blocks or self.num_to_feed)
        return self.want is Need.PREFILL and bool(self.num_to_feed)

    @property
    def num_to_feed(self) -> int:
        """Return the number of tokens to prefill before the slot's step; 0 when the uncached ones fit in the step
        itself.

        The source comes first, in one piece; then the prompt, in chunks.
        """
        if self.num_to_encode:
            return self.num_to_encode
        num_uncached = self.num_committed - self.num_cached
        if num_uncached <= self.most_narrow:
            return 0
        return num_uncached - 1


@dataclass(frozen=True, slots=True)
class Preempt:
    """Preempt the slot, then plan again: only afterwards is it known how many blocks became free."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Admit:
    """Admit the slot: adopt the cached prefix of its tokens. A `Run` or `Feed` of the same slot follows."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Run:
    """Run the slot's step in the next forward."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class PrefillSlot:
    """Prefill at most `num_tokens` of the slot's prompt in the next forward."""

    key: SlotKey
    num_tokens: int


class WaitReason(Enum):
    """The reason of a `Wait`."""

    MEMORY = auto()
    """No free blocks, or an earlier slot in the queue waits for some."""
    BUDGET = auto()
    """Earlier prompts fill the step's token budget."""


@dataclass(frozen=True, slots=True)
class SkipSlot:
    """Leave a slot that has work out of the next forward."""

    key: SlotKey
    why: WaitReason


Decision = Preempt | Admit | Run | PrefillSlot | SkipSlot
