"""Leases, deliveries and verdicts as plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from outrider.engine.speculation.beam import Hypothesis, Level
from outrider.engine.worker.jobs import JobError
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.drafters import Drafter
from outrider.wire.kinds import DraftTokenKind, TokenKind


class Finish(Enum):
    """Why an answer ended."""

    STOP = pb.FINISH_REASON_STOP
    LENGTH = pb.FINISH_REASON_LENGTH


class Fallback(Enum):
    """Why a step that was to have drafts had none."""

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
    ticket: int
    until_len: int
    is_drafted: bool
    """A draft has been told of the slot."""
    arrived_s: float
    respond: Callable[[Verdict | JobError], None]
    """Takes a verdict a step."""
    levels: tuple[Level, ...] = ()
    """Of a beam search, all that is decided."""
    others: Sequence[tuple[int, bool]] = ()
    """Ticket and is_drafted of further drafts."""

    @property
    def tickets(self) -> Sequence[tuple[int, bool]]:
        return ((self.ticket, self.is_drafted), *self.others)


@dataclass(frozen=True, slots=True)
class ExtendJob:
    """Let a lease run on."""

    owner: int
    slot_id: int
    ticket: int
    until_len: int


@dataclass(frozen=True, slots=True)
class RefusedDelivery:
    """Note that a delivery under this ticket broke a rule."""

    ticket: int
    why: str


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probs of one committed token under the unmodified distribution, in nats."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    rank: int = 0
    """Of a prompt's token: 1 + how many are likelier. 0 = not said."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one step, and what its forward was fed."""

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
class DraftOutcome:
    """What came of one of several drafts in a step."""

    num_drafted: int
    """Nodes that none of those before it has drafted, too."""
    num_accepted: int
    is_verified: bool
    """Something of it was verified."""
    hit: bool | None
    is_refused: bool
    """What it delivered broke a rule."""
    num_wasted: int


Ranked = tuple[int, float]
"""A token id and its log-prob, in nats."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Where the path of accepted draft tokens ended with one refused."""

    parent: int
    """Index of the last accepted one; -1 = none was."""
    token_id: int
    """What the target said there."""
    target: Sequence[Ranked]
    """Its best, best first, under its law; at temperature 0 under that of temperature 1."""
    draft_law: Sequence[Ranked]
    """The best of what the draft drew from there; empty where nothing was drawn."""
    draft_guesses: Sequence[int]
    """Elsewhere what it guessed there, best first."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a step verified and why it went no further."""

    ids: Sequence[int]
    parents: Sequence[int]
    """Of each the index of the one that it follows; -1 = the last committed token."""
    kinds: Sequence[DraftTokenKind]
    accepted: Sequence[int]
    """Indices of those kept, first to last."""
    rejection: Rejection | None
    """None where all was kept."""
    draft_us: int | None
    """What draft workers spent on it, in microseconds; None where none drafted or said."""

    def cut(self, num_tokens: int) -> Explanation:
        """Return it for a step of which so many tokens stay: what was said behind an end was never said."""
        return self if num_tokens > len(self.accepted) else replace(self, rejection=None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one step of a slot."""

    committed_len: int
    """Length before the step, in tokens."""
    token_ids: tuple[int, ...]
    """Ids committed after it, cut at the first stop."""
    kinds: tuple[TokenKind, ...]
    num_drafted: int
    depth: int
    """Most draft tokens that might have been kept: num_drafted but for a tree."""
    num_accepted: int
    """Draft tokens kept by the rule, before stops cut."""
    finish: Finish | None
    stop_token_id: int | None
    logprobs: tuple[Logprobs, ...]
    fallback: Fallback | None
    timings: Timings
    num_cached_tokens: int
    """Prompt tokens that the slot found in the prefix cache when it first began."""
    drafter: Drafter | None
    """Who drafted what was verified; None of a plain step, and of what the grammar left no choice of."""
    hit: bool | None
    """Whether delivered drafts lay ready when the slot could go on; None where none had come yet."""
    num_wasted: int
    """Drafts on the committed path that came after their step, since the last verdict."""
    num_foretold: int = 0
    """Tokens that the slot's prediction had foretold."""
    levels: tuple[Level, ...] = ()
    """Of a beam search, in place of token_ids."""
    hypotheses: tuple[Hypothesis, ...] = ()
    """Answers of a beam search that has finished, best first."""
    num_own_drafted: int = 0
    """Of a tree of several sources, drafts that the target alone has made, among num_drafted."""
    num_own_accepted: int = 0
    drafts: Sequence[DraftOutcome] = ()
    """Of several drafts, each by itself, in the order of their tickets."""
    explanation: Explanation | None = None
    """Where the slot asks for it."""
    prompt_logprobs: Sequence[Logprobs] = ()
    """Of the prompt's tokens from the second on, in a slot's first verdict where they are wanted."""
