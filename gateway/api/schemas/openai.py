"""The bodies of /v1/completions and /v1/chat/completions: every parameter, what it takes, and what it asks for.

/openapi.json and the tables of docs/openai.md are made from these models. The ranges are those of
`outrider.wire.requests.params`, which checks them for every front end.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from typing_extensions import TypedDict

from gateway.admission.prompts import Chat
from gateway.admission.requests import (
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_USER_CHARS,
    Demand,
    FieldNames,
    Infill,
)
from gateway.api.schemas.base import Strict, described
from gateway.api.schemas.content_parts import NoTextBlock, NoTextPart, PlainText
from gateway.api.schemas.messages import AnyTool, MessageBody
from gateway.confined.template_shape import text_of_content
from gateway.generation import AcceptanceRule, ServedFacts, SpeculationOptions
from gateway.output_format import OutputFormat, one_output
from gateway.tools.offer import MAX_LISTED_TOOLS, offer_of
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import EarlyStopping
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import (
    CHOICES,
    DRAFT_TOKENS,
    LENGTH_PENALTY,
    LENIENCE,
    LOGIT_BIAS,
    LOGPROBS,
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_SALT_BYTES,
    MAX_STOP_TOKEN_IDS,
    RANGES,
    BeamParams,
    Range,
    SamplingParams,
    read_draft_logprobs,
)
from outrider.wire.requests.scheduling import MAX_TPOT_MS, PRIORITY
from outrider.wire.requests.speculation import NumDraftTokens, check_num_draft_tokens
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.settings.config import ContentControlTokens

DEFAULT_MAX_TOKENS = 16
SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
"""Fields that SamplingParams has under the same name, with the same default."""
MAX_PROMPTS = 4096
SEED = Range(-(2**63), 2**64 - 1)
"""OpenAI's seeds are signed."""
TOKEN_ID = "^(0|[1-9][0-9]{0,9})$"
"""As JSON writes a number: 3, and not 03."""

IGNORED = {
    "metadata": "nothing is stored",
    "store": "nothing is stored",
    "service_tier": "there is one",
    "prompt_cache_key": "prefixes are found by their tokens; a pair has one cache",
    "prompt_cache_retention": "kept until the memory is needed",
    "verbosity": "models here are not told of it",
    "request_id": "the header `x-request-id` says it",
    "client_metadata": "nothing is stored",
}
"""Parameters that are accepted and change nothing, with the reason."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "chat_template": (),
    "function_call": ("none",),
    "functions": ([],),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""OpenAI's and vLLM's parameters for what is not offered here, with the values (besides null) that ask for nothing."""


TODAY = {
    "guided_json": '"structured_outputs": {"json": ...}',
    "guided_regex": '"structured_outputs": {"regex": ...}',
    "guided_choice": '"structured_outputs": {"choice": [...]}',
    "guided_grammar": '"structured_outputs": {"grammar": ...}',
    "guided_json_object": '"structured_outputs": {"json_object": true}',
    "guided_decoding_backend": None,
    "guided_whitespace_pattern": None,
    "grammar": '"structured_outputs": {"grammar": ...}',
    "json_schema": '"response_format": {"type": "json_schema", "json_schema": ...}',
    "enable_thinking": '"chat_template_kwargs": {"enable_thinking": ...}',
    "max_new_tokens": '"max_tokens"',
    "n_predict": '"max_tokens"',
    "repeat_penalty": '"repetition_penalty"',
    "do_sample": '"temperature", of which 0 is greedy',
    "num_beams": '"use_beam_search": true and "n"',
    "stop_words": '"stop"',
}
"""Names of other servers, and older ones, with what is written here; None = there is nothing of the kind."""


def without_former(value: Any) -> Any:
    """Return a body without names of other servers that are null. Raises InvalidRequest naming what is written here."""
    if not isinstance(value, dict):
        return value
    for name in value.keys() & TODAY.keys():
        if value[name] is not None:
            today = TODAY[name]
            remedy = "leave it out" if today is None else f"write {today} instead"
            raise InvalidRequest(f"{name} is no parameter here; {remedy}", param=name)
    return {name: each for name, each in value.items() if name not in TODAY}


