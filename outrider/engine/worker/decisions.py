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
    """What a slot needs from the next forward."""

    RUN = auto()
    """The slot's step: a verify, or the feeding of draft tokens, is ready to run."""
    PREFILL = auto()
    """Feeding of the slot's prompt: no step was requested yet, or the requested step waits for a proposal."""
    NOTHING = auto()
    """Nothing: the slot is between two rounds, and its next request is expected soon."""
    DORMANT = auto()
    """Nothing, for a long time: no step was requested for `DORMANT_S` or longer. If memory runs out, the slot's memory
    is taken first."""


class SlotState(NamedTuple):
    """State of one slot, as the scheduler reads it."""

    key: SlotKey
    want: Need
    num_committed: int
    num_cached: int
    num_after: int
    """Number of tokens in the slot's part of the KV cache after its next step; never more than the whole pool can
    hold."""
    num_blocks: int
    """Number of blocks that the slot holds."""
    num_copied: int = 0
    """Number of blocks that must be copied before the next token is written: 1 if its block is shared (copy-on-write),
    else 0."""
    num_source_blocks: int = 0
    """Number of blocks that the encoder's source takes, whether the slot holds them yet or not."""
    num_to_encode: int = 0
    """Number of source tokens that the encoder has not read yet; it reads all of them in one forward."""
    max_narrow_tokens: int = MAX_NARROW
    """Maximum number of uncached tokens that can run in the slot's step itself, without a prefill before it."""
    scheduling: Scheduling = Scheduling()
    """Caller and its weight, and the request's priority."""

    @property
    def num_to_read(self) -> int:
        """Number of tokens that the model has to read for the slot: its committed tokens, cached or not, and the source
        tokens that are not encoded yet.
        """
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
        """Number of tokens to prefill before the slot's step; 0 if the uncached ones fit in the step itself.

        An encoder's source is fed first, in one piece; then the prompt, in chunks.
        """
        if self.num_to_encode:
            return self.num_to_encode
        num_uncached = self.num_committed - self.num_cached
        if num_uncached <= self.max_narrow_tokens:
            return 0
        return num_uncached - 1


@dataclass(frozen=True, slots=True)
class Preempt:
    """Decision to preempt a slot, i.e. to free its cache blocks for others. The caller then has to plan again, because
    the number of freed blocks is known only afterwards.
    """

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Admit:
    """Decision to give cache blocks to a slot that holds none, because it is new or was preempted. The slot first takes
    over the blocks of its tokens' longest prefix in the prefix cache. A `Run` or `PrefillSlot` of the same slot, or a
    `SkipSlot`, follows.
    """

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Run:
    """Decision to run a slot's step in the next forward."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class PrefillSlot:
    """Decision to prefill at most `num_tokens` of a slot's prompt in the next forward."""

    key: SlotKey
    num_tokens: int


class WaitReason(Enum):
    """Reason why a slot with work is left out of a forward."""

    MEMORY = auto()
    """There are too few free blocks for the slot, or a slot before it in the queue waits for blocks."""
    BUDGET = auto()
    """The prompts of slots before this one in the queue fill the step's token budget."""


@dataclass(frozen=True, slots=True)
class SkipSlot:
    """Decision to leave a slot with work out of the next forward."""

    key: SlotKey
    why: WaitReason


Decision = Preempt | Admit | Run | PrefillSlot | SkipSlot
