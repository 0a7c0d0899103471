"""What a servicer hands to an engine thread, and what comes back. Plain values: no protobuf, no tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from outrider.wire.kinds import Drafter
from outrider.wire.params import SamplingParams


class Fault(Enum):
    """Why a job failed; the servicers translate it to WorkerErrorCode."""

    UNKNOWN_SLOT = auto()
    BEHIND = auto()
    STALE_EPOCH = auto()
    EXHAUSTED = auto()
    INVALID = auto()
    INTERNAL = auto()
    CANCELLED = auto()
    DRAINING = auto()


@dataclass(frozen=True, slots=True)
class JobError:
    fault: Fault
    message: str
    known_len: int = 0
    """With BEHIND: tokens of the slot known here."""


def invalid(name: str, value: int, low: int, high: int) -> JobError | None:
    """None when the field of a message is within its range."""
    if low <= value <= high:
        return None
    return JobError(Fault.INVALID, f"{name} is {value}, must be from {low} to {high}")


@dataclass(frozen=True, slots=True)
class Opened:
    committed_len: int


@dataclass(frozen=True, slots=True)
class OpenJob:
    owner: int
    slot_id: int
    committed_ids: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    respond: Callable[[Opened | JobError], None]
    cache_salt: bytes = b""
    deliver_to: str = ""
    """Draft only: address of the target's server."""
    target_epoch: int = 0
    """Draft only."""
    drafter: Drafter | None = None
    """Target only: of its own, who follows the slot."""


@dataclass(frozen=True, slots=True)
class TruncateJob:
    owner: int
    slot_id: int
    committed_len: int
    reason: str


@dataclass(frozen=True, slots=True)
class CloseJob:
    owner: int
    slot_id: int


@dataclass(frozen=True, slots=True)
class OwnerGone:
    """The gateway's stream ended: free all it held."""

    owner: int
