"""The fields that /v1/completions and /v1/chat/completions share, and their conversion to an UncheckedRequest.

The ranges come from `outrider.wire.requests.params`, which checks them for every front end.
"""

from __future__ import annotations

import re
import reprlib
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from gateway.admission.request_checks import MAX_STOP_CHARS, MAX_STOPS, MAX_USER_CHARS
from gateway.admission.unchecked_request import FieldNames, UncheckedRequest
from gateway.api.schemas.base import StrictSchema, described
from gateway.api.schemas.content_parts import PlainText
from gateway.api.schemas.field_types import SEED, TOKEN_ID, LogitBias, Strings, check_early_stopping
from gateway.api.schemas.other_parameters import IGNORED, NEUTRAL, other_parameters, without_former, without_others
from gateway.api.schemas.speculation import SpeculationBody
from gateway.api.schemas.structured_outputs import ResponseFormatBody, StructuredOutputsBody
from gateway.generation import SpeculationOptions
from gateway.output_format import OutputFormat
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import EarlyStopping
from outrider.wire.requests.params import (
    CHOICES,
    LENGTH_PENALTY,
    LOGIT_BIAS,
    LOGPROBS,
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_SALT_BYTES,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    BeamParams,
    SamplingParams,
)
from outrider.wire.requests.scheduling import MAX_TPOT_MS, PRIORITY

DEFAULT_MAX_TOKENS = 16
"""Maximal number of output tokens of a completion without `max_tokens`, as at OpenAI."""
SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
"""Fields of a request body that have the same name and the same default in SamplingParams."""


class PredictionBody(StrictSchema):
    type: Literal["content"]
    content: PlainText


class StreamOptions(StrictSchema):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = described("with include_usage: the tokens so far in each chunk, too")
    include_obfuscation: bool | None = described("ignored: padding against traffic analysis")


