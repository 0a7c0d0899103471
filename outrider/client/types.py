"""What the SDK gives its users: plain frozen values, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from outrider.wire.requests.drafters import Drafter as Drafter
from outrider.wire.requests.speculation import NumDraftTokens


class TokenKind(Enum):
    """Why a token is in the answer."""

    ACCEPTED = "accepted"
    """Drafted and kept."""
    RECOVERED = "recovered"
    """Drawn by the target at the first rejection."""
    BONUS = "bonus"
    """The extra token after all drafts were kept."""
    PLAIN = "plain"
    """Made by a step without drafts."""
    FORCED = "forced"
    """Drafted and kept, where the grammar left no choice."""
    PREDICTED = "predicted"
    """Drafted from the call's prediction, and kept."""


class DraftTokenKind(Enum):
    """What a draft token is."""

    DRAWN = "drawn"
    """Drawn from a law, against which it is tested."""
    GUESS = "guess"
    """Kept where the target says the same, as are the others."""
    FORCED = "forced"
    PREDICTED = "predicted"


class FinishReason(Enum):
    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string."""
    LENGTH = "length"
    """max_tokens or the context limit."""


class DraftLogprobs(StrEnum):
    """How distributions travel from draft to target at temperature > 0. None of them changes the output's law."""

    AUTO = "auto"
    FULL = "full"
    TOPK = "topk"


class AcceptanceRule(StrEnum):
    """Which drafts are kept at temperature > 0. Neither changes the output's law."""

    REJECTION = "rejection"
    """With probability min(1, target / draft)."""
    COUPLED = "coupled"
    """Where they are what the target draws by noise that both share: the text is a function of prompt, parameters and
    seed, whatever the draft does."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How one request speculates; None = the server's default. Enums may be given by value, such as "coupled"."""

    enabled: bool = True
    num_draft_tokens: NumDraftTokens | None = None
    """K, 0 to 64, or "auto": what makes the most tokens per second, step by step."""
    draft_logprobs: DraftLogprobs | str | None = None
    draft_topk: int | None = None
    """N of TOPK, at least 1."""
    acceptance: AcceptanceRule | str | None = None
    lenience: float | None = None
    """Greater than 0, at most 1 = exact. Below it more drafts are kept, and the answer is not exactly the target's."""
    drafter: Drafter | str | None = None
    tree: str | None = None
    """Draft a tree: children by depth such as "4x2x1", or "best:12x4", the 12 most likely nodes up to a depth of 4. Not
    with num_draft_tokens or lenience."""
    explain: bool = False
    """Let each round say what was verified and what was refused: `Round.explanation`. It changes no law. Not with a
    beam search."""


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What the answer has to be: exactly one of these. It is, whatever is drafted, where the answer ends by itself."""

    json: Mapping[str, Any] | bool | str | None = None
    """A JSON Schema (2020-12), or its text."""
    regex: str | None = None
    """An expression for the whole text, in the syntax of Rust's `regex`."""
    choice: Sequence[str] | None = None
    """Texts, of which one is the answer."""
    grammar: str | None = None
    """Lark as llguidance reads it, or GBNF."""
    json_object: bool = False
    """Any JSON object."""
    strict: bool = False
    """Hold the schema to OpenAI's rules: all properties required, and no others allowed."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probs at one token's position under the target's unmodified distribution, nats."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(id, log-prob), most likely first."""


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    kind: TokenKind
    text: str
    """The token's own text; parts of a UTF-8 character show as U+FFFD. Join `Round.text_delta` for the text."""
    logprobs: TokenLogprobs | None = None
    """None unless num_logprobs was given."""


@dataclass(frozen=True, slots=True)
class RoundTimings:
    """Seconds, measured by the gateway. The parts sum to total, unless rounds came together."""

    total_s: float
    """Since the round before, or since the target was told to begin."""
    deliver_s: float
    """The target held its step back for drafts."""
    verify_s: float
    """Queue, forward and acceptance in the target."""
    overhead_s: float
    """The rest."""


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A token that a round verified."""

    id: int
    text: str
    parent: int
    """Index of the draft token that it follows, which comes before it; -1 = the last committed token."""
    accepted: bool
    """Kept by the rule, before any stop cuts it."""
    kind: DraftTokenKind


@dataclass(frozen=True, slots=True)
class RankedToken:
    """A token that might have come."""

    id: int
    text: str
    logprob: float | None
    """Nats; None of a guess."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Where the path of accepted draft tokens ended with one refused."""

    parent: int
    """Index of the last accepted one; -1 = none was."""
    token: RankedToken
    """What the target said instead."""
    target: tuple[RankedToken, ...]
    """The target's best there, at most 5, best first, under the law that it draws from; at temperature 0, where all
    mass is on the first, under that of temperature 1."""
    draft_law: tuple[RankedToken, ...]
    """The same of the law that the draft drew from; empty where nothing was drawn."""
    draft_guesses: tuple[RankedToken, ...]
    """Where nothing was drawn, what the draft guessed, at most 5, best first."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one round verified, why it went no further, and where its time went."""

    committed_len: int
    """Tokens of prompt and output before it."""
    drafter: str | None
    """Who drafted, such as "model", "ngram" or "grammar"; None for a plain step."""
    batch_size: int
    """Answers that shared the target's forward."""
    draft: tuple[DraftToken, ...]
    """Parents before their children."""
    rejection: Rejection | None
    """None where all was kept, and where the answer ended before."""
    queue_s: float
    """This and the next two are `RoundTimings.verify_s`."""
    forward_s: float
    accept_s: float
    draft_s: float | None
    """What the draft's steps took, beside all that; None where no draft worker drafted."""


