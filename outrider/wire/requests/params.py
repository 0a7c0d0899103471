"""`SamplingParams`, the parameters by which tokens are drawn, and their limits. Used by gateway, workers and SDK."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import AcceptanceRule, DraftLogprobs, EarlyStopping

MAX_STOP_TOKEN_IDS = 64
"""Maximum number of a request's stop token ids."""
MAX_BAD_WORDS = 256
"""Maximum number of bad words of a request."""
MAX_BAD_WORD_IDS = 64
"""Maximum number of tokens of one bad word. A row of logits costs one comparison for each different length of the bad
words, 0.05 ms for 64 lengths."""
MAX_LOGIT_BIAS = 1024
"""Maximum number of token ids with a logit bias in a request."""
MAX_LOGPROBS = 20
"""Maximum number of most likely tokens whose log-probs are returned per output token; OpenAI's limit."""
MAX_CHOICES = 128
"""Maximum number of choices of a request; OpenAI's limit."""
MAX_DRAFT_TOKENS = 64
"""Largest possible K (`num_draft_tokens`), in tokens."""
MAX_BEAM_TOKENS = 1 << 15
"""Maximum number of output tokens of all beams of a search together. All of them must fit into the message, of at most
1 MiB, that moves a search to another target."""
MAX_SEED = 2**64
"""Upper limit of a seed, exclusive: seeds are 0 to 2 ** 64 - 1."""
ANY_VOCABULARY = 1 << 32
"""Vocabulary size that is passed to checks of token ids while the size of the target's vocabulary is unknown."""
MAX_GRAMMAR_BYTES = 768 << 10
"""Maximum bytes (UTF-8) of a grammar, so that it fits into a message of 1 MiB."""
MAX_SALT_BYTES = 256
"""Maximum bytes of a `cache_salt`: of the text (UTF-8) in a request, and of the bytes that a worker gets for a slot.
Only equal salts share cached prefixes."""
MAX_CORPUS_ID_BYTES = 32
"""Maximum bytes of a slot's `corpus_id`, a digest of 256 bits. The drafter `lookup` copies into a slot only from
outputs of slots with the same `corpus_id`."""


