"""The state of each slot that the scheduler reads, and the decisions that it returns: plain values. No torch.

`StepScheduler` creates a `SlotState` for each slot, `Scheduler.plan` returns decisions, and `StepScheduler` applies
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from outrider.engine.worker.jobs import MAX_NARROW, SlotKey
from outrider.wire.requests.scheduling import Scheduling


class Need(Enum):
    """Work that a slot needs from the worker's next forward."""

    RUN = auto()
    """A verify or decode of the slot or, in a draft worker, the feeding of its draft tokens."""
    PREFILL = auto()
    """A prefill of the slot's uncached tokens; nothing else is ready to run for the slot."""
    NOTHING = auto()
    """Nothing in this forward; the slot's last message is less than `DORMANT_S` seconds old."""
    DORMANT = auto()
    """Nothing: no message has asked for work on the slot for `DORMANT_S` seconds or longer. If memory runs out, the
    slot's memory is taken first."""


class SlotState(NamedTuple):
    """State of one slot, as the scheduler reads it."""

    key: SlotKey
    want: Need
    num_committed: int
    num_cached: int
    num_after: int
    """Number of the slot's tokens in the KV cache after its next step; at most as many as the worker's whole cache can
    hold."""
    num_blocks: int
    """Number of blocks that the slot holds."""
    num_copied: int = 0
    """Number of blocks that must be copied before the slot's next token is written: 1 if the block for that token is
    shared (copy-on-write), else 0."""
    num_source_blocks: int = 0
    """Number of blocks that the encoder's source takes, whether the slot holds them yet or not."""
    num_to_encode: int = 0
    """Number of source tokens that the encoder has not read yet; it reads all of them in one forward."""
    max_narrow_tokens: int = MAX_NARROW
    """Maximum number of uncached tokens with which the slot can verify or draft. With more, a prefill comes first."""
    scheduling: Scheduling = Scheduling()
    """Caller of the slot's request, the caller's scheduling weight, and the request's priority."""

    @property
    def num_to_read(self) -> int:
        """Number of committed tokens, cached or not, plus the source tokens that the encoder has not read yet."""
        return self.num_committed + self.num_to_encode

    @property
    def has_memory(self) -> bool:
        """Whether the slot holds cache blocks and is not dormant."""
        return self.num_blocks > 0 and self.want is not Need.DORMANT

    @property
    def is_waiting(self) -> bool:
        """Whether the slot waits to be admitted or prefilled."""
        if self.want is Need.RUN:
            return bool(not self.num_blocks or self.num_to_feed)
        return self.want is Need.PREFILL and bool(self.num_to_feed)

    @property
    def num_to_feed(self) -> int:
        """Number of tokens to prefill before the slot can verify or draft: the encoder's whole source if it is not
        encoded yet, otherwise all uncached tokens but the last. It is 0 if at most `max_narrow_tokens` are uncached.
        """
        if self.num_to_encode:
            return self.num_to_encode
        num_uncached = self.num_committed - self.num_cached
        if num_uncached <= self.max_narrow_tokens:
            return 0
        return num_uncached - 1


@dataclass(frozen=True, slots=True)
class Preempt:
    """Decision to preempt a slot, i.e. to free its cache blocks for other slots. After it is applied the scheduler
    decides again about the step, because only then is the number of free blocks known.
    """

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Admit:
    """Decision to give cache blocks to a slot that holds none, because it is new or was preempted. The slot first
    adopts its tokens' longest prefix in the prefix cache. A second decision about the same step runs, prefills or skips
    the slot.
    """

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Run:
    """Decision to verify or decode a slot in the next forward or, in a draft worker, to feed its draft tokens."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class PrefillSlot:
    """Decision to prefill at most `num_tokens` of a slot's prompt or of its encoder's source in the next forward."""

    key: SlotKey
    num_tokens: int


class WaitReason(Enum):
    """Reason why a slot with work is left out of a forward."""

    MEMORY = auto()
    """There are too few free blocks for the slot, or a slot before it in the queue waits for blocks."""
    BUDGET = auto()
    """The prompts of slots earlier in the queue use up the number of prompt tokens that the step may have."""


@dataclass(frozen=True, slots=True)
class SkipSlot:
    """Decision to leave a slot with work out of the next forward."""

    key: SlotKey
    why: WaitReason


Decision = Preempt | Admit | Run | PrefillSlot | SkipSlot
