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
    """Reason why an output ended, by OpenAI's names."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """A request's options for speculation. For a field that is None, the gateway's default applies."""

    enabled: bool = True
    num_draft_tokens: NumDraftTokens | None = None
    draft_logprobs: DraftLogprobs | None = None
    draft_topk: int | None = None
    acceptance: AcceptanceRule | None = None
    lenience: float | None = None
    drafter: Drafter | None = None
    tree: TreeShape | None = None
    explain: bool = False
    """Whether the response explains each round: what was verified, and what was rejected."""

    def num_draft_tokens_or(self, default: NumDraftTokens) -> NumDraftTokens:
        """Return the number of draft tokens (K) that the request sets, or `default` if it sets none.

        0 if the request turns speculation off. AUTO if it sets `tree` but no number.
        """
        if not self.enabled:
            return 0
        if self.num_draft_tokens is not None:
            return self.num_draft_tokens
        if self.tree is not None:
            return AUTO
        return default


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request for one choice of one prompt, with the prompt as token ids.

    A request of a user with `n` choices becomes `n` of these, with params.choice from 0 to n - 1.
    """

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    """Token ids that the output continues. For a model with an encoder, the token ids with which every output begins.
    """
    params: SamplingParams
    stop: tuple[str, ...] = ()
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    prediction_ids: tuple[int, ...] = ()
    """Token ids of the predicted output; empty without a prediction, or if the request's drafter does not read it."""
    cache_salt: bytes = b""
    """Salt of the prefix cache. Only requests with the same salt share cached prefixes."""
    corpus_id: bytes = b""
    """Id of the corpus of the drafter `lookup`: the finished outputs of requests with the same id. If empty, `lookup`
    copies only from this request."""
    scheduling: Scheduling = field(default_factory=Scheduling)
    key_name: str | None = None
    """Name of the caller's API key; None if the gateway has no API keys."""
    reading: Reading | None = None
    """Parser of tool calls and reasoning in the output text; None to leave the text as it is."""
    source_ids: tuple[int, ...] = ()
    """Token ids of the caller's prompt if an encoder reads it; empty for a model without an encoder."""
    num_prompt_logprobs: int | None = None
    """Number of most likely ids whose log-probs are returned for each prompt token, besides those of the token itself;
    None for no log-probs of the prompt."""
    is_empty: bool = False
    """Whether the output must be empty. One token is generated all the same, and is not returned."""
    keeps_stop: bool = False
    """Whether the stop string or stop id that ends the output is part of its text."""
    answer_stop_ids: frozenset[int] = frozenset()
    """Token ids that end the output only after its reasoning. The stop ids in `params` end it anywhere."""
    stops_in_reasoning: bool = False
    """Whether stop strings end the output within its reasoning, too, and not only after it."""
    shows_special: bool = False
    """Whether special tokens are part of the output text."""

    @property
    def caller_prompt_ids(self) -> tuple[int, ...]:
        """Token ids of the caller's prompt: `source_ids` if an encoder reads it, else `prompt_ids`."""
        return self.source_ids or self.prompt_ids


@dataclass(frozen=True, slots=True)
class OutputLogprobs:
    """Log-probs of one committed token, in nats, under the target's distribution before sampling parameters."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """Pairs (token id, log-prob) of the most likely tokens at this token's position, the most likely first."""
    rank: int | None = None
    """For a token of the prompt: 1 plus the number of tokens that are more likely at its position. None for output
    tokens."""

    @classmethod
    def from_proto(cls, message: pb.TokenLogprobs) -> OutputLogprobs:
        top = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
        return cls(message.logprob, top, message.rank or None)


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One token of an output, with its text."""

    id: int
    kind: TokenKind
    text: str
    """Text of the token; incomplete UTF-8 characters appear as U+FFFD. Empty for stop ids."""
    text_offset: int
    """Number of characters of the output text before the token."""
    logprobs: OutputLogprobs | None = None


@dataclass(frozen=True, slots=True)
class OutputTimings:
    """Durations of the phases of one round, in seconds.

    `deliver_s`, `verify_s` and `overhead_s` sum to `total_s`. If the gateway gets several verdicts at once, `total_s`
    may be shorter than the target's work on a round: the sum is then larger.
    """

    total_s: float = 0.0
    """Seconds from the previous verdict to this round's verdict; in the first round of a lease, from the begin of the
    lease."""
    deliver_s: float = 0.0
    """Seconds for which the target held the round's step to wait for draft tokens."""
    verify_s: float = 0.0
    """Seconds that the round's step spent in the target's queue, in the forward, and in deciding what is accepted."""
    overhead_s: float = 0.0
    """Remaining seconds of `total_s`, such as those of the network and the gateway."""


