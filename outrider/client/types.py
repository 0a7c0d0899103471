"""The values that the SDK takes and returns: frozen dataclasses and enums, without protobuf. Totals are in `usage`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from outrider.client.usage import Usage, total_usage
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.speculation import NumDraftTokens


class TokenKind(Enum):
    """How an output token came about."""

    ACCEPTED = "accepted"
    """A draft token that the target accepted."""
    RECOVERED = "recovered"
    """Drawn by the target in place of the first rejected draft token."""
    BONUS = "bonus"
    """Drawn by the target after it had accepted all draft tokens of a round."""
    PLAIN = "plain"
    """Drawn by the target in a step without draft tokens."""
    FORCED = "forced"
    """An accepted draft token where the grammar allowed no other token."""
    PREDICTED = "predicted"
    """An accepted draft token from the request's prediction."""


class DraftTokenKind(Enum):
    """How a draft token was proposed."""

    DRAWN = "drawn"
    """Sampled from a distribution of the drafter, against which the acceptance rule tests it."""
    GUESS = "guess"
    """Proposed without a distribution: accepted where the target draws the same token."""
    FORCED = "forced"
    """Proposed by a grammar that allows no other token; accepted as a GUESS is."""
    PREDICTED = "predicted"
    """Proposed from the request's prediction; accepted as a GUESS is."""


class FinishReason(Enum):
    """Why an output ended."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string."""
    LENGTH = "length"
    """max_tokens or the context limit."""


class DraftLogprobs(StrEnum):
    """How distributions travel from draft to target at temperature > 0. None of them changes the output's law."""

    AUTO = "auto"
    """The server's choice."""
    FULL = "full"
    """The whole vocabulary."""
    TOPK = "topk"
    """The `Speculation.draft_topk` most likely tokens."""


class AcceptanceRule(StrEnum):
    """Which draft tokens the target accepts at temperature > 0. Neither rule changes the output's law."""

    REJECTION = "rejection"
    """Rejection sampling: accept with probability min(1, target / draft)."""
    COUPLED = "coupled"
    """Accept a draft token where the target, with the same noise, draws the same one: the output is then a function of
    prompt, parameters and seed, whatever is drafted."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request is drafted for. A field that is None takes the server's default.

    Fields that are enums may be given by value, such as `acceptance="coupled"`.
    """

    enabled: bool = True
    """False: plain decoding."""
    num_draft_tokens: NumDraftTokens | None = None
    """Most draft tokens that a round verifies (K), 0 to 64, or "auto": the number that makes the most tokens per
    second, chosen step by step."""
    draft_logprobs: DraftLogprobs | str | None = None
    draft_topk: int | None = None
    """Tokens in a distribution of kind TOPK, at least 1."""
    acceptance: AcceptanceRule | str | None = None
    lenience: float | None = None
    """Factor on draft probabilities in the acceptance rule, greater than 0 and at most 1. 1 is exact; below it more
    draft tokens are accepted, and the output no longer follows the target's distribution exactly."""
    drafter: Drafter | str | None = None
    tree: str | None = None
    """A draft tree in place of a chain: children by depth such as "4x2x1", or "best:12x4", the 12 most likely nodes up
    to a depth of 4. Not with num_draft_tokens or lenience."""
    explain: bool = False
    """Whether each round carries an `Explanation` of what it verified and rejected. It does not change the output. Not
    with a beam search."""


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that the output must have: give exactly one field besides `strict`.

    Whatever is drafted, an output that ends by itself has the form; one that max_tokens ends may be cut.
    """

    json: Mapping[str, Any] | bool | str | None = None
    """A JSON Schema (2020-12), or its text."""
    regex: str | None = None
    """A regular expression for the whole output, in the syntax of Rust's `regex`."""
    choice: Sequence[str] | None = None
    """Texts, one of which is the output."""
    grammar: str | None = None
    """A grammar in llguidance's dialect of Lark, or in GBNF."""
    json_object: bool = False
    """Any JSON object."""
    strict: bool = False
    """Whether the schema must keep OpenAI's rules: all properties required, and no others allowed."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probs at one token's position under the target's unmodified distribution, nats."""

    logprob: float
    """Of the token itself."""
    top: tuple[tuple[int, float], ...]
    """(id, log-prob) of the most likely tokens, most likely first."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the output."""

    id: int
    kind: TokenKind
    text: str
    """The token's own text; parts of a UTF-8 character show as U+FFFD. Join `Round.text_delta` for the text."""
    logprobs: TokenLogprobs | None = None
    """None unless num_logprobs was given."""