def string_or_strings(value: Any) -> Any:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise ValueError("must be a string or a list of strings")
    return values


def _few_biases(value: Any) -> Any:
    """Refuse large objects unread: pydantic makes an error of each wrong entry first."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    return value


def prompts(value: Any) -> list[str | tuple[int, ...]]:
    """One prompt or a list, each text or token ids. `[]` and `[[]]` are refused later, as empty."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and len(value) > MAX_PROMPTS and type(value[0]) is not int:
        raise ValueError(f"has {len(value)} prompts, at most {MAX_PROMPTS} are read; split the request")
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return list(value)
    if isinstance(value, list) and all(type(each) is int for each in value):
        return [tuple(value)]
    lists = isinstance(value, list) and all(isinstance(each, list) for each in value)
    if lists and all(type(token_id) is int for each in value for token_id in each):
        return [tuple(each) for each in value]
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")


Text = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Strings = Annotated[list[str], BeforeValidator(string_or_strings, json_schema_input_type=Text | list[Text])]
Prompts = Annotated[
    list[Any], BeforeValidator(prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
]


def _num_draft_tokens(value: Any) -> NumDraftTokens | None:
    return None if value is None else check_num_draft_tokens(value, "speculation.num_draft_tokens")


def _early_stopping(value: Any) -> Any:
    if value is not None and type(value) is not bool and value != "never":
        raise ValueError("must be true, false or never")
    return value


class SpeculationBody(Strict):
    enabled: bool | None = None
    num_draft_tokens: Annotated[
        Any, BeforeValidator(_num_draft_tokens, json_schema_input_type=NumDraftTokens | None)
    ] = described("or auto", DRAFT_TOKENS)
    draft_logprobs: str | None = described(
        "auto, full, topk or topk:N", pattern="^(auto|full|topk|topk:[1-9][0-9]{0,8})$"
    )
    acceptance: Literal["rejection", "coupled"] | None = None
    lenience: float | None = described("", LENIENCE)
    drafter: str | None = described("", enum=[*Drafter, None])
    tree: str | None = described(
        "children by depth, 4x2x1, or best:NODESxDEPTH",
        pattern="^([1-9][0-9]?(x[1-9][0-9]?){0,63}|best:[1-9][0-9]?x[1-9][0-9]?)$",
    )
    token_kinds: bool | None = described("each choice says which of its tokens were drafted. Default: false")
    explain: bool | None = described(
        "each event of a stream says what its round verified and what the target refused. Default: false"
    )
    metrics: Literal["summary", "detailed"] | None = described(
        "detailed: metrics.speculative_decoding lists every round, too"
    )

    @property
    def has_kinds(self) -> bool:
        """Whether the answer says what its tokens are: explained rounds do so, too."""
        return bool(self.token_kinds or self.explain)

    def options(self) -> SpeculationOptions:
        """Raises InvalidRequest for a text that cannot be read."""
        try:
            kind, topk = (None, None) if self.draft_logprobs is None else read_draft_logprobs(self.draft_logprobs)
        except ValueError as error:
            text = f"speculation.draft_logprobs is {reprlib.repr(self.draft_logprobs)}, {error}"
            raise InvalidRequest(text, param="speculation.draft_logprobs") from None
        return SpeculationOptions(
            enabled=self.enabled is not False,
            num_draft_tokens=self.num_draft_tokens,
            draft_logprobs=kind,
            draft_topk=topk,
            acceptance=None if self.acceptance is None else AcceptanceRule[self.acceptance.upper()],
            lenience=self.lenience,
            drafter=None if self.drafter is None else Drafter.parse(self.drafter, "speculation.drafter"),
            tree=None if self.tree is None else TreeShape.parse(self.tree, "speculation.tree"),
            explain=bool(self.explain),
        )


AnySchema = Annotated[Any, Field(json_schema_extra={"type": ["object", "boolean"]})]


class JsonSchemaBody(Strict):
    """OpenAI's `json_schema`. Its name and description are for models that are told of them; no template is, here."""

    name: str | None = described("changes nothing")
    description: str | None = described("changes nothing")
    schema_: AnySchema = Field(alias="schema", description="a JSON Schema (2020-12)")
    strict: bool | None = described("hold the schema to OpenAI's rules for strict ones. Default: false")


class ResponseFormatBody(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = described("with type json_schema, and only with it")

    def output(self) -> OutputFormat | None:
        """Raises InvalidRequest."""
        if (self.type == "json_schema") is (self.json_schema is None):
            text = f"response_format has type {self.type} and {'no ' * (self.json_schema is None)}json_schema"
            raise InvalidRequest(f"{text}; they go together", param="response_format.json_schema")
        if self.json_schema is not None:
            param = "response_format.json_schema.schema"
            return OutputFormat("json", self.json_schema.schema_, param, bool(self.json_schema.strict))
        return None if self.type == "text" else OutputFormat("json_object", None, "response_format")


class StructuredOutputsBody(Strict):
    """vLLM's, of which exactly one is given."""

    json_: Annotated[Any, Field(json_schema_extra={"type": ["object", "boolean", "string", "null"]})] = Field(
        default=None, alias="json", description="a JSON Schema, or its text"
    )
    regex: str | None = described("of the whole output, in the syntax of Rust's regex")
    choice: list[str] | None = described("one of these texts")
    grammar: str | None = described("Lark or GBNF")
    json_object: bool | None = described("any JSON object")

    def output(self) -> OutputFormat:
        """Raises InvalidRequest unless exactly one is given."""
        values = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        values["json_object"] = self.json_object or None
        return one_output(values)


class PredictionBody(Strict):
    type: Literal["content"]
    content: PlainText


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = described("with include_usage: the tokens so far in each chunk, too")
    include_obfuscation: bool | None = described("ignored: padding against traffic analysis")


class NamedFunction(TypedDict):
    name: str


class NamedTool(TypedDict):
    type: Literal["function"]
    function: NamedFunction


def read_tool_choice(value: Any) -> str | tuple[str]:
    """Return the word, or the name of a tool in brackets."""
    if value in ("none", "auto", "required"):
        return str(value)
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError('must be none, auto, required or {"type": "function", "function": {"name": NAME}}')
    return (name,)


def other_parameters(neutral: dict[str, tuple[Any, ...]], ignored: dict[str, str]) -> Any:
    """Return the `json_schema_extra` of a body that takes these besides its fields."""

    def add(schema: dict[str, Any]) -> None:
        for name, why in ignored.items():
            schema["properties"][name] = {"description": f"Accepted, changing nothing: {why}."}
        for name, values in neutral.items():
            schema["properties"][name] = {"description": "Not offered; these ask for nothing.", "enum": [None, *values]}

    return add


def without_others(value: Any, neutral: dict[str, tuple[Any, ...]], ignored: dict[str, str]) -> Any:
    """Return a body without what changes nothing. Raises InvalidRequest naming what is not offered and asks for
    something.
    """
    if not isinstance(value, dict):
        return value
    for name in value.keys() & neutral.keys():
        if value[name] is not None and value[name] not in neutral[name]:
            raise InvalidRequest(f"{name} is not offered by this server; leave it out", param=name)
    return {name: each for name, each in value.items() if name not in neutral and name not in ignored}


class _Body(Strict):
    """What both endpoints take. null stands for the default everywhere."""

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
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few_biases), Field(max_length=MAX_LOGIT_BIAS)] | None = (
        described(
            f"token ids (as strings) to numbers {LOGIT_BIAS}; at most {MAX_LOGIT_BIAS}",
            propertyNames={"pattern": TOKEN_ID},
        )
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
        Any, BeforeValidator(_early_stopping, json_schema_input_type=bool | Literal["never"] | None)
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
        """Raises InvalidRequest naming what is not offered and asks for something."""
        return without_others(without_former(value), NEUTRAL, IGNORED)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def token_kinds(self) -> bool:
        return self.speculation is not None and self.speculation.has_kinds

    @property
    def continuous_usage(self) -> bool:
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    @property
    def detailed_metrics(self) -> bool:
        return self.speculation is not None and self.speculation.metrics == "detailed"

    def _output(self) -> OutputFormat | None:
        """Raises InvalidRequest when two fields ask for something."""
        output = None if self.response_format is None else self.response_format.output()
        if self.structured_outputs is None:
            return output
        if output is not None:
            text = "response_format and structured_outputs both say what the answer has to be; give one of them"
            raise InvalidRequest(text, param="structured_outputs")
        return self.structured_outputs.output()

    def _beams(self) -> BeamParams | None:
        """Raises InvalidRequest for what asks for something of a beam search where there is none."""
        penalty, early_stopping = self.length_penalty, self.early_stopping or False
        if self.use_beam_search:
            kind = EarlyStopping[str(early_stopping).upper()]
            return BeamParams(1 if self.n is None else self.n, 1.0 if penalty is None else penalty, kind)
        for name, is_set in (("length_penalty", penalty not in (None, 1.0)), ("early_stopping", early_stopping)):
            if is_set:
                raise InvalidRequest(f"{name} needs use_beam_search to be true; set it, or leave this out", param=name)
        return None

    def _demand(
        self, request_id: str, names: FieldNames, prompts: tuple[Any, ...], max_tokens: int | None, logprobs: int | None
    ) -> Demand:
        """Raises InvalidRequest. Most ranges are checked later, with the model's own."""
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
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        beams = self._beams()
        if beams is not None:
            given.setdefault("temperature", 0.0)
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k  # -1 is vLLM's way to say off
        return Demand(
            request_id=request_id,
            model=self.model or "",
            prompts=prompts,
            names=names,
            params=SamplingParams(
                **given,
                logit_bias={int(key): bias for key, bias in (self.logit_bias or {}).items()},
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
                num_logprobs=logprobs,
                beams=beams,
            ),
            named=frozenset(given),
            max_tokens=max_tokens,
            seed=None if self.seed is None else self.seed % 2**64,
            num_choices=1 if self.n is None else self.n,
            stop=tuple(self.stop or ()),
            bad_words=tuple(self.bad_words or ()),
            speculation=SpeculationOptions() if self.speculation is None else self.speculation.options(),
            prediction="" if self.prediction is None else self.prediction.content,
            cache_salt=self.cache_salt,
            user=self.user or self.safety_identifier or None,
            priority=self.priority or 0,
            max_tpot_ms=self.max_tpot_ms,
            output=self._output(),
            num_prompt_logprobs=self.prompt_logprobs,
            keeps_stop=bool(self.include_stop_str_in_output),
            shows_special=self.skip_special_tokens is False,
            adds_special=self.add_special_tokens,
            most_prompt_tokens=self.truncate_prompt_tokens,
        )


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: Prompts = Field(
        description="a string, a list of strings, a list of token ids, or a list of such lists. Choice *i* of prompt "
        f"*p* has index *p · n + i*. At most {MAX_PROMPTS} prompts, and no more answers than `--max-running` for each "
        "target and `--max-queue` together"
    )
    logprobs: int | None = described(
        "best tokens besides the chosen one, of the target's unmodified distribution. Default: none", LOGPROBS
    )
    max_tokens: int | None = described(
        "0 makes no output, and needs room for one token: for `echo` and `prompt_logprobs`. More than the context "
        "leaves means what it leaves, unless the gateway was started with `--max-tokens-beyond-context refuse`. "
        f"Default: {DEFAULT_MAX_TOKENS}",
        minimum=0,
    )
    suffix: str | None = described(
        "what follows the answer, where the tokenizer has tokens for filling in the middle; prompts are then texts. "
        "Default: none"
    )
    echo: bool | None = described(
        "the prompt in front of each answer; with `logprobs` its tokens, but the first, have them, too. Default: false"
    )
    best_of: int | None = described(
        "at least `n`: so many are made, and the `n` of the highest log-prob a token are told; not of a stream. "
        "Default: `n`",
        **CHOICES.schema,
    )

    @property
    def num_made(self) -> int:
        """Return how many answers are made to each prompt."""
        return (self.n or 1) if self.best_of is None else self.best_of

    @property
    def num_echoed(self) -> int | None:
        """Return how many best tokens the echoed prompt's have beside them; None = it has no log-probs."""
        return self.logprobs if self.echo else None

    def demand(self, request_id: str) -> Demand:
        n = 1 if self.n is None else self.n
        if self.num_made < n:
            raise InvalidRequest(f"best_of is {self.best_of}, must be at least n, {n}", param="best_of")
        if self.num_made > n and (self.stream or self.use_beam_search):
            what = "stream" if self.stream else "use_beam_search"
            text = f"best_of is {self.best_of} and n is {n}, which does not go together with {what}; leave one out"
            raise InvalidRequest(text, param="best_of")
        if self.stream and self.num_echoed is not None and self.num_made > 1:
            text = f"n is {n}, which does not go together with echo, logprobs and stream; leave one out"
            raise InvalidRequest(text, param="n")
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        ranked = self.num_made > n and self.logprobs is None
        demand = self._demand(
            request_id,
            FieldNames(
                prompt="prompt",
                prediction="prediction.content",
                num_choices="n" if self.best_of is None else "best_of",
            ),
            self._prompts(),
            max_tokens or 1,
            0 if ranked else self.logprobs,
        )
        asked = [each for each in (self.num_echoed, self.prompt_logprobs) if each is not None]
        scores = max(asked, default=None)
        return replace(demand, num_choices=self.num_made, num_prompt_logprobs=scores, is_empty=max_tokens == 0)

    def _prompts(self) -> tuple[Any, ...]:
        if not self.suffix:
            return tuple(self.prompt)
        if not all(isinstance(each, str) for each in self.prompt):
            raise InvalidRequest("suffix needs prompts that are texts, not tokens; leave it out", param="suffix")
        return tuple(Infill(each, self.suffix) for each in self.prompt)


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description=f"at most {MAX_MESSAGES}; roles system, developer, user, assistant, tool, and those that the chat "
        "template names; `content` a string or a list of text parts (see [below](#messages)); `name`; of an assistant "
        "`tool_calls` and `reasoning_content`; of a tool `tool_call_id`. developer becomes system where the template "
        "does not know it. Other fields of a message are ignored"
    )
    max_completion_tokens: int | None = described(
        "the same as `max_tokens`, which it must equal when both are given", minimum=1
    )
    logprobs: bool | None = described("whether tokens have log-probs, of the target's unmodified distribution")
    top_logprobs: int | None = described("needs `logprobs`. Default: 0", LOGPROBS)
    add_generation_prompt: bool | None = described("passed to the chat template. Default: true")
    continue_final_message: bool | None = described(
        "the answer goes on with the assistant's last message; needs `add_generation_prompt` to be false. Default: "
        "false"
    )
    chat_template_kwargs: dict[str, Any] | None = described(
        "more variables for the chat template, such as `enable_thinking`"
    )
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = described(
        "objects with `title` and `text`, for a chat template that has a place for them; without one they are refused. "
        "Default: none"
    )
    tools: Annotated[list[AnyTool], Field(max_length=MAX_LISTED_TOOLS, fail_fast=True)] | None = described(
        "functions of different names, at most `--max-tools`, of `--max-tools-bytes` in all; the chat template must "
        "take tools, see [below](#tools). Tools of other types are left out"
    )
    tool_choice: (
        Annotated[
            Any,
            BeforeValidator(read_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool),
        ]
        | None
    ) = described('none, auto, required, or `{"type": "function", "function": {"name": NAME}}`. Default: auto')
    parallel_tool_calls: bool | None = described("whether an answer may hold several calls. Default: true")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = described(
        "none, minimal, low, medium, high or xhigh: passed to the chat template"
    )

    control_tokens_in_content: ContentControlTokens | None = described(
        "allow, or text: control tokens in messages, calls, tools and documents are text like any other, and only "
        "the template's own are tokens. Default: as the API key and the gateway have it, who allow them unless they "
        "say text"
    )
    stop_in_reasoning: bool | None = described(
        "stops end the answer inside its reasoning, too. Default: false, they wait for its end, but for ids of special "
        "tokens"
    )

    def demand(self, request_id: str) -> Demand:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new not in (None, old):
            text = f"max_tokens is {old} and max_completion_tokens is {new}; give one of them"
            raise InvalidRequest(text, param="max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        max_tokens_name = "max_tokens" if new is None else "max_completion_tokens"
        names = FieldNames(
            prompt="messages",
            prediction="prediction.content",
            max_tokens=max_tokens_name,
            num_logprobs="top_logprobs",
        )
        messages = tuple(message.message() for message in self.messages)
        variables = dict(self.chat_template_kwargs or {})
        documents = _documents(self.documents, variables)
        if self.reasoning_effort is not None:
            variables = {"reasoning_effort": self.reasoning_effort, **variables}
        offered = [each.tool(at) for at, each in enumerate(self.tools or ())]
        tools = offer_of([each for each in offered if each is not None], self.tool_choice, self.parallel_tool_calls)
        continues = bool(self.continue_final_message)
        if continues and (self.add_generation_prompt is not False or messages[-1]["role"] != "assistant"):
            text = "continue_final_message needs add_generation_prompt to be false and a last message of the assistant"
            raise InvalidRequest(text, param="continue_final_message")
        if continues:
            tools = replace(tools, continued=text_of_content(messages[-1]["content"]))
        chat = Chat(
            messages,
            self.add_generation_prompt is not False,
            variables,
            tools,
            continues,
            documents,
            control_tokens=self.control_tokens_in_content,
        )
        max_tokens = old if new is None else new
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        demand = self._demand(request_id, names, (chat,), max_tokens, num_logprobs)
        return replace(demand, stops_in_reasoning=bool(self.stop_in_reasoning))


def _documents(given: list[dict[str, Any]] | None, variables: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the documents, which may also come as a variable of the template; take that from `variables`."""
    named = variables.pop("documents", None)
    if named and given and named != given:
        text = "documents and chat_template_kwargs.documents are different; give one of them"
        raise InvalidRequest(text, param="documents")
    found = given or named or []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        text = 'chat_template_kwargs.documents must be a list of objects such as {"title": ..., "text": ...}'
        raise InvalidRequest(text, param="chat_template_kwargs")
    return tuple(found)


Body = TypeVar("Body", bound=BaseModel)


def parse_body(cls: type[Body], data: Any, models: Callable[[], Iterable[ServedFacts]] = tuple) -> Body:
    """Raises InvalidRequest naming the first parameter that is not offered, of the wrong type or unknown.

    models: those that are served, one of which the body may name.
    """
    try:
        return cls.model_validate(data)
    except NoTextBlock as error:
        error.message += _text_only(data.get("model"), models())
        raise
    except ValidationError as error:
        invalid = _invalid(error)
        raised = error.errors(include_url=False)[0].get("ctx", {}).get("error")
        if isinstance(raised, NoTextPart):
            invalid.message += _text_only(data.get("model"), models())
        raise invalid from None


def _text_only(name: Any, models: Iterable[ServedFacts]) -> str:
    """Return what to say of an image for a model that reads some, and is served without; empty for others."""
    for facts in models:
        is_meant = not name or (isinstance(name, str) and (facts.id == name or facts.is_at(name)))
        if is_meant and facts.text_only:
            return f"; {facts.id} is served text only: what reads images, video and sound is not loaded"
    return ""


def _invalid(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    param = ""
    for part in (each for each in first["loc"] if not str(each).startswith("<")):  # <kind>, where there are several
        param += f"[{part}]" if isinstance(part, int) else f"{'.' if param else ''}{part}"
    if first["type"] == "extra_forbidden":
        text = f"unknown parameter {param}; leave it out, or see GET /openapi.json of this gateway for those offered"
        return InvalidRequest(text, param=param)
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", param=param)
    message = first.get("ctx", {}).get("error", first["msg"])
    if not param:
        kind = type(first["input"]).__name__
        return InvalidRequest(f"the body {message if kind == 'dict' else f'is a JSON {kind}, must be an object'}")
    if first["type"] in ("too_long", "too_short") and isinstance(first["input"], list):
        return InvalidRequest(f"{param} has {len(first['input'])} items, {_bound_of(first['ctx'])}", param=param)
    if first["type"] == "model_type":
        message = "must be an object" + (', such as {"enabled": false}' if param == "speculation" else "")
    return InvalidRequest(f"{param} is {reprlib.repr(first['input'])}: {message}", param=param)


def _bound_of(context: dict[str, Any]) -> str:
    """Return what pydantic says of a list's length, without the list."""
    if "max_length" in context:
        return f"at most {context['max_length']} are allowed"
    return f"at least {context['min_length']} is needed"