def most_common_reason(counts: Iterable[Counter[str]]) -> str | None:
    """Return the most frequent reason why steps had no draft tokens; None if there were no such steps.

    counts: for each choice, its number of steps without draft tokens by reason.
    """
    total = sum(counts, Counter[str]())
    if not total:
        return None
    ((reason, _),) = total.most_common(1)
    return reason


@dataclass(slots=True)
class ChoiceUsage:
    """Counts of one choice's tokens and steps so far."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_plain_steps: int = 0
    num_wasted_tokens: int = 0
    """Number of draft tokens that equal the output token at their position, but arrived after the step that could have
    verified them."""
    seed: int = 0
    num_cached_prompt_tokens: int = 0
    """Number of prompt tokens found in the target's prefix cache when the choice began."""
    lenience: float | None = None
    """Lenience of the acceptance rule; None if acceptance is exact."""
    num_accepted_prediction_tokens: int = 0
    """Number of output tokens that were accepted from the request's prediction."""
    num_rejected_prediction_tokens: int = 0
    """Number of tokens of the request's prediction that are not in the output so far."""
    plain_reasons: Counter[str] = field(default_factory=Counter)
    """Number of steps without draft tokens, by reason (one of PLAIN_REASONS)."""

    @property
    def plain_reason(self) -> str | None:
        """Most frequent of PLAIN_REASONS for this choice's steps without draft tokens; None if there were none."""
        return most_common_reason([self.plain_reasons])

    @property
    def num_emitted_tokens(self) -> int:
        """Number of output tokens from rounds with draft tokens: all output tokens minus the number of plain steps,
        which make one token each.
        """
        return max(0, self.num_completion_tokens - self.num_plain_steps)

    @property
    def num_overrun_tokens(self) -> int:
        """Number of accepted draft tokens that are not in the output, because it ended before them.

        A round makes its accepted tokens, then one token of the target's own. So if tokens of the last round are not in
        the output, one of them is the target's own.

            # 2 rounds of 4 accepted tokens each make 10 tokens; 8 are in the output: 2 are not, of which 1 was accepted
        """
        num_missing = self.num_accepted_tokens + self.num_rounds - self.num_emitted_tokens
        return max(0, num_missing - 1)


@dataclass(frozen=True, slots=True)
class RoundOutput:
    """Addition of one round to the output of a choice. The last round has finish_reason set."""

    tokens: tuple[OutputToken, ...]
    text_delta: str
    """Text that the client gets after this round. It never ends within a character or within what may become a stop
    string."""
    num_drafted: int
    num_accepted: int
    timings: OutputTimings
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """Stop string or stop token id of the request that ended the output; None if it ended in another way."""
    usage: ChoiceUsage | None = None
    """Usage of the whole choice, in the last round; None in others."""
    beam: int = 0
    """Rank of the output in a beam search, 0 for the best; always 0 without a beam search. The output of a beam is
    complete: it comes in one RoundOutput."""
    prompt_logprobs: Sequence[pb.TokenLogprobs] | None = None
    """Log-probs of the prompt's tokens from the second on, in the first round if requested; else None. They stay
    protobuf messages, up to a million, which front ends convert in a thread and not in the event loop."""
    score: float | None = None
    """Score of an output of a beam search: the sum of its tokens' log-probs, in nats, divided by (number of its tokens)
    ** length_penalty. None without a beam search."""
    explanation: gateway_pb2.RoundExplanation | None = None
    """Explanation of the round, if requested; else None."""


