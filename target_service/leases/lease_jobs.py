"""Leases, deliveries and verdicts as plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from outrider.engine.sampling.reported import Reported
from outrider.engine.speculation.beam import BeamLevel, Hypothesis
from outrider.engine.worker.jobs import JobError
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TokenKind
from outrider.wire.requests.drafters import Drafter


class Finish(IntEnum):
    """The finish reason of an output, by its number in the protocol."""

    STOP = pb.FINISH_REASON_STOP
    LENGTH = pb.FINISH_REASON_LENGTH


class Fallback(IntEnum):
    """The reason why a step that was to have draft tokens had none, by its number in the protocol."""

    LATE = tpb.FALLBACK_REASON_LATE
    REFUSED = tpb.FALLBACK_REASON_REFUSED
    DOES_NOT_PAY = tpb.FALLBACK_REASON_DOES_NOT_PAY


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """Begin a slot's lease, after replacing its committed tokens from base_len on."""

    owner: int
    """Number of the gateway's stream."""
    slot_id: int
    base_len: int
    """Number of committed tokens that stay."""
    committed_ids: tuple[int, ...]
    """Ids of the committed tokens from base_len on."""
    tickets: Sequence[tuple[int, bool]]
    """Ticket of each draft worker, and whether it drafts for the slot; at least one. The first names the lease."""
    until_len: int
    """Committed length, in tokens, at which the lease ends."""
    arrived_s: float
    """Monotonic time at which the message arrived, in seconds."""
    respond: Callable[[Verdict | JobError], None]
    """Called with the verdict of each step, or once with an error."""
    levels: tuple[BeamLevel, ...] = ()
    """Levels of a beam search that are decided already."""


@dataclass(frozen=True, slots=True)
class ExtendJob:
    """Extend a lease."""

    owner: int
    """Number of the gateway's stream."""
    slot_id: int
    ticket: int
    """First ticket of the lease."""
    until_len: int
    """Committed length, in tokens, at which the lease ends now."""


@dataclass(frozen=True, slots=True)
class RefusedDelivery:
    """Record that a delivery under this ticket broke a rule."""

    ticket: int
    why: str


class Timings(NamedTuple):
    """Durations of one step in microseconds, and the size of its forward. The message has the same fields."""

    wait_us: int
    queue_us: int
    forward_us: int
    accept_us: int
    batch_size: int
    num_batch_tokens: int
    """Tokens that the forward was fed, those of all slots and of pieces of prompts."""


class DraftOutcome(NamedTuple):
    """The outcome of one drafter's draft tokens in a step. The message has the same fields."""

    num_drafted: int = 0
    """Verified nodes, without those that a drafter before it proposed, too."""
    num_accepted: int = 0
    """Accepted nodes among num_drafted."""
    is_verified: bool = False
    """Whether nodes of it were verified, even if all count for an earlier drafter."""
    hit: bool | None = None
    """Whether draft tokens were buffered when the slot became ready; None before the first delivery."""
    is_refused: bool = False
    """Whether a delivery broke a rule."""
    num_wasted: int = 0
    """Draft tokens on the committed path that arrived after their step, since the last verdict."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one step of a slot."""

    committed_len: int
    """Committed length before the step, in tokens."""
    token_ids: Sequence[int]
    """Ids that the step commits, cut at the first stop; none of a beam search."""
    kinds: Sequence[TokenKind]
    """Kind of each committed token, or of each level."""
    finish: Finish | None
    """Finish reason; None where the output goes on."""
    outcomes: Sequence[DraftOutcome]
    """Outcome of each draft worker, in the order of the tickets, and last of the target's own drafter."""
    drafter: Drafter | None
    """Drafter of the verified tokens; None for a plain step, and for tokens that the grammar forced."""
    depth: int
    """Depth of the draft tree: the maximum number of draft tokens that might have been accepted."""
    fallback: Fallback | None
    """Why no draft token was verified, where some were to be; else None."""
    timings: Timings
    num_cached_tokens: int
    """Prompt tokens that were in the prefix cache when the slot began."""
    num_foretold: int = 0
    """Committed tokens that the request's prediction had proposed."""
    logprobs: Sequence[Reported] = ()
    """Log-probs of each committed token, where the request has logprobs."""
    prompt_logprobs: Sequence[tuple[Reported, int]] = ()
    """In a slot's first verdict, where the request has prompt_logprobs: log-probs and rank (1 for the likeliest) of
    each prompt token from the second on."""
    explanation: pb.Explanation | None = None
    """Explanation of the step, where the request has `explain`: the message that goes to the user."""
    levels: Sequence[BeamLevel] = ()
    """Levels that a beam search decided, in place of token_ids."""
    hypotheses: Sequence[Hypothesis] = ()
    """Outputs of a beam search that has finished, best first."""

    @property
    def num_drafted(self) -> int:
        """Verified draft tokens of all drafters."""
        return sum(outcome.num_drafted for outcome in self.outcomes)

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens of all drafters, those behind a stop included."""
        return sum(outcome.num_accepted for outcome in self.outcomes)
