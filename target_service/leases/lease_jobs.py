"""Messages about leases as plain values: the gateway's jobs, refused deliveries, and the verdict of a step."""

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
    """Finish reason of an output; its value is the number in the protocol."""

    STOP = pb.FINISH_REASON_STOP
    LENGTH = pb.FINISH_REASON_LENGTH


class Fallback(IntEnum):
    """Reason why a step verified no draft token of a slot. Its value is the number in the protocol."""

    LATE = tpb.FALLBACK_REASON_LATE
    REFUSED = tpb.FALLBACK_REASON_REFUSED
    DOES_NOT_PAY = tpb.FALLBACK_REASON_DOES_NOT_PAY


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """Job of a Verify message: it replaces a slot's committed tokens from base_len on, and begins a lease of the
    slot.
    """

    owner: int
    """Number of the gateway's stream that sent the message."""
    slot_id: int
    base_len: int
    """Number of the slot's committed tokens, from the first on, that are kept; `committed_ids` follow them."""
    committed_ids: tuple[int, ...]
    """Token ids that replace the committed tokens from base_len on."""
    tickets: Sequence[tuple[int, bool]]
    """For each draft worker: its ticket, and whether it drafts for the slot. There is at least one; the first ticket
    names the lease."""
    lease_end_len: int
    """Committed length, in tokens, at which the lease ends."""
    arrived_s: float
    """Monotonic time at which the message arrived, in seconds."""
    respond: Callable[[Verdict | JobError], None]
    """Function that is called with the verdict of each step, or once with an error."""
    levels: tuple[BeamLevel, ...] = ()
    """Levels of a beam search that were decided before this lease; empty for other requests."""


@dataclass(frozen=True, slots=True)
class ExtendJob:
    """Job of an Extend message: it moves the end of a lease to a larger committed length."""

    owner: int
    """Number of the gateway's stream that sent the message."""
    slot_id: int
    ticket: int
    """First ticket of the lease, which names it."""
    lease_end_len: int
    """New committed length, in tokens, at which the lease ends."""


@dataclass(frozen=True, slots=True)
class RefusedDelivery:
    """Job that records that a delivery under a ticket broke a rule of the protocol."""

    ticket: int
    why: str


class Timings(NamedTuple):
    """Durations of one step in microseconds, and the size of its forward. The protocol's `Verdict` has these fields."""

    wait_us: int
    queue_us: int
    forward_us: int
    accept_us: int
    batch_size: int
    num_batch_tokens: int
    """Number of tokens in the forward: those of all slots that step, and of the prompts that are prefilled with
    them."""


class DraftOutcome(NamedTuple):
    """What became of one drafter's draft tokens in a step: how many were verified, accepted, or too late."""

    num_drafted: int = 0
    """Number of verified nodes that this drafter proposed. A node that several drafters proposed counts only for the
    first of them."""
    num_accepted: int = 0
    """Number of accepted nodes that this drafter proposed. A node that several drafters proposed counts only for the
    first of them."""
    is_verified: bool = False
    """Whether any node that this drafter proposed was verified, even one that another drafter proposed, too."""
    has_drafts: bool | None = None
    """Whether this draft worker's tokens were buffered when the slot became ready. None before its first delivery, and
    for the target's own drafter."""
    is_refused: bool = False
    """Whether a delivery of this draft worker broke a rule of the protocol since the last verdict."""
    num_wasted: int = 0
    """Number of this draft worker's tokens, since the last verdict, that equal committed tokens but arrived too late to
    be verified."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one step of a slot: the tokens that it committed, and how they came about."""

    committed_len: int
    """Committed length before the step, in tokens."""
    token_ids: Sequence[int]
    """Token ids that the step commits, up to the first stop; empty for a beam search."""
    kinds: Sequence[TokenKind]
    """Kind (accepted, recovered, bonus or plain) of each committed token; for a beam search, of each decided level."""
    finish: Finish | None
    """Finish reason of the output; None if it continues."""
    outcomes: Sequence[DraftOutcome]
    """What became of each drafter's tokens: one entry for each draft worker, in the order of the tickets, and a last
    one for the target's own drafter."""
    drafter: Drafter | None
    """Drafter of the verified tokens; None if no draft token was verified, or if the grammar forced them."""
    depth: int
    """Depth of the verified draft tree: the maximum number of draft tokens that could have been accepted. 0 = none was
    verified."""
    fallback: Fallback | None
    """Reason why no draft token was verified: late, refused or does not pay. None if some were, or if none of these is
    the reason."""
    timings: Timings
    num_cached_tokens: int
    """Number of prompt tokens that came from the prefix cache when the slot began."""
    num_predicted: int = 0
    """Number of the step's committed tokens that the request's prediction had proposed as draft tokens, verified or
    not."""
    logprobs: Sequence[Reported] = ()
    """Log-probs of each committed token if the request asks for logprobs; else empty."""
    prompt_logprobs: Sequence[tuple[Reported, int]] = ()
    """For each prompt token from the second on: its log-probs, and its rank (1 = likeliest). Only the first verdict of
    a slot has them, and only if the request asks for prompt_logprobs; else empty."""
    explanation: pb.Explanation | None = None
    """Explanation of the step, as the message that goes to the user, if the request has `explain`; else None."""
    levels: Sequence[BeamLevel] = ()
    """Levels that a beam search decided in this step, in place of token_ids; empty for other requests."""
    hypotheses: Sequence[Hypothesis] = ()
    """Outputs of a beam search, best first, in its last verdict; else empty."""

    @property
    def num_drafted(self) -> int:
        """Number of verified draft tokens of all drafters."""
        return sum(outcome.num_drafted for outcome in self.outcomes)

    @property
    def num_accepted(self) -> int:
        """Number of accepted draft tokens of all drafters, including those after a stop, which are not committed."""
        return sum(outcome.num_accepted for outcome in self.outcomes)