@dataclass(frozen=True, slots=True)
class ServedFacts:
    """Properties of a served model that front ends use and may show to users."""

    id: str
    context_limit: int
    vocab_size: int
    created: int
    """Time when the model was first served, in Unix seconds."""
    max_choices: int
    """Maximal number of choices of one request. It is the number of choices of this model that may run and wait
    together."""
    draft_id: str | None
    """Model id of a connected draft worker: of one that runs the gateway's default drafter, if there is one. None if no
    draft worker is connected."""
    drafters: tuple[Drafter, ...] = ()
    """Drafters that requests may name, including those of workers that are not connected now."""
    default_drafter: Drafter | None = None
    """Drafter of requests that name none: one of `drafters`; None if there is none."""
    chat_template: str | None = None
    """Kind of the chat template: `turns` if it writes the role of each message, `plain` if it writes only the texts;
    None without a template."""
    no_trees: str | None = None
    """Reason why draft trees cannot be used now; None if they can, or if no worker is connected."""
    no_beams: str | None = None
    """Reason why beam search is not possible now; None if it is."""
    decoder_start_ids: tuple[int, ...] = ()
    """Token ids with which outputs begin if an encoder reads the prompt; empty without an encoder."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Defaults of sampling parameters that the checkpoint contains and the gateway applies, by parameter."""
    text_only: bool = False
    """Whether only the text part of a model that also reads images, video or sound is served."""
    model_path: str = ""
    """Absolute path or hub id from which the model was started."""

    def is_at(self, name: str) -> bool:
        """Return whether `name` is the hub id or path from which the model was started, or the end of that path."""
        if not self.model_path.startswith("/"):
            return name != "" and name == self.model_path
        relative = name.removeprefix("./").strip("/")
        return relative != "" and self.model_path.endswith(f"/{relative}")


class Generator(Protocol):
    """Interface through which front ends run requests. `gateway.coordinator.Coordinator` implements it."""

    def models(self) -> tuple[ServedFacts, ...]: ...

    def tokenizer(self, model_id: str) -> Tokenizer:
        """Return the tokenizer of the served model with this id."""

    def ready(self) -> str | None:
        """Return None if a request could be served now, else the reason why not."""

    def refusals(self) -> Sequence[str]:
        """Return one sentence for each worker that the gateway refuses, or that the launcher does not start again, with
        the reason.
        """

    def admit(self, model_id: str, num_choices: int, caller: bytes = b"", weight: float = 1.0) -> AdmittedGenerations:
        """Let `num_choices` choices of a caller into a model's queue, all or none, before any expensive work.

        caller, weight: digest and weight of the caller's API key; a caller's share of the places is proportional to its
        weight. Raises Overloaded if the queue is full or the wait would be too long, Unavailable if the model is not
        served or has no usable target.
        """


class AdmittedGenerations(Protocol):
    """The choices of one request, which its model's queue has admitted.

    Use it as `async with`: leaving the block cancels the choices that still run or wait.
    """

    @property
    def requests(self) -> tuple[GenerationRequest, ...]:
        """Return the requests of the started choices, by the choice's index."""

    @property
    def num_output_tokens(self) -> int:
        """Return the number of tokens that all choices have committed so far, yielded by `stream` or not."""

    async def __aenter__(self) -> AdmittedGenerations: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def start(self, requests: tuple[GenerationRequest, ...]) -> None:
        """Start the admitted choices. Each waits for a place and then runs.

        requests: one request for each choice, in the order of their index.
        """

    async def wait_opened(self) -> None:
        """Wait until a target has opened a slot for one choice. Raises the error of a choice that fails before any slot
        is open.
        """

    def stream(self) -> AsyncIterator[tuple[int, RoundOutput]]:
        """Yield (index into `requests`, output) after each round, in the order in which rounds end."""
