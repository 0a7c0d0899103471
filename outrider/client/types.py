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
    """How an output token was made."""

    ACCEPTED = "accepted"
    """A draft token that the target accepted."""
    RECOVERED = "recovered"
    """Drawn by the target in place of the first rejected draft token."""
    BONUS = "bonus"
    """Drawn by the target after it had accepted all draft tokens of a round."""
    PLAIN = "plain"
    """Drawn by the target in a step without draft tokens."""
    FORCED = "forced"
    """An accepted draft token at a position where the grammar allowed no other token."""
    PREDICTED = "predicted"
    """An accepted draft token that was copied from the request's prediction."""


class DraftTokenKind(Enum):
    """How a draft token was proposed."""

    DRAWN = "drawn"
    """Sampled from a distribution of the drafter, which the acceptance rule compares with the target's distribution."""
    GUESS = "guess"
    """Proposed without a distribution. It is accepted if the target draws the same token."""
    FORCED = "forced"
    """Proposed by a grammar that allows no other token. It is accepted if the target draws the same token."""
    PREDICTED = "predicted"
    """Copied from the request's prediction. It is accepted if the target draws the same token."""


class FinishReason(Enum):
    """Why an output ended."""

    STOP = "stop"
    """The output reached an end-of-sequence id, a stop id or a stop string."""
    LENGTH = "length"
    """The output reached max_tokens or the context limit."""


class DraftLogprobs(StrEnum):
    """How much of each distribution the draft worker sends to the target at temperature > 0. The output has the same
    distribution with each of these values.
    """

    AUTO = "auto"
    """The server chooses FULL or TOPK for the request."""
    FULL = "full"
    """Probabilities of all tokens of the vocabulary."""
    TOPK = "topk"
    """Probabilities of the `Speculation.draft_topk` most likely tokens."""


class AcceptanceRule(StrEnum):
    """Rule by which the target accepts draft tokens at temperature > 0. With either rule, at lenience 1, the output has
    the target's distribution.
    """

    REJECTION = "rejection"
    """Rejection sampling: a draft token is accepted with probability min(1, its target probability / its draft
    probability)."""
    COUPLED = "coupled"
    """Accept a draft token if the target, drawing with the same random numbers, draws the same token. The output is
    then a function of prompt, parameters and seed, whatever is drafted."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculation options of a request. A field that is None takes the server's default.

    Fields that are enums may be given by value, such as `acceptance="coupled"`.
    """

    enabled: bool = True
    """Whether the target verifies draft tokens for this request; False = plain decoding."""
    num_draft_tokens: NumDraftTokens | None = None
    """Maximum number of draft tokens that a round verifies (K), 0 to 64. "auto" = the number that gives the most tokens
    per second, chosen step by step. None = the server's default."""
    draft_logprobs: DraftLogprobs | str | None = None
    """How much of each distribution the draft worker sends at temperature > 0; None = the server's default."""
    draft_topk: int | None = None
    """Number of tokens per distribution if `draft_logprobs` is TOPK, at least 1; None = the server's default."""
    acceptance: AcceptanceRule | str | None = None
    """Rule by which the target accepts draft tokens at temperature > 0; None = the server's default."""
    lenience: float | None = None
    """Factor on draft probabilities in the acceptance rule, greater than 0 and at most 1; None = the server's default.
    With 1 the output follows the target's distribution exactly. With less, more draft tokens are accepted and the
    output deviates from that distribution."""
    drafter: Drafter | str | None = None
    """Drafter that proposes the draft tokens; None = the server's default."""
    tree: str | None = None
    """Shape of a draft tree to verify in place of a chain. "4x2x1" = the root (the last committed token) has 4
    children, each of these has 2, and each of those has 1. "best:12x4" = the 12 most likely nodes, each at most 4 draft
    tokens below the root. Not allowed with num_draft_tokens or lenience."""
    explain: bool = False
    """Whether each `Round` has an `Explanation` of what it verified and rejected. The output stays the same. Not
    allowed with a beam search."""


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The format that the output must have. Give exactly one field besides `strict`.

    An output that ends by itself has this format, whatever is drafted. An output that max_tokens ends may be cut short.
    """

    json: Mapping[str, Any] | bool | str | None = None
    """A JSON Schema (2020-12) as a value, or as JSON text."""
    regex: str | None = None
    """A regular expression for the whole output, in the syntax of Rust's `regex`."""
    choice: Sequence[str] | None = None
    """Texts to choose from: the output is one of them."""
    grammar: str | None = None
    """A grammar in llguidance's dialect of Lark, or in GBNF."""
    json_object: bool = False
    """True = the output is any JSON object."""
    strict: bool = False
    """Whether the JSON Schema must keep OpenAI's rules for strict schemas: all properties are required, and no others
    are allowed."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probs, in nats, at one output token's position; of the target, before penalties and temperature."""

    logprob: float
    """Log-prob of the output token itself."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-prob) of the request's `num_logprobs` most likely tokens, most likely first."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the output."""

    id: int
    kind: TokenKind
    text: str
    """The text of this token alone. If the token is only a part of a UTF-8 character, the text is U+FFFD. For the
    output's text join `Round.text_delta`."""
    logprobs: TokenLogprobs | None = None
    """Log-probs at the token's position; None unless the request gave `num_logprobs`."""


