"""Values that pass between the two front ends (HTTP, gRPC) and the decode loop. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from gateway.tokenizer import Tokenizer
from gateway.tools.reading import Reading
from outrider.v1 import common_pb2 as pb
from outrider.v1 import gateway_pb2
from outrider.wire.kinds import AcceptanceRule as AcceptanceRule
from outrider.wire.kinds import DraftLogprobs as DraftLogprobs
from outrider.wire.kinds import TokenKind as TokenKind
from outrider.wire.requests.drafters import Drafter as Drafter  # parts of a request, here for whoever reads one
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import AUTO, NumDraftTokens
from outrider.wire.requests.tree_shape import TreeShape


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """What a request asks of speculation; None = the server's default."""

    enabled: bool = True
    num_draft_tokens: NumDraftTokens | None = None
    draft_logprobs: DraftLogprobs | None = None
    draft_topk: int | None = None
    acceptance: AcceptanceRule | None = None
    lenience: float | None = None
    drafter: Drafter | None = None
    tree: TreeShape | None = None
    explain: bool = False
    """Each round says what was verified and what was refused."""

    def num_draft_tokens_or(self, default: NumDraftTokens) -> NumDraftTokens:
        """Return K; `default`, the server's, where the request names neither K nor a tree."""
        if not self.enabled:
            return 0
        if self.num_draft_tokens is not None:
            return self.num_draft_tokens
        return default if self.tree is None else AUTO


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Ask for one answer to one prompt; n answers are n of these, with params.choice from 0 to n - 1."""

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    """What the output goes on from; with an encoder the tokens that every output begins with."""
    params: SamplingParams
    stop: tuple[str, ...] = ()
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    prediction_ids: tuple[int, ...] = ()
    """What the output may be like; empty where nothing is predicted, and where it would not be used."""
    cache_salt: bytes = b""
    """Requests with the same salt share cached prefixes; those with an empty one share among themselves."""
    corpus_id: bytes = b""
    """`lookup` copies from ended outputs of requests with the same id alone; empty = from this one alone."""
    scheduling: Scheduling = field(default_factory=Scheduling)
    key_name: str | None = None
    """Name of the caller's API key; None where the gateway asks for none."""
    reading: Reading | None = None
    """How the text is read for calls and reasoning; None = it stands as it is."""
    source_ids: tuple[int, ...] = ()
    """The caller's prompt where an encoder reads it."""
    num_prompt_logprobs: int | None = None
    """Best ids that the prompt's tokens have log-probs of, besides their own; None = no log-probs."""
    is_empty: bool = False
    """No output is wanted: the one token that is made all the same is not told."""
    keeps_stop: bool = False
    """The stop string or stop id that ends the output is a part of its text."""
    answer_stop_ids: frozenset[int] = frozenset()
    """Ids that end the output behind its reasoning; those of `params` end it anywhere."""
    stops_in_reasoning: bool = False
    """Stop strings end the output inside its reasoning, too."""
    shows_special: bool = False
    """Special tokens are a part of the text."""

    @property
    def asked_ids(self) -> tuple[int, ...]:
        """The caller's prompt, whoever reads it."""
        return self.source_ids or self.prompt_ids


@dataclass(frozen=True, slots=True)
class OutputLogprobs:
    """Log-probs, in nats, of one committed token under the target's unmodified distribution."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, log-prob), most likely first."""
    rank: int | None = None
    """Of a prompt's token: 1 + how many are likelier."""

    @classmethod
    def from_proto(cls, message: pb.TokenLogprobs) -> OutputLogprobs:
        top = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
        return cls(message.logprob, top, message.rank or None)


@dataclass(frozen=True, slots=True)
class OutputToken:
    id: int
    kind: TokenKind
    text: str
    """The token's own text; parts of a UTF-8 character show as U+FFFD. Empty for stop ids."""
    text_offset: int
    """Characters of output text before this token."""
    logprobs: OutputLogprobs | None = None


@dataclass(frozen=True, slots=True)
class OutputTimings:
    """Seconds of one round by phase. The parts sum to total, unless verdicts were on their way together."""

    total_s: float = 0.0
    """Since the round before, or since the target was told to begin."""
    deliver_s: float = 0.0
    """The target held its step back for drafts."""
    verify_s: float = 0.0
    """Queue, forward and acceptance in the target."""
    overhead_s: float = 0.0
    """The rest."""


def most_common_reason(counts: Iterable[Counter[str]]) -> str | None:
    """Return the reason of most plain steps; None where there were none."""
    total = sum(counts, Counter[str]())
    return total.most_common(1)[0][0] if total else None


