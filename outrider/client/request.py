"""From keyword arguments to `GenerateRequest`. What cannot be encoded is refused here; the gateway knows the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

from outrider.client.types import AcceptanceRule, Drafter, DraftLogprobs, Speculation, StructuredOutputs
from outrider.v1 import common_pb2, gateway_pb2
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import EarlyStopping
from outrider.wire.requests.params import (
    ANY_VOCABULARY,
    MAX_CHOICES,
    BeamParams,
    SamplingParams,
    check_cache_salt,
)
from outrider.wire.requests.scheduling import MAX_TPOT_MS, PRIORITY
from outrider.wire.requests.speculation import check_num_draft_tokens, num_draft_tokens_to_proto
from outrider.wire.requests.tree_shape import FORMS, TreeShape


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`. What is absent takes the default of `SamplingParams`."""

    prompt_ids: Sequence[int]
    """Token ids instead of text."""
    messages: Sequence[Message]
    """A chat instead of text; the gateway applies the model's chat template."""
    model: str
    """A served model's id; absent = the only one."""
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    bad_words: Sequence[str | Sequence[int]]
    """Words, or token sequences, that must not appear."""
    min_tokens: int
    seed: int
    """64 bits; absent = the gateway draws one and reports it in the usage."""
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    num_logprobs: int
    """Log-probs of the chosen token and of this many best ones, 0 to 20; absent = none."""
    n: int
    """Answers to the same prompt, 1 to 128."""
    use_beam_search: bool
    """Search n beams, at least 2, at temperature 0: the answers are those of the highest scores, best first."""
    length_penalty: float
    """Of a beam search: an answer's score is its sum of log-probs over length ** length_penalty. Absent = 1."""
    early_stopping: bool | Literal["never"]
    """Of a beam search: True ends it with n answers, "never" only where none can become better."""
    stop: str | Sequence[str]
    """Strings that end the output and are not part of it; at most 16."""
    structured_outputs: StructuredOutputs
    """What the answer has to be, such as `StructuredOutputs(regex=r"\\d+")`."""
    speculation: Speculation | bool
    """False = plain decoding."""
    prediction: str
    """What the answer may be or be like, as a file before an edit: drafts as far as the answer goes along with it."""
    cache_salt: str
    """Cached prefixes are shared only with calls of the same salt; 1 to 256 bytes of UTF-8."""
    user: str
    """Who asks: `lookup` copies nothing of another user's outputs, and a gateway with prefix_cache_scope `user` shares
    no cached prefix with another."""
    priority: int
    """Among the requests of a caller those with a lower number go first; absent = 0."""
    max_tpot_ms: float
    """Milliseconds that a token should take at most, a hint; absent = as long as it takes."""
    timeout_s: float | None
    """Deadline of this call, retries included; None = none; absent = the client's."""


_KNOWN = frozenset(get_type_hints(GenerateOptions))
_SAMPLING = frozenset(field.name for field in fields(SamplingParams)) & _KNOWN
_COUNTS = frozenset({"max_tokens", "top_k", "min_tokens", "seed", "num_logprobs", "n", "priority"})
_NUMBERS = frozenset(
    {
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "length_penalty",
        "max_tpot_ms",
        "timeout_s",
    }
)
_DRAFT_LOGPROBS = {
    DraftLogprobs.AUTO: common_pb2.DRAFT_LOGPROBS_AUTO,
    DraftLogprobs.FULL: common_pb2.DRAFT_LOGPROBS_FULL,
    DraftLogprobs.TOPK: common_pb2.DRAFT_LOGPROBS_TOPK,
}
_ACCEPTANCE = {
    AcceptanceRule.REJECTION: common_pb2.ACCEPTANCE_RULE_REJECTION,
    AcceptanceRule.COUPLED: common_pb2.ACCEPTANCE_RULE_COUPLED,
}


