"""What a generation is, between the two front ends (HTTP, gRPC) and the decode loop. Plain values, no I/O."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from gateway.tokenizer import Tokenizer
from outrider.wire.kinds import AcceptanceRule as AcceptanceRule  # parts of a request, here for whoever reads one
from outrider.wire.kinds import Drafter as Drafter
from outrider.wire.kinds import DraftLogprobs as DraftLogprobs
from outrider.wire.kinds import TokenKind as TokenKind
from outrider.wire.params import SamplingParams
from outrider.wire.tree_shape import TreeShape


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """A request's wishes; None = the server's default."""

    enabled: bool = True
    num_draft_tokens: int | None = None
    draft_logprobs: DraftLogprobs | None = None
    draft_topk: int | None = None
    acceptance: AcceptanceRule | None = None
    lenience: float | None = None
    drafter: Drafter | None = None
    tree: TreeShape | None = None
    adaptive: bool = False
    """K is chosen round by round, whatever the server's default is."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to one prompt (n answers are n of these with params.choice 0..n-1)."""

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    cache_salt: bytes = b""
    """Cached prefixes are shared under the same one only; empty = with all that have none."""
    key_name: str | None = None
    """Of the API key that asked; None where none is asked for."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one committed token under the target's unmodified distribution, nats."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, log-prob), most likely first."""


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    kind: TokenKind
    text: str
    """The token's own text; parts of a UTF-8 character show as U+FFFD. Empty for stop ids."""
    text_offset: int
    """Characters of output text before this token."""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RoundTimings:
    """Seconds. The parts sum to total."""

    total_s: float = 0.0
    propose_s: float = 0.0
    deliver_s: float = 0.0
    verify_s: float = 0.0
    overhead_s: float = 0.0


@dataclass(slots=True)
class Usage:
    """Running totals of one answer."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_plain_steps: int = 0
    num_wasted_tokens: int = 0
    seed: int = 0
    num_cached_prompt_tokens: int = 0
    """Prompt tokens that the target had in its prefix cache when the answer began."""
    lenience: float | None = None
    """None = exact."""


@dataclass(frozen=True, slots=True)
class RoundOutput:
    """What one round added to an answer. The last one has finish_reason set."""

    tokens: tuple[Token, ...]
    text_delta: str
    """Text that became certain: never half a character, never the start of a stop string."""
    num_drafted: int
    num_accepted: int
    timings: RoundTimings
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the stop id, that ended it (None for the model's own end of sequence)."""
    usage: Usage | None = None
    """Set with finish_reason."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the front ends may know of a served pair."""

    id: str
    context_limit: int
    vocab_size: int
    created: int
    """Unix seconds."""
    draft_id: str | None
    """None when no draft is connected now."""
    drafters: tuple[Drafter, ...] = ()
    """Who may draft for a request now."""
    no_trees: str | None = None
    """Why no proposal can be a tree now; None when it can, or when there is no draft."""


class Generator(Protocol):
    """The seam between front ends and the decode loop. Implemented by `gateway.coordinator.Coordinator`."""

    def models(self) -> tuple[ModelFacts, ...]: ...

    def tokenizer(self, model_id: str) -> Tokenizer:
        """Of one of `models`."""

    def ready(self) -> str | None:
        """None when a request would be served now, else the reason why not."""

    def check_room(self, model_id: str, num_answers: int) -> None:
        """What `admit` would raise for so many answers now: to refuse before anything is tokenised."""

    def admit(self, requests: tuple[GenerationRequest, ...]) -> AdmittedGenerations:
        """Take places in the queue, all or none. The requests are checked already, see `gateway.requests`.

        Raises Overloaded or Unavailable before anything is started.
        """


class AdmittedGenerations(Protocol):
    """Answers in progress. Use as `async with`; leaving the block cancels what still runs and frees every place."""

    @property
    def num_output_tokens(self) -> int:
        """Committed so far by all of them, whether read or not."""

    async def __aenter__(self) -> AdmittedGenerations: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def stream(self) -> AsyncIterator[tuple[int, RoundOutput]]:
        """(index into requests, output) as rounds end, interleaved over the requests."""