@dataclass(slots=True)
class AnswerUsage:
    """Running totals of one answer. Its session counts them on."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_plain_steps: int = 0
    num_wasted_tokens: int = 0
    """Draft tokens that were right and came after their step."""
    seed: int = 0
    num_cached_prompt_tokens: int = 0
    """Prompt tokens that the target had in its prefix cache when the answer began."""
    lenience: float | None = None
    """None = exact."""
    num_accepted_prediction_tokens: int = 0
    """Tokens that the prediction had foretold."""
    num_rejected_prediction_tokens: int = 0
    """Tokens of the prediction that are not in the output so far."""
    plain_reasons: Counter[str] = field(default_factory=Counter)
    """Plain steps by why they had no drafts, one of PLAIN_REASONS."""

    @property
    def plain_reason(self) -> str | None:
        """Why most of the plain steps had no drafts; None where there were none."""
        return most_common_reason([self.plain_reasons])

    @property
    def num_emitted_tokens(self) -> int:
        """Output tokens of rounds that had drafts: a step without them makes one token."""
        return max(0, self.num_completion_tokens - self.num_plain_steps)

    @property
    def num_overrun_tokens(self) -> int:
        """Accepted draft tokens behind the end of the output. A round that is cut among them has no token of the
        target's own, which others have besides theirs.
        """
        num_missing = self.num_accepted_tokens + self.num_rounds - self.num_emitted_tokens
        return max(0, num_missing - 1)


@dataclass(frozen=True, slots=True)
class RoundOutput:
    """Holds what one round added to an answer. The last round has finish_reason set."""

    tokens: tuple[OutputToken, ...]
    text_delta: str
    """Text that became certain: never half a character, never the start of a stop string."""
    num_drafted: int
    num_accepted: int
    timings: OutputTimings
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the stop id, that ended it (None for the model's own end of sequence)."""
    usage: AnswerUsage | None = None
    """Set with finish_reason."""
    beam: int = 0
    """Of a beam search, which of its answers this is: the whole of it. 0 is the best."""
    prompt_logprobs: Sequence[pb.TokenLogprobs] | None = None
    """Of the prompt's tokens from the second on, in the first round where they are wanted; as they were sent, for there
    may be a million, and what is made of them is made off the event loop."""
    score: float | None = None
    """Of such an answer: its sum of log-probs, in nats, over length ** length_penalty."""
    explanation: gateway_pb2.RoundExplanation | None = None
    """Where the request asks for it; as it is sent, for it would be the same as a plain value."""


@dataclass(frozen=True, slots=True)
class ServedFacts:
    """Facts of a served pair that front ends may show."""

    id: str
    context_limit: int
    vocab_size: int
    created: int
    """Unix seconds."""
    max_answers: int
    """Answers of one request: all that may run and wait at once."""
    draft_id: str | None
    """None when no draft is connected now."""
    drafters: tuple[Drafter, ...] = ()
    """Those that can draft for a request while their worker is there: one that is away may be back."""
    default_drafter: Drafter | None = None
    """Who drafts for requests that name no drafter: one of `drafters`, or None."""
    chat_template: str | None = None
    """`turns` for a template that marks who speaks, `plain` for one that writes the text alone; None without one."""
    no_trees: str | None = None
    """Why no proposal can be a tree now; None when it can, or when there is no draft."""
    no_beams: str | None = None
    """Why no beams can be searched now; None when they can."""
    decoder_start_ids: tuple[int, ...] = ()
    """What outputs begin with where an encoder reads the prompt; empty without one."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Of parameters that a request may leave out, as the checkpoint states them and the gateway applies them."""
    text_only: bool = False
    """Whether the model reads images, video or sound, too, and is served by its text part alone."""
    model_path: str = ""
    """Absolute path, or hub id, that the model was started from."""

    def is_at(self, name: str) -> bool:
        """Return whether `name` is where the model was started from: its hub id, its path, or the end of its path."""
        if not self.model_path.startswith("/"):
            return name != "" and name == self.model_path
        relative = name.removeprefix("./").strip("/")
        return relative != "" and self.model_path.endswith(f"/{relative}")


class Generator(Protocol):
    """Separates front ends from the decode loop. `gateway.coordinator.Coordinator` implements it."""

    def models(self) -> tuple[ServedFacts, ...]: ...

    def tokenizer(self, model_id: str) -> Tokenizer:
        """Return the tokenizer of one of `models`."""

    def ready(self) -> str | None:
        """Return None when a request would be served now, else the reason why not."""

    def refusals(self) -> Sequence[str]:
        """Return which workers do not start again, or answer and are not used, and why."""

    def admit(self, model_id: str, num_answers: int, caller: bytes = b"", weight: float = 1.0) -> AdmittedGenerations:
        """Take so many places of a caller in the queue, all or none, before anything dear is done for the request.

        Raises Overloaded or Unavailable.
        """


class AdmittedGenerations(Protocol):
    """Answers to one request. Use as `async with`; leaving the block cancels what still runs and frees every place."""

    @property
    def requests(self) -> tuple[GenerationRequest, ...]:
        """Return what was started."""

    @property
    def num_output_tokens(self) -> int:
        """Count the tokens that all of them have committed so far, read or not."""

    async def __aenter__(self) -> AdmittedGenerations: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def start(self, requests: tuple[GenerationRequest, ...]) -> None:
        """Begin the answers, one a place. The requests are checked already, see `gateway.admission.requests`."""

    async def opened(self) -> None:
        """Return once a target has opened the slot of one of them. Raises what ends one before."""

    def stream(self) -> AsyncIterator[tuple[int, RoundOutput]]:
        """Yield (index into requests, output) as rounds end, interleaved over the requests."""