def build_request(prompt: str | None, options: GenerateOptions) -> gateway_pb2.GenerateRequest:
    """Build the message of a call. Raises InvalidRequest naming the parameter; TypeError for an unknown keyword."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    _check_types(options.keys(), given)
    words, word_ids = _split_bad_words(given.get("bad_words", ()))
    params = _sampling_params(given, word_ids).to_proto()
    if params.HasField("beams"):
        params.beams.width = 0  # num_choices says it
    request = gateway_pb2.GenerateRequest(
        params=params,
        has_seed="seed" in given,
        num_choices=_num_choices(given.get("n", 1)),
        speculation=_speculation(given.get("speculation", True)),
    )
    _set_input(request, prompt, given)
    if "structured_outputs" in given:
        request.structured_outputs.CopyFrom(_structured_outputs(given["structured_outputs"]))
    _encode("model", lambda: setattr(request, "model", given.get("model", "")))
    stop = given.get("stop", ())
    for text in (stop,) if isinstance(stop, str) else _encode("stop", lambda: tuple(stop)):
        request.stop.append(_text("stop", text, "token ids go into stop_token_ids"))
    _encode("bad_words", lambda: request.bad_words.extend(words))
    _encode("user", lambda: setattr(request, "user", given.get("user", "")))
    if "priority" in given:
        PRIORITY.check("priority", given["priority"])
        request.priority = int(given["priority"])
    if "max_tpot_ms" in given:
        MAX_TPOT_MS.check("max_tpot_ms", given["max_tpot_ms"])
        request.max_tpot_ms = float(given["max_tpot_ms"])
    request.prediction = _text("prediction", given.get("prediction", ""), "token ids are not taken here")
    if "cache_salt" in given:
        _encode("cache_salt", lambda: setattr(request, "cache_salt", given["cache_salt"]))
        check_cache_salt(request.cache_salt)  # an empty one would mean none on the wire
    return request


def _check_types(names: Any, given: dict[str, Any]) -> None:
    unknown = sorted(set(names) - _KNOWN)
    if unknown:
        raise TypeError(f"unknown parameter {unknown[0]!r}; known: {', '.join(sorted(_KNOWN))}")
    for name, value in given.items():
        kind = Integral if name in _COUNTS else Real if name in _NUMBERS else object
        if not isinstance(value, kind) or (kind is not object and isinstance(value, bool)):
            expected = "a whole number" if kind is Integral else "a number"
            raise InvalidRequest(f"{name} is {value!r}, must be {expected}", param=name)
    if not given.get("timeout_s", 1) > 0:
        raise InvalidRequest(f"timeout_s is {given['timeout_s']}, must be greater than 0, or None", param="timeout_s")


def _sampling_params(given: dict[str, Any], bad_words: tuple[tuple[int, ...], ...]) -> SamplingParams:
    values = {name: value for name, value in given.items() if name in _SAMPLING}
    values["bad_words"] = bad_words
    stop_ids = given.get("stop_token_ids", ())
    values["stop_token_ids"] = _encode("stop_token_ids", lambda: tuple(int(token_id) for token_id in stop_ids))
    bias = given.get("logit_bias", {})
    values["logit_bias"] = _encode("logit_bias", lambda: {int(key): float(value) for key, value in bias.items()})
    beams = _beams(given)
    if beams is not None:
        values = {"temperature": 0.0, **values, "beams": beams}
    params = SamplingParams(**values)
    params.check(ANY_VOCABULARY)  # its size is known to the gateway only
    return params


def _beams(given: dict[str, Any]) -> BeamParams | None:
    early_stopping = given.get("early_stopping", False)
    if early_stopping not in (True, False, "never"):
        text = f'early_stopping is {early_stopping!r}, must be True, False or "never"'
        raise InvalidRequest(text, param="early_stopping")
    if given.get("use_beam_search", False):
        kind = EarlyStopping[str(early_stopping).upper()]
        return BeamParams(given.get("n", 1), given.get("length_penalty", 1.0), kind)
    for name in ("length_penalty", "early_stopping"):
        if name in given:
            raise InvalidRequest(f"{name} needs use_beam_search to be True; set it, or leave this out", param=name)
    return None


def _split_bad_words(words: Sequence[str | Sequence[int]]) -> tuple[list[str], tuple[tuple[int, ...], ...]]:
    if isinstance(words, str):
        raise InvalidRequest(
            f"bad_words is {words!r}, must be a list of words or of token sequences", param="bad_words"
        )
    texts = [word for word in words if isinstance(word, str)]
    ids = _encode("bad_words", lambda: tuple(tuple(map(int, word)) for word in words if not isinstance(word, str)))
    return texts, ids


def _num_choices(n: int) -> int:
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n is {n}, must be from 1 to {MAX_CHOICES}", param="n")
    return int(n)


def _speculation(options: Speculation | bool) -> gateway_pb2.SpeculationOptions:
    if isinstance(options, bool):
        return gateway_pb2.SpeculationOptions(enabled=options)
    if not isinstance(options, Speculation):
        raise InvalidRequest(
            f"speculation is {options!r}, must be True, False or an outrider.client.Speculation, such as "
            "Speculation(num_draft_tokens=4)",
            param="speculation",
        )
    if options.draft_topk is not None and options.draft_topk < 1:  # 0 would mean "the server's default" on the wire
        raise InvalidRequest(
            f"speculation.draft_topk is {options.draft_topk}, must be at least 1", param="speculation.draft_topk"
        )
    message = gateway_pb2.SpeculationOptions(enabled=options.enabled, explain=options.explain)
    if options.num_draft_tokens is not None:
        num_draft_tokens = check_num_draft_tokens(options.num_draft_tokens, "speculation.num_draft_tokens")
        message.num_draft_tokens.CopyFrom(num_draft_tokens_to_proto(num_draft_tokens))
    if options.draft_logprobs is not None:
        message.draft_logprobs = _DRAFT_LOGPROBS[_member(DraftLogprobs, "draft_logprobs", options.draft_logprobs)]
    if options.draft_topk is not None:
        _encode("speculation.draft_topk", lambda: setattr(message, "draft_topk", options.draft_topk))
    if options.acceptance is not None:
        message.acceptance = _ACCEPTANCE[_member(AcceptanceRule, "acceptance", options.acceptance)]
    if options.lenience is not None:
        message.lenience = _lenience(options.lenience)
    if options.drafter is not None:
        message.drafter = _member(Drafter, "drafter", options.drafter)
    if options.tree is not None:
        if not isinstance(options.tree, str):
            raise InvalidRequest(f"speculation.tree is {options.tree!r}; write {FORMS}", param="speculation.tree")
        message.tree.CopyFrom(TreeShape.parse(options.tree, "speculation.tree").to_proto())
    return message


def _structured_outputs(output: StructuredOutputs) -> gateway_pb2.StructuredOutputs:
    param = "structured_outputs"
    if not isinstance(output, StructuredOutputs):
        raise InvalidRequest(
            f"{param} is {repr(output)[:100]}, must be an outrider.client.StructuredOutputs", param=param
        )
    values = {name: getattr(output, name) for name in ("json", "regex", "choice", "grammar")}
    given = {name: value for name, value in values.items() if value is not None}
    if output.json_object:
        given["json_object"] = True
    if len(given) != 1:
        raise InvalidRequest(f"{param} has {' and '.join(given) or 'nothing'}, must have one", param=param)
    ((name, value),) = given.items()
    if name == "json" and not isinstance(value, str):
        value = _encode(f"{param}.json", lambda: json.dumps(value, ensure_ascii=False, allow_nan=False))
    elif name == "choice":
        if isinstance(value, str):
            raise InvalidRequest(f"{param}.choice is {value!r}, must be a list of strings", param=f"{param}.choice")
        texts = _encode(f"{param}.choice", lambda: tuple(value))
        value = gateway_pb2.Choices(texts=[_text(f"{param}.choice", text, "give a list of strings") for text in texts])
    message: gateway_pb2.StructuredOutputs = _encode(
        f"{param}.{name}", lambda: gateway_pb2.StructuredOutputs(strict=output.strict, **{name: value})
    )
    return message


Kind = TypeVar("Kind", bound=Enum)


def _member(kind: type[Kind], name: str, value: Kind | str) -> Kind:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(each.value) for each in kind)
        raise InvalidRequest(
            f"speculation.{name} is {value!r}, must be one of {known}", param=f"speculation.{name}"
        ) from None


def _lenience(share: object) -> float:
    if isinstance(share, bool) or not isinstance(share, Real):
        raise InvalidRequest(f"speculation.lenience is {share!r}, must be a number", param="speculation.lenience")
    return float(share)


def _set_input(request: gateway_pb2.GenerateRequest, prompt: str | None, given: dict[str, Any]) -> None:
    inputs = [name for name in ("prompt_ids", "messages") if name in given] + (["prompt"] if prompt is not None else [])
    if len(inputs) != 1:
        raise InvalidRequest(
            f"give one of prompt, prompt_ids and messages; got {', '.join(inputs) or 'none'}", param="prompt"
        )
    if prompt is not None:
        request.prompt = _text("prompt", prompt, "token ids go into prompt_ids")
    elif "prompt_ids" in given:
        request.prompt_ids.SetInParent()
        _encode("prompt_ids", lambda: request.prompt_ids.ids.extend(given["prompt_ids"]))
    else:
        if isinstance(given["messages"], str | Mapping):
            text = f"messages is {repr(given['messages'])[:100]}, must be a list of objects with role and content"
            raise InvalidRequest(text, param="messages")
        request.chat.SetInParent()
        _encode("messages", lambda: request.chat.messages.extend(_chat_message(item) for item in given["messages"]))


def _chat_message(message: Message) -> gateway_pb2.ChatMessage:
    if set(message) != {"role", "content"}:
        raise InvalidRequest(
            f"messages holds one with the keys {sorted(message)}, must be role and content", param="messages"
        )
    return gateway_pb2.ChatMessage(role=message["role"], content=message["content"])


def _text(param: str, value: Any, remedy: str) -> str:
    """Return the value. Raises InvalidRequest for another type, and for what is not UTF-8."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} is {repr(value)[:100]}, must be a string; {remedy}", param=param)
    _encode(param, lambda: value.encode("utf-8"))
    return value


def _encode(param: str, put: Any) -> Any:
    try:  # protobuf and `int` say what they refuse, but not for which parameter
        return put()
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidRequest(f"{param} cannot be sent: {error}", param=param) from None