def read_draft_logprobs(text: str) -> tuple[DraftLogprobs, int | None]:
    """Parse the setting `draft_logprobs`: auto, full, topk or topk:N, where N is the number of likeliest tokens whose
    log-probs are sent. Return (kind, N); N is None in a text without it. Raises ValueError for any other text.
    """
    # "topk:64": (DraftLogprobs.TOPK, 64)
    name, colon, size = text.partition(":")
    kinds = {kind.name.lower(): kind for kind in DraftLogprobs}
    is_size = size.isascii() and size.isdecimal() and len(size) <= 9 and int(size) > 0
    if name not in kinds or (colon and not (name == "topk" and is_size)):
        raise ValueError("must be auto, full, topk or topk:N, N from 1 to the vocabulary's size")
    if not colon:
        return kinds[name], None
    return kinds[name], int(size)


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a numeric parameter of a request, for checks and for the schema and documents of the HTTP API."""

    low: float
    high: float
    above_low: bool = False
    """Whether a value must be above `low`; False = `low` itself is allowed."""
    remedy: str = ""
    """Text at the end of the error for a value outside the bounds, such as what to do instead; may be empty."""

    def check(self, name: str, value: float, param: str | None = None) -> None:
        """Raise InvalidRequest if `value` is outside the bounds or NaN.

        name: name of the parameter in the error's text. param: name of the parameter in the error's field `param`; None
        = `name`.
        """
        if not self.low <= value <= self.high or (self.above_low and value == self.low):
            shown = int(value) if value == value // 1 else value
            raise InvalidRequest(f"{name} is {shown}, must be {self}{self.remedy}", param=param or name)

    def __str__(self) -> str:
        low = _without_zeros(self.low)
        high = _without_zeros(self.high)
        if self.above_low:
            return f"greater than {low} and at most {high}"
        return f"from {low} to {high}"

    @property
    def schema(self) -> dict[str, Any]:
        """The bounds as keywords of JSON Schema, such as {"minimum": 0, "maximum": 2}."""
        minimum = "exclusiveMinimum" if self.above_low else "minimum"
        return {minimum: self.low, "maximum": self.high}


def _without_zeros(number: float) -> str:
    # 1.0: "1", 0.5: "0.5"
    if number == int(number):
        return str(int(number))
    return str(number)


RANGES = {
    "max_tokens": Range(1, 2**31 - 1),
    "temperature": Range(0, 100),
    "top_k": Range(0, 2**31 - 1),
    "top_p": Range(0, 1, above_low=True, remedy="; use temperature 0 for greedy"),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, above_low=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "seed": Range(0, MAX_SEED - 1),
    "choice": Range(0, MAX_CHOICES - 1),
}
"""Bounds of the numeric fields of SamplingParams, by field name."""
LOGIT_BIAS = Range(-100, 100)
LENIENCE = Range(0, 1, above_low=True, remedy=", which is exact")
CHOICES = Range(1, MAX_CHOICES)
LOGPROBS = Range(0, MAX_LOGPROBS)
DRAFT_TOKENS = Range(0, MAX_DRAFT_TOKENS)
LENGTH_PENALTY = Range(-5, 5)
"""Bounds of the length penalty of a beam search. Within them, n ** penalty is a finite float32 for any output of n
tokens."""
NOT_WITH_BEAMS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "min_tokens",
    "num_logprobs",
    "lenience",
    "grammar",
)
"""Fields of SamplingParams that a beam search does not allow: the temperature must be 0, the others must have their
defaults."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of a beam search."""

    width: int
    """Number of beams, which is also the number of choices."""
    length_penalty: float = 1.0
    """Exponent in the score of an output: the sum of its log-probs, divided by n ** length_penalty for n output
    tokens."""
    early_stopping: EarlyStopping = EarlyStopping.FALSE

    def check(self, vocab_size: int, name: str = "n") -> None:
        """Raise InvalidRequest for the first field that is out of range. vocab_size: vocabulary size of the target;
        ANY_VOCABULARY = not known. name: name of the request's parameter that gives the width, for errors.
        """
        remedy = " with use_beam_search; one beam alone is greedy decoding, temperature 0"
        Range(2, min(MAX_CHOICES, vocab_size // 2), remedy=remedy).check(name, self.width)
        LENGTH_PENALTY.check("length_penalty", self.length_penalty)

    def to_proto(self) -> pb.BeamSearch:
        """Convert the parameters to a protobuf message."""
        return pb.BeamSearch(
            width=self.width, length_penalty=self.length_penalty, early_stopping=self.early_stopping.value
        )

    @classmethod
    def from_proto(cls, message: pb.BeamSearch) -> BeamParams:
        """Convert a protobuf message. Raises InvalidRequest for an unknown early_stopping. Numbers are not checked;
        call `check` for that.
        """
        return cls(
            width=message.width,
            length_penalty=_field_or(message, "length_penalty", 1.0),
            early_stopping=_parse_enum(EarlyStopping, message.early_stopping, "early_stopping") or EarlyStopping.FALSE,
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters by which the tokens of one choice are drawn, named as in OpenAI's API and vLLM."""

    max_tokens: int = 16
    """Maximum number of output tokens."""
    temperature: float = 1.0
    """Divisor of the logits; 0 = greedy decoding."""
    top_k: int = 0
    """Number of most likely tokens from which the next token is drawn; 0 = it is drawn from all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Penalty on tokens that occur in the prompt or the output; 1 = off."""
    presence_penalty: float = 0.0
    """Penalty on tokens that occur in the output, however often. 0 = no penalty."""
    frequency_penalty: float = 0.0
    """Penalty on tokens for each time that they occur in the output; 0 = off."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Number to add to the logit of a token, by token id."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that must not appear in the output. Wherever the output ends with all but the last token
    of a sequence, the last token is banned."""
    min_tokens: int = 0
    """Number of output tokens before which no end-of-sequence id or stop id can be drawn."""
    seed: int = 0
    """Key of the counter-based random number generator, 64 bits."""
    choice: int = 0
    """Index, from 0, of this choice among the n choices of its request."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    """Number of most likely tokens whose log-probs are returned in addition to the drawn token's log-prob. None = no
    log-prob is returned, not even the drawn token's."""
    acceptance: AcceptanceRule = AcceptanceRule.REJECTION
    """Rule by which draft tokens are accepted at temperature > 0. It has no effect at temperature 0."""
    lenience: float = 1.0
    """Lenience of the acceptance rule (Leviathan et al. 2023, A.5): the factor on draft probabilities. 1 = the output
    is exact; below 1, more draft tokens are accepted."""
    grammar: str = ""
    """Grammar that the output must follow, in llguidance's JSON format; empty = no grammar."""
    beams: BeamParams | None = None
    """Parameters of the beam search that finds the output; None = no beam search. NOT_WITH_BEAMS lists the other fields
    that a beam search does not allow."""

    @property
    def greedy(self) -> bool:
        """Whether the temperature is 0."""
        return self.temperature == 0.0

    @property
    def is_deterministic(self) -> bool:
        """Whether the choice's next token depends only on the seed and the tokens before it: at temperature 0, and
        under the rule `coupled`. A draft token is then accepted if it equals that token, whatever distribution it was
        drawn from.
        """
        return self.greedy or self.acceptance is AcceptanceRule.COUPLED

    def stop_ids(self, eos_token_ids: Iterable[int]) -> set[int]:
        """Return the token ids that end the output: the request's stop ids and, unless `ignore_eos` is set, the model's
        end-of-sequence ids.
        """
        stop_ids = set(self.stop_token_ids)
        if not self.ignore_eos:
            stop_ids.update(eos_token_ids)
        return stop_ids

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest for the first field that is out of range. vocab_size: vocabulary size of the target;
        ANY_VOCABULARY = not known.
        """
        for name, allowed in RANGES.items():
            allowed.check(name, getattr(self, name))
        self._check_logit_bias(vocab_size)
        self._check_bad_words(vocab_size)
        Range(0, self.max_tokens).check("min_tokens", self.min_tokens)
        LENIENCE.check("speculation.lenience", self.lenience)
        if self.lenience < 1.0 and self.acceptance is AcceptanceRule.COUPLED:
            raise InvalidRequest(
                f"speculation.lenience is {self.lenience:g} and acceptance coupled, which is exact; leave lenience "
                "out, or ask for acceptance rejection",
                param="speculation.lenience",
            )
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        num_bytes = len(self.grammar.encode())
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"the grammar has {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are allowed", param="grammar"
            )
        if self.beams is not None:
            self._check_beams(self.beams, vocab_size)
        if self.num_logprobs is not None:
            Range(0, min(MAX_LOGPROBS, vocab_size)).check("logprobs", self.num_logprobs)

    @property
    def max_cached(self) -> int:
        """Maximum number of output tokens whose keys and values this choice needs in the KV cache at once:
        `max_tokens`, times the number of beams in a beam search.
        """
        if self.beams is None:
            return self.max_tokens
        return self.max_tokens * self.beams.width

    def _check_logit_bias(self, vocab_size: int) -> None:
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        ids = Range(0, vocab_size - 1)
        for token_id, bias in self.logit_bias.items():
            ids.check("logit_bias", token_id)
            LOGIT_BIAS.check("logit_bias", bias)

    def _check_bad_words(self, vocab_size: int) -> None:
        _check_count("bad_words", len(self.bad_words), MAX_BAD_WORDS)
        for word in self.bad_words:
            if not word:
                raise InvalidRequest("bad_words holds an empty sequence", param="bad_words")
            if len(word) > MAX_BAD_WORD_IDS:
                raise InvalidRequest(
                    f"bad_words holds a sequence of {len(word)} tokens, at most {MAX_BAD_WORD_IDS} are allowed",
                    param="bad_words",
                )
            check_token_ids("bad_words", word, vocab_size)

    def _check_beams(self, beams: BeamParams, vocab_size: int) -> None:
        beams.check(vocab_size)
        defaults = SamplingParams(temperature=0.0)
        for name in NOT_WITH_BEAMS:
            value = getattr(self, name)
            if value != getattr(defaults, name):
                shown = f"{name} is {value:g}" if isinstance(value, int | float) else f"{name} is given"
                raise InvalidRequest(
                    f"{shown} and use_beam_search is true, which goes by the model's own probabilities; leave one out",
                    param=name,
                )
        if self.max_cached > MAX_BEAM_TOKENS:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens} for each of n = {beams.width} beams, {self.max_cached} "
                f"together; at most {MAX_BEAM_TOKENS} are allowed, lower one of them",
                param="max_tokens",
            )

    def to_proto(self) -> pb.SamplingParams:
        """Convert the parameters to a protobuf message. Optional fields that have their default are left out."""
        return pb.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            bad_words=[pb.TokenSequence(ids=word) for word in self.bad_words],
            min_tokens=self.min_tokens,
            seed=self.seed,
            choice=self.choice,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            num_logprobs=self.num_logprobs,
            lenience=None if self.lenience == 1.0 else self.lenience,
            acceptance=None if self.acceptance is AcceptanceRule.REJECTION else self.acceptance.value,
            grammar=self.grammar,
            beams=None if self.beams is None else self.beams.to_proto(),
        )

    @classmethod
    def from_proto(cls, message: pb.SamplingParams) -> SamplingParams:
        """Convert a protobuf message. Absent optional fields get their defaults. Numbers are not checked; call `check`
        for that.

        Raises InvalidRequest for an unknown acceptance rule.
        """
        beams = None
        if message.HasField("beams"):
            beams = BeamParams.from_proto(message.beams)
        return cls(
            max_tokens=message.max_tokens,
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=_field_or(message, "top_p", 1.0),
            min_p=message.min_p,
            repetition_penalty=_field_or(message, "repetition_penalty", 1.0),
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=dict(message.logit_bias),
            bad_words=tuple(tuple(word.ids) for word in message.bad_words),
            min_tokens=message.min_tokens,
            seed=message.seed,
            choice=message.choice,
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            num_logprobs=_field_or(message, "num_logprobs", None),
            lenience=_field_or(message, "lenience", 1.0),
            acceptance=acceptance_of(message.acceptance, "acceptance") or AcceptanceRule.REJECTION,
            grammar=message.grammar,
            beams=beams,
        )


def acceptance_of(value: pb.AcceptanceRule, name: str) -> AcceptanceRule | None:
    """Convert a protobuf enum value to an acceptance rule. None = the message gives none. name: name of the field, for
    errors. Raises InvalidRequest for an unknown value.
    """
    return _parse_enum(AcceptanceRule, value, name)


def draft_logprobs_of(value: pb.DraftLogprobs, name: str) -> DraftLogprobs | None:
    """Convert a protobuf enum value to a kind of `draft_logprobs` (auto, full or topk). None = the message gives none.
    name: name of the field, for errors. Raises InvalidRequest for an unknown value.
    """
    return _parse_enum(DraftLogprobs, value, name)


Kind = TypeVar("Kind", AcceptanceRule, DraftLogprobs, EarlyStopping)


def _parse_enum(kinds: type[Kind], value: int, name: str) -> Kind | None:
    if not value:
        return None
    try:
        return kinds(value)
    except ValueError:
        raise InvalidRequest(f"{name} is {value}, which this server does not support", param=name) from None


def check_cache_salt(salt: str) -> None:
    """Raise InvalidRequest unless a request's `cache_salt` has 1 to MAX_SALT_BYTES bytes of UTF-8."""
    num_bytes = len(salt.encode())
    if not 1 <= num_bytes <= MAX_SALT_BYTES:
        raise InvalidRequest(
            f"cache_salt has {num_bytes} bytes of UTF-8, must have 1 to {MAX_SALT_BYTES}", param="cache_salt"
        )


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest for the first id outside [0, vocab_size). name: name of the parameter, for the error."""
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name}[{index}] is {token_id}, must be a token id from 0 to {vocab_size - 1}", param=name
            )


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} has {count} entries, at most {limit} are allowed", param=name)


def _field_or(message: Any, field_name: str, default: Any) -> Any:
    if not message.HasField(field_name):
        return default
    return getattr(message, field_name)
