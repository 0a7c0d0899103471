"""Leases, deliveries and verdicts as plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from outrider.engine.sampling.reported import Reported
from outrider.engine.speculation.beam import Hypothesis, Level
from outrider.engine.worker.jobs import JobError
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TokenKind
from outrider.wire.requests.drafters import Drafter


class Finish(IntEnum):
    """Why an answer ended, as the protocol numbers it."""

    STOP = pb.FINISH_REASON_STOP
    LENGTH = pb.FINISH_REASON_LENGTH


class Fallback(IntEnum):
    """Why a step that was to have drafts had none, as the protocol numbers it."""

    LATE = tpb.FALLBACK_REASON_LATE
    REFUSED = tpb.FALLBACK_REASON_REFUSED
    DOES_NOT_PAY = tpb.FALLBACK_REASON_DOES_NOT_PAY


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """Start a slot's lease, or set it back."""

    owner: int
    slot_id: int
    base_len: int
    committed_ids: tuple[int, ...]
    tickets: Sequence[tuple[int, bool]]
    """Ticket of each draft worker, and whether that drafts for the slot; at least one. The first names the lease."""
    until_len: int
    arrived_s: float
    respond: Callable[[Verdict | JobError], None]
    """Called with one verdict a step."""
    levels: tuple[Level, ...] = ()
    """Levels of a beam search that are decided."""


@dataclass(frozen=True, slots=True)
class ExtendJob:
    """Let a lease run on."""

    owner: int
    slot_id: int
    ticket: int
    until_len: int


@dataclass(frozen=True, slots=True)
class RefusedDelivery:
    """Record that a delivery under this ticket broke a rule."""

    ticket: int
    why: str


class Timings(NamedTuple):
    """Durations of one step in microseconds, and what its forward was fed. Its fields are the message's."""

    wait_us: int
    queue_us: int
    forward_us: int
    accept_us: int
    batch_size: int
    num_batch_tokens: int
    """Tokens fed by the forward, all slots and pieces of prompts together."""


class DraftOutcome(NamedTuple):
    """The outcome of one drafter's draft tokens in a step. Its fields are the message's."""

    num_drafted: int = 0
    """Nodes verified, except those of a drafter that is tested before it."""
    num_accepted: int = 0
    """Nodes accepted among num_drafted."""
    is_verified: bool = False
    """Some of its nodes were verified, perhaps counted for another drafter."""
    hit: bool | None = None
    """Whether draft tokens were buffered when the slot became ready; None before the first delivery."""
    is_refused: bool = False
    """A delivery broke a rule."""
    num_wasted: int = 0
    """Draft tokens on the committed path that arrived after their step, since the last verdict."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one step of a slot."""

    committed_len: int
    """Length before the step, in tokens."""
    token_ids: Sequence[int]
    """Ids committed after it, cut at the first stop; none of a beam search."""
    kinds: Sequence[TokenKind]
    """One a token, or a level."""
    finish: Finish | None
    outcomes: Sequence[DraftOutcome]
    """Outcome of each draft worker, in the order of the tickets, and last of the target's own drafter."""
    drafter: Drafter | None
    """Who drafted; None for a plain step, and for tokens that the grammar forced."""
    depth: int
    """Most draft tokens that might have been accepted: depth of the draft tree."""
    fallback: Fallback | None
    timings: Timings
    num_cached_tokens: int
    """Prompt tokens that the slot found in the prefix cache when it first began."""
    num_foretold: int = 0
    """Committed tokens that the slot's prediction contained."""
    logprobs: Sequence[Reported] = ()
    """One a token where the slot asks for them."""
    prompt_logprobs: Sequence[tuple[Reported, int]] = ()
    """Of the prompt's tokens from the second on, in a slot's first verdict where they are asked for, each with its
    rank, 1 for the likeliest."""
    explanation: pb.Explanation | None = None
    """Where the slot asks for it. No worker reads it, so it is the message that the user's answer carries."""
    levels: Sequence[Level] = ()
    """Of a beam search, in place of token_ids."""
    hypotheses: Sequence[Hypothesis] = ()
    """Answers of a beam search that has finished, best first."""

    @property
    def num_drafted(self) -> int:
        return sum(outcome.num_drafted for outcome in self.outcomes)

    @property
    def num_accepted(self) -> int:
        """Return the draft tokens that the rule accepted, before stops cut."""
        return sum(outcome.num_accepted for outcome in self.outcomes)