@dataclass(frozen=True, slots=True)
class RoundTimings:
    """Seconds that a round took, measured by the gateway. They sum to `total_s`, unless rounds arrived together."""

    total_s: float
    """Time since the choice's previous round, or for its first since the request was sent to the target."""
    deliver_s: float
    """Time for which the target held its step until draft tokens arrived."""
    verify_s: float
    """Queue, forward and acceptance in the target."""
    overhead_s: float
    """The rest: network, gateway and commit."""


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A token that a round verified."""

    id: int
    text: str
    parent: int
    """Index in `Explanation.draft` of the draft token that this one follows; -1 = the last committed token."""
    accepted: bool
    """Whether the acceptance rule accepted it, though a stop before it may cut it from the output."""
    kind: DraftTokenKind


@dataclass(frozen=True, slots=True)
class RankedToken:
    """A candidate for the position at which a round rejected."""

    id: int
    text: str
    logprob: float | None
    """Nats; None for a token that was proposed without a distribution."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """The position at which a round rejected all draft tokens that it had there."""

    parent: int
    """Index in `Explanation.draft` of the last accepted draft token; -1 = none was accepted."""
    token: RankedToken
    """The recovered token."""
    target: tuple[RankedToken, ...]
    """At most 5 tokens, most likely first, under the distribution that the target draws from here; at temperature 0,
    which puts all mass on the first, under that of temperature 1."""
    draft_law: tuple[RankedToken, ...]
    """At most 5 tokens, most likely first, under the distribution that the draft tokens were sampled from here; empty
    where none was sampled."""
    draft_guesses: tuple[RankedToken, ...]
    """Where none was sampled: at most 5 draft tokens that were proposed here, best first."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one round verified, where it rejected, and how long its parts took."""

    committed_len: int
    """Tokens of prompt and output before the round."""
    drafter: str | None
    """Label of the drafter, such as "model", "ngram" or "grammar"; None for a step without draft tokens."""
    batch_size: int
    """Choices, of this and other requests, in the same forward of the target."""
    draft: tuple[DraftToken, ...]
    """The verified draft tokens, parents before their children."""
    rejection: Rejection | None
    """None where all draft tokens on the path were accepted, or the output ended before a rejection."""
    queue_s: float
    """Seconds in the target's queue; `queue_s`, `forward_s` and `accept_s` sum to `RoundTimings.verify_s`."""
    forward_s: float
    accept_s: float
    draft_s: float | None
    """Seconds of the draft worker's steps, which run beside the other parts; None where no draft worker drafted."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round added to one choice. A choice's last round has `finish_reason` and `usage`."""

    request_id: str
    choice: int
    """Index of the choice, 0 to n - 1."""
    tokens: tuple[Token, ...]
    text_delta: str
    """The text that became certain: never half a character, never the start of a stop string."""
    num_drafted: int
    num_accepted: int
    timings: RoundTimings
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    """The stop string or stop id that ended the output; None for the model's own end of sequence."""
    usage: Usage | None = None
    score: float | None = None
    """With a beam search, whose outputs arrive whole: the sum of log-probs, nats, over length ** length_penalty."""
    explanation: Explanation | None = None
    """Given with `Speculation.explain`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the n outputs of a request."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    stop_reason: str | None
    """As `Round.stop_reason`."""
    usage: Usage
    score: float | None = None
    """As `Round.score`; the first choice has the highest."""


@dataclass(frozen=True, slots=True)
class Completion:
    """All choices of a request."""

    request_id: str
    choices: tuple[Choice, ...]
    """By index."""

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def usage(self) -> Usage:
        """Usage summed over the choices; the prompt counts once."""
        return total_usage([choice.usage for choice in self.choices])


@dataclass(frozen=True, slots=True)
class Model:
    """A served model: a target and what drafts for it."""

    id: str
    context_limit: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    draft_id: str | None
    """Id of the draft's model; None when no draft serves this model now."""
    drafters: tuple[Drafter, ...] = ()
    """Drafters that a request may name now."""