PLAIN_ADVICE = {
    "off": "K is 0 or speculation off, for this request or as the server's default; or the server has nobody to draft: "
    "start it with --draft MODEL or --drafter auto",
    "end": "the answer was too short for drafts",
    "no_draft": "no draft is connected; the drafters auto and ngram go on without",
    "busy": "no draft has a slot free; give drafts more slots, or add one",
    "none_parked": "no drafts were there in time; with num_draft_tokens=5 (-K 5) steps wait for them",
    "nothing": "the drafter had nothing to propose, as n-grams where no text repeats itself; the drafter model has",
    "does_not_pay": "K is auto, and drafts do not pay on this machine now: plain steps are as fast or faster; "
    "num_draft_tokens=5 (-K 5) drafts all the same",
    "refused": "what was drafted broke a rule of the protocol; the gateway's log says which",
}
"""What to say where nothing was drafted, and what to try, by why steps had no drafts."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of one answer, or of all answers of a call."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_rounds: int
    """Verifies with at least one draft token."""
    num_draft_tokens: int
    """Draft tokens given to a verify."""
    num_accepted_tokens: int
    num_plain_steps: int
    """Steps without drafts."""
    num_wasted_tokens: int
    """Draft tokens that were right and came after their step."""
    seed: int
    """The caller's seed, or the one that the gateway drew."""
    num_cached_prompt_tokens: int = 0
    """Prompt tokens that the target had in its prefix cache. Of several answers: those that none had to compute."""
    lenience: float | None = None
    """None = exactly the target's law."""
    num_accepted_prediction_tokens: int = 0
    """Tokens that the call's prediction had foretold."""
    num_rejected_prediction_tokens: int = 0
    """Tokens of the prediction that are not in the answer."""
    plain_reason: str | None = None
    """Why most of the plain steps had no drafts, one of `PLAIN_ADVICE`; None where there were none."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted, in [0, 1]; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_accepted_length(self) -> float | None:
        """1 + accepted over rounds, as vLLM counts it; None when nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else None

    @property
    def mean_emitted_length(self) -> float | None:
        """Output tokens of rounds over rounds: without what was accepted behind the end of the answer. None when
        nothing was drafted.
        """
        num_emitted = self.num_completion_tokens - self.num_plain_steps
        return max(0, num_emitted) / self.num_rounds if self.num_rounds else None

    @property
    def tokens_per_target_pass(self) -> float | None:
        """Output tokens over the target's forwards (rounds and plain steps); None before the first."""
        passes = self.num_rounds + self.num_plain_steps
        return self.num_completion_tokens / passes if passes else None

    def describe(self) -> str:
        """Return in words what drafting did, or why nothing was drafted and what to try."""
        if self.acceptance_rate is None or self.mean_accepted_length is None:
            why = PLAIN_ADVICE.get(self.plain_reason or "")
            return "nothing was drafted" + (f": {why}" if why else "")
        accepted = f"acceptance rate {self.acceptance_rate:.2f} ({self.num_accepted_tokens}/{self.num_draft_tokens})"
        return f"{accepted}, mean accepted length {self.mean_accepted_length:.2f}"


@dataclass(frozen=True, slots=True)
class Round:
    """What one round added to one answer. A choice's last round has finish_reason and usage."""

    request_id: str
    choice: int
    """Index of the answer, 0 to n - 1."""
    tokens: tuple[Token, ...]
    text_delta: str
    """Text that became certain: never half a character, never the start of a stop string."""
    num_drafted: int
    num_accepted: int
    timings: RoundTimings
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    """The stop string or stop id that ended the answer; None for the model's own end of sequence."""
    usage: Usage | None = None
    score: float | None = None
    """Of a beam search, whose answers come whole: the sum of log-probs, nats, over length ** length_penalty."""
    explanation: Explanation | None = None
    """Where `Speculation.explain` asks for it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    stop_reason: str | None
    usage: Usage
    score: float | None = None
    """Of a beam search: the sum of log-probs, nats, over length ** length_penalty. The first answer has the highest."""


@dataclass(frozen=True, slots=True)
class Completion:
    """All answers of a call."""

    request_id: str
    choices: tuple[Choice, ...]
    """In the order of their index."""

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.choices[0].text

    @property
    def usage(self) -> Usage:
        """Usage summed over the answers; the prompt counts once."""
        return total_usage([choice.usage for choice in self.choices])


@dataclass(frozen=True, slots=True)
class Model:
    """A served pair."""

    id: str
    context_limit: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    draft_id: str | None
    """None when no draft serves it now."""
    drafters: tuple[Drafter, ...] = ()
    """Who may draft for a request now."""


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Return the sum over the answers to one prompt, at least one. The prompt counts once; the seed is shared."""
    return Usage(
        num_prompt_tokens=usages[0].num_prompt_tokens,
        num_completion_tokens=sum(usage.num_completion_tokens for usage in usages),
        num_rounds=sum(usage.num_rounds for usage in usages),
        num_draft_tokens=sum(usage.num_draft_tokens for usage in usages),
        num_accepted_tokens=sum(usage.num_accepted_tokens for usage in usages),
        num_plain_steps=sum(usage.num_plain_steps for usage in usages),
        num_wasted_tokens=sum(usage.num_wasted_tokens for usage in usages),
        seed=usages[0].seed,
        lenience=usages[0].lenience,
        num_cached_prompt_tokens=min(usage.num_cached_prompt_tokens for usage in usages),
        num_accepted_prediction_tokens=sum(usage.num_accepted_prediction_tokens for usage in usages),
        num_rejected_prediction_tokens=sum(usage.num_rejected_prediction_tokens for usage in usages),
        plain_reason=max(usages, key=lambda usage: usage.num_plain_steps).plain_reason,
    )
