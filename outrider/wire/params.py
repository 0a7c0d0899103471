"""Sampling parameters: the one validated form used by the gateway, the workers and the SDK."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import AcceptanceRule, Drafter

MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 256
MAX_BAD_WORD_IDS = 256
"""Of each."""
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_DRAFT_TOKENS = 64
"""Largest K."""
MAX_WAIT_BUDGET_MS = 60_000
"""Longest that a target may be asked to wait for a proposal."""
MAX_SEED = 2**64
ANY_VOCABULARY = 1 << 32
"""Size of one, for checks where it is not known."""
MAX_SALT_BYTES = 256
"""Of a cache_salt, a request's (UTF-8) and a slot's."""

AUTO: Literal["auto"] = "auto"
"""K that is chosen round by round."""
DraftTokens = int | Literal["auto"]


def read_draft_tokens(text: str) -> DraftTokens:
    """K as people write it. Raises ValueError."""
    return AUTO if text == AUTO else int(text)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Semantics follow OpenAI and vLLM; the order of transforms is in `engine/sampling.py`.

    Raises InvalidRequest, naming the field, from `check()`.
    """

    max_tokens: int = 16
    """Largest number of output tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 = off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output."""
    presence_penalty: float = 0.0
    """Over the output."""
    frequency_penalty: float = 0.0
    """Over the output."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never completed in the output."""
    min_tokens: int = 0
    """No end-of-sequence or stop id before this many output tokens."""
    seed: int = 0
    """Key of the counter-based generator, 64 bits."""
    choice: int = 0
    """Index among the n answers of a request."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    """How many best ids to return log-probs for, besides the chosen one; None = no log-probs at all."""
    acceptance: AcceptanceRule = AcceptanceRule.REJECTION
    """Without meaning at temperature 0."""
    lenience: float = 1.0
    """1 = exact; below it drafts count as so much less likely than they were (Leviathan et al. 2023, A.5)."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def determined(self) -> bool:
        """What comes next is a function of what is there: drafts are guesses of it, and no law of theirs matters."""
        return self.greedy or self.acceptance is AcceptanceRule.COUPLED

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field that is out of range."""
        _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, 0, 2**31 - 1)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p is 0, must be greater than 0; use temperature 0 for greedy", param="top_p")
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty is 0, must be greater than 0", param="repetition_penalty")
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for token_id, bias in self.logit_bias.items():
            _in_range("logit_bias", token_id, 0, vocab_size - 1)
            _in_range("logit_bias", bias, -100.0, 100.0)
        _at_most("bad_words", len(self.bad_words), MAX_BAD_WORDS)
        for word in self.bad_words:
            if not word:
                raise InvalidRequest("bad_words holds an empty sequence", param="bad_words")
            if len(word) > MAX_BAD_WORD_IDS:
                raise InvalidRequest(
                    f"bad_words holds a sequence of {len(word)} tokens, at most {MAX_BAD_WORD_IDS} are allowed",
                    param="bad_words",
                )
            check_token_ids("bad_words", word, vocab_size)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _in_range("seed", self.seed, 0, MAX_SEED - 1)
        if not 0.0 < self.lenience <= 1.0:
            raise InvalidRequest(
                f"lenience is {self.lenience:g}, must be greater than 0 and at most 1, which is exact",
                param="speculation.lenience",
            )
        if self.lenience < 1.0 and self.acceptance is AcceptanceRule.COUPLED:
            raise InvalidRequest(
                f"lenience is {self.lenience:g} and acceptance coupled, which is exact; leave lenience out, or ask for "
                "acceptance rejection",
                param="speculation.lenience",
            )
        _in_range("choice", self.choice, 0, MAX_CHOICES - 1)
        _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if self.num_logprobs is not None:
            _in_range("logprobs", self.num_logprobs, 0, min(MAX_LOGPROBS, vocab_size))

    def to_proto(self) -> pb.SamplingParams:
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
        )

    @classmethod
    def from_proto(cls, message: pb.SamplingParams) -> SamplingParams:
        """Absent optional fields take their defaults. Not checked: call `check()`. Raises InvalidRequest for an unknown
        rule.
        """
        return cls(
            max_tokens=message.max_tokens,
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=dict(message.logit_bias),
            bad_words=tuple(tuple(word.ids) for word in message.bad_words),
            min_tokens=message.min_tokens,
            seed=message.seed,
            choice=message.choice,
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
            lenience=message.lenience if message.HasField("lenience") else 1.0,
            acceptance=acceptance_of(message.acceptance, "acceptance") or AcceptanceRule.REJECTION,
        )


def acceptance_of(value: pb.AcceptanceRule, name: str) -> AcceptanceRule | None:
    """Raises InvalidRequest, naming the field, for one that this version does not know. None = unspecified."""
    return _known(AcceptanceRule, value, name)


def drafter_of(value: pb.Drafter, name: str) -> Drafter | None:
    """As `acceptance_of`."""
    return _known(Drafter, value, name)


Kind = TypeVar("Kind", AcceptanceRule, Drafter)


def _known(kinds: type[Kind], value: int, name: str) -> Kind | None:
    try:
        return kinds(value) if value else None
    except ValueError:
        raise InvalidRequest(f"{name} is {value}, which this server does not know", param=name) from None


def check_cache_salt(salt: str) -> None:
    """Raise InvalidRequest when it has not 1 to MAX_SALT_BYTES bytes of UTF-8."""
    num_bytes = len(salt.encode())
    if not 1 <= num_bytes <= MAX_SALT_BYTES:
        raise InvalidRequest(
            f"cache_salt has {num_bytes} bytes of UTF-8, must have 1 to {MAX_SALT_BYTES}", param="cache_salt"
        )


def check_token_ids(name: str, ids: tuple[int, ...] | list[int], vocab_size: int) -> None:
    """Raise InvalidRequest naming the first id outside [0, vocab_size)."""
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name}[{index}] is {token_id}, must be a token id from 0 to {vocab_size - 1}", param=name
            )


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if math.isnan(value) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}, must be from {low:g} to {high:g}", param=name)


def _at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} has {count} entries, at most {limit} are allowed", param=name)