@dataclass(frozen=True, slots=True)
class RoundTimings:
    """Seconds that a round and its parts took, measured by the gateway. The parts sum to `total_s`, unless the gateway
    received several rounds at once.
    """

    total_s: float
    """Seconds since the end of the choice's previous round. For its first round: since the request was sent to the
    target."""
    deliver_s: float
    """Seconds for which the target held its step back to wait for draft tokens."""
    verify_s: float
    """Seconds of the target's work: in its queue, in the forward and in the acceptance of draft tokens."""
    overhead_s: float
    """Seconds of `total_s` that are in no other part: network, gateway and commit."""


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A draft token that a round verified."""

    id: int
    text: str
    parent: int
    """Index in `Explanation.draft` of the draft token that this one follows; -1 = it follows the last committed token.
    """
    accepted: bool
    """Whether the acceptance rule accepted this draft token. An accepted one is not in the output if the output ends
    before it."""
    kind: DraftTokenKind


@dataclass(frozen=True, slots=True)
class RankedToken:
    """A token, with its log-prob, for the position at which a round rejected its draft tokens."""

    id: int
    text: str
    logprob: float | None
    """Log-prob in nats; None for a token that was proposed without a distribution."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Position at which a round rejected every draft token proposed for it, with the likeliest tokens there."""

    parent: int
    """Index in `Explanation.draft` of the last accepted draft token; -1 = none was accepted."""
    token: RankedToken
    """The recovered token, which the target drew for this position."""
    target: tuple[RankedToken, ...]
    """The target's most likely tokens for this position, at most 5, most likely first, with log-probs under the
    distribution that it draws from. At temperature 0 the log-probs are computed at temperature 1."""
    draft_law: tuple[RankedToken, ...]
    """The drafter's most likely tokens for this position, at most 5, most likely first, under the distribution from
    which the draft tokens here were sampled. Empty if they were proposed without a distribution."""
    draft_guesses: tuple[RankedToken, ...]
    """Draft tokens proposed for this position without a distribution, at most 5, best first. Empty if the draft tokens
    were sampled from a distribution."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one round verified and rejected, and how long its parts took. Given with `Speculation.explain`."""

    committed_len: int
    """Number of committed tokens (prompt and output) before the round."""
    drafter: str | None
    """Label of the drafter, such as "model", "ngram" or "grammar"; None = the step had no draft tokens."""
    batch_size: int
    """Number of choices in the forward of the target that made this round, those of other requests included."""
    draft: tuple[DraftToken, ...]
    """The verified draft tokens. Parents come before their children."""
    rejection: Rejection | None
    """The position at which draft tokens were rejected. None = the target accepted draft tokens up to the end of a
    branch, or the output ended before a rejection."""
    queue_s: float
    """Seconds in the target's queue. `queue_s`, `forward_s` and `accept_s` sum to `RoundTimings.verify_s`."""
    forward_s: float
    accept_s: float
    draft_s: float | None
    """Seconds of the steps that made the verified draft tokens, summed over the draft workers. They ran in parallel to
    the round's other parts. None = no draft worker made any, or none sent its time."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round added to one choice. A choice's last round has `finish_reason` and `usage`."""

    request_id: str
    choice: int
    """Index of the choice, 0 to n - 1."""
    tokens: tuple[Token, ...]
    text_delta: str
    """Text that the round added to the output. Text that may begin a stop string, or is part of an incomplete
    character, is held back for a later round."""
    num_drafted: int
    num_accepted: int
    timings: RoundTimings
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    """The stop string or stop id that ended the output. None = the output has not ended yet, or something else ended
    it, such as max_tokens or the model's end-of-sequence id."""
    usage: Usage | None = None
    score: float | None = None
    """Score of a beam search's output: the sum of its log-probs, in nats, divided by length ** length_penalty. Such an
    output arrives as a single round. None = no beam search."""
    explanation: Explanation | None = None
    """What the round verified and rejected; None unless the request set `Speculation.explain`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the `n` outputs of a request."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    stop_reason: str | None
    """The stop string or stop id that ended the output; None = something else ended it, such as max_tokens."""
    usage: Usage
    score: float | None = None
    """Score of a beam search's output: the sum of its log-probs, in nats, divided by length ** length_penalty. None =
    no beam search. The first choice has the highest score."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The finished outputs of a request."""

    request_id: str
    choices: tuple[Choice, ...]
    """The choices in order of their index."""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def usage(self) -> Usage:
        """Usage summed over all choices. The tokens of the prompt count once."""
        return total_usage([choice.usage for choice in self.choices])


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the gateway serves: a target, and the drafters that are available for it."""

    id: str
    context_limit: int
    """Maximum number of tokens of prompt and output together."""
    vocab_size: int
    draft_id: str | None
    """Id of the model that the draft worker for this target runs; None = no draft worker serves this target now."""
    drafters: tuple[Drafter, ...] = ()
    """Drafters that a request for this model may name now."""
