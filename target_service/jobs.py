"""Verify and its verdict, as plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from outrider.engine.jobs import JobError
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TokenKind


class Finish(Enum):
    STOP = pb.FINISH_REASON_STOP
    LENGTH = pb.FINISH_REASON_LENGTH


class Fallback(Enum):
    """Why a verify that asked for drafts became a plain step."""

    LATE = tpb.FALLBACK_REASON_LATE
    REFUSED = tpb.FALLBACK_REASON_REFUSED


@dataclass(frozen=True, slots=True)
class VerifyJob:
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
    """Drafted here, and num_draft_tokens is 0."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one committed token under the unmodified distribution."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    wait_s: float
    queue_s: float
    forward_s: float
    accept_s: float
    batch_size: int
    num_batch_tokens: int = 0
    """Fed by the forward, all slots and pieces of prompts together."""
    num_batch_prompt_tokens: int = 0
    """Of these, tokens of pieces of prompts."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verify decided."""

    committed_len: int
    """Of the request this answers."""
    token_ids: tuple[int, ...]
    """Now committed after it, cut at the first stop."""
    kinds: tuple[TokenKind, ...]
    num_drafted: int
    num_accepted: int
    """By the rule, before stops cut."""
    finish: Finish | None
    stop_token_id: int | None
    logprobs: tuple[Logprobs, ...]
    fallback: Fallback | None
    timings: Timings
    num_cached_tokens: int
    """Prompt tokens that the slot found in the prefix cache when it first began."""
    drafter_has_next: bool
    """The slot's own drafter has something to say behind these tokens."""