class SharedFields(StrictSchema):
    """Base class of the bodies of /v1/completions and /v1/chat/completions. null for a field means its default."""

    model_config = ConfigDict(json_schema_extra=other_parameters(NEUTRAL, IGNORED))

    model: str | None = described(
        "id of the served pair; another id is 404. Must be given where several are served. Default: the only one"
    )
    max_tokens: int | None = described(
        "at least 1. More than the context leaves means what it leaves, unless the gateway was started with "
        f"`--max-tokens-beyond-context refuse`. Default: {DEFAULT_MAX_TOKENS}; chats: what the context leaves",
        minimum=1,
    )
    temperature: float | None = described("0 is greedy. Default: the checkpoint's, or 1", RANGES["temperature"])
    top_p: float | None = described("Default: the checkpoint's, or 1", RANGES["top_p"])
    top_k: int | None = described("0 or -1 = off. Default: the checkpoint's, or 0", RANGES["top_k"], minimum=-1)
    min_p: float | None = described("Default: the checkpoint's, or 0", RANGES["min_p"])
    presence_penalty: float | None = described("over the output. Default: 0", RANGES["presence_penalty"])
    frequency_penalty: float | None = described("over the output. Default: 0", RANGES["frequency_penalty"])
    repetition_penalty: float | None = described(
        "over prompt and output. Default: the checkpoint's, or 1", RANGES["repetition_penalty"]
    )
    logit_bias: LogitBias | None = described(
        f"token ids (as strings) to numbers {LOGIT_BIAS}; at most {MAX_LOGIT_BIAS}",
        propertyNames={"pattern": TOKEN_ID},
    )
    bad_words: Annotated[Strings, Field(max_length=MAX_BAD_WORDS)] | None = described(
        f"strings of 1 to {MAX_STOP_CHARS} characters that must not appear, each tokenised as it stands and after a "
        f"space; at most {MAX_BAD_WORDS} token sequences of at most {MAX_BAD_WORD_IDS} tokens"
    )
    stop: Annotated[Strings, Field(max_length=MAX_STOPS)] | None = described(
        f"a string or up to {MAX_STOPS}, each of 1 to {MAX_STOP_CHARS} characters, across token boundaries too. The "
        "first to be complete ends the answer; it is not part of the text"
    )
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = described(
        f"up to {MAX_STOP_TOKEN_IDS} ids that end the answer", items={"type": "integer", "minimum": 0}
    )
    ignore_eos: bool | None = described("go on past the model's end of sequence. Default: false")
    min_tokens: int | None = described(
        "no end of sequence and no stop id before this many tokens; stop strings do end it. Default: 0", minimum=0
    )
    n: int | None = described("different answers under one seed. Default: 1", CHOICES)
    use_beam_search: bool | None = described(
        "search `n` beams, at least 2, instead of drawing: the `n` answers of the highest scores, best first, see "
        "below. Default: false"
    )
    length_penalty: float | None = described(
        "of a beam search: a score is the sum of log-probs over length to this power. Default: 1", LENGTH_PENALTY
    )
    early_stopping: Annotated[
        Any, BeforeValidator(check_early_stopping, json_schema_input_type=bool | Literal["never"] | None)
    ] = described(
        'of a beam search: true ends it with `n` answers, "never" only where none can become better. Default: false, '
        "where none is likely to"
    )
    seed: int | None = described(
        "64 bits, signed (two's complement) or unsigned. Without one, 53 random bits are drawn for each prompt. At a "
        "temperature above 0 the same text comes again under `speculation.acceptance: coupled`; under `rejection` when "
        "`speculation.num_draft_tokens` is a number, as long as no proposal is late: how much is drafted changes the "
        "draws, and not their law. Default: random",
        **SEED.schema,
    )
    stream: bool | None = described(
        "server-sent events, one per round with all its tokens, `[DONE]` at the end. Default: false"
    )
    stream_options: StreamOptions | None = described(
        "`include_usage`: a last chunk with `usage`; with `continuous_usage_stats` each chunk has the tokens of its "
        "choice so far. `include_obfuscation` is ignored"
    )
    response_format: ResponseFormatBody | None = described(
        "`text`, `json_object`, or `json_schema` with a `schema` and `strict`: what the answer has to be, see below. "
        "Default: text"
    )
    structured_outputs: StructuredOutputsBody | None = described(
        "one of `json`, `regex`, `choice`, `grammar` and `json_object`, as in vLLM: what the answer has to be, see "
        "below"
    )
    speculation: SpeculationBody | None = described("see below. Default: the server's")
    prediction: PredictionBody | None = described(
        '`{"type": "content", "content": ...}`, a string or text parts (joined by newlines): what the answer may be '
        "or be like, as a file before an edit. See below"
    )
    cache_salt: str | None = described(
        f"1 to {MAX_SALT_BYTES} bytes of UTF-8: cached prefixes, and what `lookup` copies from, are shared only "
        "among requests of the same salt. See below",
        minLength=1,
        maxLength=MAX_SALT_BYTES,
    )
    prompt_logprobs: int | None = described(
        "log-probs of the prompt's tokens, and of so many best ones, of the target's unmodified distribution, in the "
        "form of vLLM; not of a stream. Nothing of such a prompt comes from the cache. Default: none",
        LOGPROBS,
    )
    return_token_ids: bool | None = described("`token_ids` and `prompt_token_ids`, as vLLM's. Default: false")
    include_stop_str_in_output: bool | None = described("what ends the answer is a part of its text. Default: false")
    skip_special_tokens: bool | None = described("special tokens are no part of the text. Default: true")
    add_special_tokens: bool | None = described(
        "whether the tokenizer's own are added to a prompt of text. Default: true; of a chat, whose template writes "
        "them, false"
    )
    truncate_prompt_tokens: int | None = described(
        "at least 1: of a longer prompt its last so many tokens are taken; -1 = those that fit. Default: none",
        minimum=-1,
    )
    user: str | None = described(
        f"who asks, at most {MAX_USER_CHARS} characters: `lookup` copies nothing of another's outputs, and under "
        "`--prefix-cache-scope user` no cached prefix is shared with another. See below",
        maxLength=MAX_USER_CHARS,
    )
    priority: int | None = described(
        "as in vLLM: of the requests of one caller (an API key; without keys a `cache_salt`) those with a lower number "
        "go first; whether a request is refused with 429 does not depend on it. Default: 0",
        PRIORITY,
    )
    max_tpot_ms: float | None = described(
        "milliseconds that an output token should take at most, a hint: draft tokens, of any request, are left out of "
        "steps for it. Default: as long as it takes",
        MAX_TPOT_MS,
    )
    safety_identifier: str | None = described(
        "the same as `user`, which goes first when both are given", maxLength=MAX_USER_CHARS
    )

    @model_validator(mode="before")
    @classmethod
    def _without_others(cls, value: Any) -> Any:
        return without_others(without_former(value), NEUTRAL, IGNORED)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream holds the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.include_usage) and bool(options.continuous_usage_stats)

    @property
    def token_kinds(self) -> bool:
        """Whether the response contains the kind of each output token."""
        return self.speculation is not None and self.speculation.has_kinds

    @property
    def detailed_metrics(self) -> bool:
        """Whether the response's `metrics.speculative_decoding` lists every round."""
        return self.speculation is not None and self.speculation.has_detailed_metrics

    @property
    def num_choices(self) -> int:
        """Number of choices for each prompt: the request's `n`, or 1. A number out of range is refused later."""
        if self.n is None:
            return 1
        return self.n

    def _unchecked_request(
        self,
        request_id: str,
        names: FieldNames,
        prompts: tuple[Any, ...],
        max_tokens: int | None,
        num_logprobs: int | None,
    ) -> UncheckedRequest:
        """Most ranges are checked later, with the model's own."""
        self._check_combinations()
        given = self._given_sampling()
        beams = self._beams()
        if beams is not None:
            given.setdefault("temperature", 0.0)
        return UncheckedRequest(
            request_id=request_id,
            model=self.model or "",
            prompts=prompts,
            names=names,
            params=SamplingParams(
                **given,
                logit_bias={int(token_id): bias for token_id, bias in (self.logit_bias or {}).items()},
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
                num_logprobs=num_logprobs,
                beams=beams,
            ),
            named=frozenset(given),
            max_tokens=max_tokens,
            seed=self._unsigned_seed(),
            num_choices=self.num_choices,
            stop=tuple(self.stop or ()),
            bad_words=tuple(self.bad_words or ()),
            speculation=self._speculation_options(),
            prediction=self._prediction_text(),
            cache_salt=self.cache_salt,
            user=self.user or self.safety_identifier or None,
            priority=self.priority or 0,
            max_tpot_ms=self.max_tpot_ms,
            output=self._output_format(),
            num_prompt_logprobs=self.prompt_logprobs,
            keeps_stop=bool(self.include_stop_str_in_output),
            shows_special=self.skip_special_tokens is False,
            adds_special=self.add_special_tokens,
            max_prompt_tokens=self.truncate_prompt_tokens,
        )

    def _check_combinations(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
        if self.speculation is not None and self.speculation.explain and not self.stream:
            text = "speculation.explain is only allowed when stream is true: an event is bounded, a whole answer is not"
            raise InvalidRequest(text, param="speculation.explain")
        if self.seed is not None:
            SEED.check("seed", self.seed)
        for key in self.logit_bias or {}:
            if re.fullmatch(TOKEN_ID, key) is None:
                text = f"logit_bias has the key {reprlib.repr(key)}, must be a token id such as '50256'"
                raise InvalidRequest(text, param="logit_bias")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs is only allowed when stream is false", param="prompt_logprobs")

    def _given_sampling(self) -> dict[str, Any]:
        """The rest are the checkpoint's: the UncheckedRequest names those that were given."""
        given: dict[str, Any] = {}
        for name in SAMPLING:
            value = getattr(self, name)
            if value is not None:
                given[name] = value
        if self.top_k is not None:
            given["top_k"] = self.top_k
        if self.top_k == -1:  # vLLM's way to say off
            given["top_k"] = 0
        return given

    def _beams(self) -> BeamParams | None:
        if self.use_beam_search:
            length_penalty = 1.0
            if self.length_penalty is not None:
                length_penalty = self.length_penalty
            kind = EarlyStopping[str(self.early_stopping or False).upper()]
            return BeamParams(self.num_choices, length_penalty, kind)
        if self.length_penalty not in (None, 1.0):
            raise _needs_beams("length_penalty")
        if self.early_stopping:
            raise _needs_beams("early_stopping")
        return None

    def _unsigned_seed(self) -> int | None:
        if self.seed is None:
            return None
        return self.seed % 2**64

    def _speculation_options(self) -> SpeculationOptions:
        if self.speculation is None:
            return SpeculationOptions()
        return self.speculation.options()

    def _prediction_text(self) -> str:
        if self.prediction is None:
            return ""
        return self.prediction.content

    def _output_format(self) -> OutputFormat | None:
        output = None
        if self.response_format is not None:
            output = self.response_format.output()
        if self.structured_outputs is None:
            return output
        if output is not None:
            text = "response_format and structured_outputs both set the form of the output; give one of them"
            raise InvalidRequest(text, param="structured_outputs")
        return self.structured_outputs.output()


def _needs_beams(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} needs use_beam_search to be true; set it, or leave this out", param=name)
