"""A verify and its verdict, as plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from outrider.engine.worker.jobs import JobError
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TokenKind


class Finish(Enum):
    """Why an answer ended."""

    STOP = pb.FINISH_REASON_STOP
    LENGTH = pb.FINISH_REASON_LENGTH


class Fallback(Enum):
    """Why a verify that asked for drafts became a plain step."""

    LATE = tpb.FALLBACK_REASON_LATE
    REFUSED = tpb.FALLBACK_REASON_REFUSED


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """Verify a proposal, or make a plain step."""

    owner: int
    slot_id: int
    base_len: int
    committed_ids: tuple[int, ...]
    num_draft_tokens: int
    ticket: int
    wait_budget_s: float
    arrived_s: float
    respond: Callable[[Verdict | JobError], None]
    num_own_draft_tokens: int = 0
    """K of drafts that the target makes itself; num_draft_tokens is then 0."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probs of one committed token under the unmodified distribution, in nats."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one verify, and what its forward was fed."""

    wait_s: float
    queue_s: float
    forward_s: float
    accept_s: float
    batch_size: int
    num_batch_tokens: int = 0
    """Tokens fed by the forward, all slots and pieces of prompts together."""
    num_batch_prompt_tokens: int = 0
    """Tokens among num_batch_tokens that belong to pieces of prompts."""
    step: int = 0
    """Number of the forward in the target's life, from 1."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one verify."""

    committed_len: int
    """Length of the request that this answers, in tokens."""
    token_ids: tuple[int, ...]
    """Ids committed after it, cut at the first stop."""
    kinds: tuple[TokenKind, ...]
    num_drafted: int
    num_accepted: int
    """Draft tokens kept by the rule, before stops cut."""
    finish: Finish | None
    stop_token_id: int | None
    logprobs: tuple[Logprobs, ...]
    fallback: Fallback | None
    timings: Timings
    num_cached_tokens: int
    """Prompt tokens that the slot found in the prefix cache when it first began."""
    drafter_has_next: bool
    """Whether the slot's own drafter has a proposal after these tokens."""
