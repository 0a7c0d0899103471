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
from outrider.wire.kinds import AcceptanceRule, DraftLogprobs, TokenKind
from outrider.wire.requests.drafters import Drafter as Drafter  # parts of a request, here for whoever reads one
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import AUTO, NumDraftTokens
from outrider.wire.requests.tree_shape import TreeShape


class FinishReason(Enum):
    """Finish reason of a choice, as OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """A request's options for speculation. None stands for the server's default."""

    enabled: bool = True
    num_draft_tokens: NumDraftTokens | None = None
    draft_logprobs: DraftLogprobs | None = None
    draft_topk: int | None = None
    acceptance: AcceptanceRule | None = None
    lenience: float | None = None
    drafter: Drafter | None = None
    tree: TreeShape | None = None
    explain: bool = False
    """Whether each round reports what was verified and what was rejected."""

    def num_draft_tokens_or(self, default: NumDraftTokens) -> NumDraftTokens:
        """Return K, or `default` (the server's) if the request names neither K nor a tree."""
        if not self.enabled:
            return 0
        if self.num_draft_tokens is not None:
            return self.num_draft_tokens
        if self.tree is not None:
            return AUTO
        return default


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one choice of one prompt.

    With n choices there are n of these, with params.choice from 0 to n - 1.
    """

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    """Tokens that the output continues. With an encoder, the tokens with which every output begins."""
    params: SamplingParams
    stop: tuple[str, ...] = ()
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    prediction_ids: tuple[int, ...] = ()
    """Tokens that the output may resemble; empty without a prediction, or if it would not be used."""
    cache_salt: bytes = b""
    """Salt of the prefix cache. Requests share cached prefixes with those of the same salt."""
    corpus_id: bytes = b""
    """Id of the corpus of `lookup`, which holds the finished outputs of requests with this id. If empty, `lookup`
    copies from this request alone."""
    scheduling: Scheduling = field(default_factory=Scheduling)
    key_name: str | None = None
    """Name of the caller's API key; None if the gateway has no API keys."""
    reading: Reading | None = None
    """Parser of calls and reasoning in the output text; None to leave the text as it is."""
    source_ids: tuple[int, ...] = ()
    """Tokens of the caller's prompt if an encoder reads it; else empty."""
    num_prompt_logprobs: int | None = None
    """Number of best ids with log-probs at each prompt token, besides the token itself; None for no log-probs."""
    is_empty: bool = False
    """Whether no output is wanted. The one token that is generated nevertheless is not returned."""
    keeps_stop: bool = False
    """Whether the stop string or stop id that ends the output is part of its text."""
    answer_stop_ids: frozenset[int] = frozenset()
    """Ids that end the output only after its reasoning; those of `params` end it anywhere."""
    stops_in_reasoning: bool = False
    """Whether stop strings end the output inside its reasoning as well."""
    shows_special: bool = False
    """Whether special tokens are part of the text."""

    @property
    def caller_prompt_ids(self) -> tuple[int, ...]:
        """Tokens of the caller's prompt, whether an encoder reads it or not."""
        return self.source_ids or self.prompt_ids


@dataclass(frozen=True, slots=True)
class OutputLogprobs:
    """Log-probs, in nats, of one committed token under the target's unmodified distribution."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, log-prob) of the most likely tokens, the most likely first."""
    rank: int | None = None
    """Rank of a prompt's token: 1 + the number of more likely tokens."""

    @classmethod
    def from_proto(cls, message: pb.TokenLogprobs) -> OutputLogprobs:
        top = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
        return cls(message.logprob, top, message.rank or None)


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One token of an output."""

    id: int
    kind: TokenKind
    text: str
    """Text of the token; parts of a UTF-8 character show as U+FFFD. Empty for stop ids."""
    text_offset: int
    """Number of characters of output text before the token."""
    logprobs: OutputLogprobs | None = None


@dataclass(frozen=True, slots=True)
class OutputTimings:
    """Durations of the phases of one round, in seconds.

    They sum to the total unless several verdicts arrived together.
    """

    total_s: float = 0.0
    """Time since the previous round, or since the lease began."""
    deliver_s: float = 0.0
    """Time that the target held its step for drafts."""
    verify_s: float = 0.0
    """Time of queue, forward and acceptance in the target."""
    overhead_s: float = 0.0
    """Remaining time."""


def most_common_reason(counts: Iterable[Counter[str]]) -> str | None:
    """Return the most frequent reason of plain steps; None without plain steps."""
    total = sum(counts, Counter[str]())
    if not total:
        return None
    ((reason, _),) = total.most_common(1)
    return reason


@dataclass(slots=True)
class ChoiceUsage:
    """Running totals of one choice, updated by its session."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_plain_steps: int = 0
    num_wasted_tokens: int = 0
    """Number of draft tokens that were right but arrived after their step."""
    seed: int = 0
    num_cached_prompt_tokens: int = 0
    """Number of prompt tokens found in the target's prefix cache when the choice began."""
    lenience: float | None = None
    """Lenience of the acceptance rule; None for exact."""
    num_accepted_prediction_tokens: int = 0
    """Number of output tokens that are accepted tokens of the prediction."""
    num_rejected_prediction_tokens: int = 0
    """Number of tokens of the prediction that are not in the output so far."""
    plain_reasons: Counter[str] = field(default_factory=Counter)
    """Number of steps without drafts, by reason (one of PLAIN_REASONS)."""

    @property
    def plain_reason(self) -> str | None:
        """Most frequent reason of plain steps; None without plain steps."""
        return most_common_reason([self.plain_reasons])

    @property
    def num_emitted_tokens(self) -> int:
        """Number of output tokens from rounds with drafts: a step without drafts makes one token."""
        return max(0, self.num_completion_tokens - self.num_plain_steps)

    @property
    def num_overrun_tokens(self) -> int:
        """Number of accepted draft tokens beyond the end of the output.

        A round that ends among its draft tokens has no token of the target's own, as other rounds have.

            # 2 rounds of 4 accepted tokens each, 8 output tokens: 8 + 2 - 8 - 1 = 1 accepted token is not in the output
        """
        num_missing = self.num_accepted_tokens + self.num_rounds - self.num_emitted_tokens
        return max(0, num_missing - 1)


@dataclass(frozen=True, slots=True)
class RoundOutput:
    """Addition of one round to a choice. The last round has finish_reason set."""

    tokens: tuple[OutputToken, ...]
    text_delta: str
    """Text that became final: never half a character, never the start of a stop string."""
    num_drafted: int
    num_accepted: int
    timings: OutputTimings
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """Stop string or stop id that ended the output; None for the model's own end of sequence."""
    usage: ChoiceUsage | None = None
    """Usage of the choice, set together with finish_reason."""
    beam: int = 0
    """Rank among the outputs of a beam search, 0 for the best. The output is then complete."""
    prompt_logprobs: Sequence[pb.TokenLogprobs] | None = None
    """Log-probs of the prompt's tokens from the second on, in the first round if requested. They stay in their protobuf
    form: there may be a million, and they are converted off the event loop."""
    score: float | None = None
    """Score of a beam search's output: its sum of log-probs, in nats, over length ** length_penalty."""
    explanation: gateway_pb2.RoundExplanation | None = None
    """Explanation of the round, if requested. It stays in its protobuf form, as a plain value would be the same."""


@dataclass(frozen=True, slots=True)
class ServedFacts:
    """Facts of a served model that front ends may show."""

    id: str
    context_limit: int
    vocab_size: int
    created: int
    """Time of creation, in Unix seconds."""
    max_answers: int
    """Maximal number of choices of one request: all that may run and wait at once."""
    draft_id: str | None
    """Id of a connected draft's model; None without one."""
    drafters: tuple[Drafter, ...] = ()
    """Drafters that requests may name. Includes those whose worker is away, because it may be back."""
    default_drafter: Drafter | None = None
    """Drafter of requests that name none: one of `drafters`, or None."""
    chat_template: str | None = None
    """Kind of the template: `turns` if it marks who speaks, `plain` if it writes the text alone; None without one."""
    no_trees: str | None = None
    """Reason why proposals cannot be trees now; None if they can, or without a draft."""
    no_beams: str | None = None
    """Reason why beam search is not possible now; None if it is."""
    decoder_start_ids: tuple[int, ...] = ()
    """Tokens with which outputs begin if an encoder reads the prompt; empty without an encoder."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Defaults of sampling parameters, as the checkpoint states them and the gateway applies them."""
    text_only: bool = False
    """Whether the model reads images, video or sound as well but is served by its text part alone."""
    model_path: str = ""
    """Absolute path or hub id from which the model was started."""

    def is_at(self, name: str) -> bool:
        """Return whether the model was started from `name`: its hub id, its path, or the end of its path."""
        if not self.model_path.startswith("/"):
            return name != "" and name == self.model_path
        relative = name.removeprefix("./").strip("/")
        return relative != "" and self.model_path.endswith(f"/{relative}")


class Generator(Protocol):
    """Interface between front ends and the decode loop, implemented by `gateway.coordinator.Coordinator`."""

    def models(self) -> tuple[ServedFacts, ...]: ...

    def tokenizer(self, model_id: str) -> Tokenizer:
        """Return the tokenizer of one of `models`."""

    def ready(self) -> str | None:
        """Return None if a request would be served now, else the reason."""

    def refusals(self) -> Sequence[str]:
        """Return, as sentences, which workers do not start again or are refused, and why."""

    def admit(self, model_id: str, num_answers: int, caller: bytes = b"", weight: float = 1.0) -> AdmittedGenerations:
        """Take `num_answers` places of a caller in the queue, all or none, before any expensive work.

        Raises Overloaded or Unavailable.
        """


class AdmittedGenerations(Protocol):
    """The choices of one request.

    Use it as `async with`: leaving the block cancels those that run and frees every place.
    """

    @property
    def requests(self) -> tuple[GenerationRequest, ...]:
        """Return the requests that were started."""

    @property
    def num_output_tokens(self) -> int:
        """Return the number of tokens that all choices have committed so far, read or not."""

    async def __aenter__(self) -> AdmittedGenerations: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def start(self, requests: tuple[GenerationRequest, ...]) -> None:
        """Start the choices, one for each place.

        The requests must be checked already; see `gateway.admission.requests`.
        """

    async def opened(self) -> None:
        """Wait until a target has opened the slot of a choice. Raises the error of a choice that ends before."""

    def stream(self) -> AsyncIterator[tuple[int, RoundOutput]]:
        """Yield (index into requests, output) as rounds end, interleaved over the requests."""
