"""`build_request` turns the SDK's keyword arguments into the gateway's message `GenerateRequest`.

It refuses values that cannot be encoded and values that are wrong for every model. The gateway checks what depends on
the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from numbers import Real
from typing import Any, TypeVar

from outrider.client.generate_options import KNOWN, GenerateOptions, Message, check_types
from outrider.client.types import AcceptanceRule, DraftLogprobs, Speculation, StructuredOutputs
from outrider.v1 import common_pb2, gateway_pb2
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import EarlyStopping
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import (
    ANY_VOCABULARY,
    MAX_CHOICES,
    BeamParams,
    SamplingParams,
    check_cache_salt,
)
from outrider.wire.requests.scheduling import MAX_TPOT_MS, PRIORITY
from outrider.wire.requests.speculation import check_num_draft_tokens, num_draft_tokens_to_proto
from outrider.wire.requests.tree_shape import SYNTAX, TreeShape

TokenIds = tuple[int, ...]
Kind = TypeVar("Kind", bound=Enum)

_SAMPLING = KNOWN & {field.name for field in fields(SamplingParams)}
"""Options that are fields of `SamplingParams`."""
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
    """Return the message of a Generate call. An option that is None counts as absent.

    Raises InvalidRequest naming the parameter that is wrong, and TypeError for an unknown keyword.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    check_types(options.keys(), given)
    bad_words, bad_ids = _split_bad_words(given.get("bad_words", ()))
    params = _sampling_params(given, bad_ids).to_proto()
    if params.HasField("beams"):
        params.beams.width = 0  # num_choices has it
    request = gateway_pb2.GenerateRequest(
        params=params,
        has_seed="seed" in given,
        num_choices=_num_choices(given.get("n", 1)),
        speculation=_speculation(given.get("speculation", True)),
    )
    _set_input(request, prompt, given)
    if "structured_outputs" in given:
        request.structured_outputs.CopyFrom(_structured_outputs(given["structured_outputs"]))
    with _encoding("model"):
        request.model = given.get("model", "")
    for text in _stop_strings(given.get("stop", ())):
        request.stop.append(_text("stop", text, "token ids go into stop_token_ids"))
    with _encoding("bad_words"):
        request.bad_words.extend(bad_words)
    with _encoding("user"):
        request.user = given.get("user", "")
    if "priority" in given:
        PRIORITY.check("priority", given["priority"])
        request.priority = int(given["priority"])
    if "max_tpot_ms" in given:
        MAX_TPOT_MS.check("max_tpot_ms", given["max_tpot_ms"])
        request.max_tpot_ms = float(given["max_tpot_ms"])
    request.prediction = _text("prediction", given.get("prediction", ""), "token ids are not taken here")
    if "cache_salt" in given:
        with _encoding("cache_salt"):
            request.cache_salt = given["cache_salt"]
        check_cache_salt(request.cache_salt)  # an empty one would mean none on the wire
    return request


# ---- the input


def _set_input(request: gateway_pb2.GenerateRequest, prompt: str | None, given: dict[str, Any]) -> None:
    inputs: list[str] = [name for name in ("prompt_ids", "messages") if name in given]
    if prompt is not None:
        inputs.append("prompt")
    if len(inputs) != 1:
        raise InvalidRequest(
            f"give one of prompt, prompt_ids and messages; got {', '.join(inputs) or 'none'}", param="prompt"
        )
    if prompt is not None:
        request.prompt = _text("prompt", prompt, "token ids go into prompt_ids")
    elif "prompt_ids" in given:
        request.prompt_ids.SetInParent()
        with _encoding("prompt_ids"):
            request.prompt_ids.ids.extend(given["prompt_ids"])
    else:
        request.chat.SetInParent()
        request.chat.messages.extend(_chat_messages(given["messages"]))


def _chat_messages(messages: Any) -> list[gateway_pb2.ChatMessage]:
    if isinstance(messages, str | Mapping):
        text = f"messages is {repr(messages)[:100]}, must be a list of objects with role and content"
        raise InvalidRequest(text, param="messages")
    with _encoding("messages"):
        return [_chat_message(message) for message in messages]


def _chat_message(message: Message) -> gateway_pb2.ChatMessage:
    if set(message) != {"role", "content"}:
        raise InvalidRequest(
            f"messages holds one with the keys {sorted(message)}, must be role and content", param="messages"
        )
    return gateway_pb2.ChatMessage(role=message["role"], content=message["content"])


# ---- how tokens are drawn, and what ends the output


def _sampling_params(given: dict[str, Any], bad_ids: tuple[TokenIds, ...]) -> SamplingParams:
    values = {name: value for name, value in given.items() if name in _SAMPLING}
    values["bad_words"] = bad_ids
    with _encoding("stop_token_ids"):
        values["stop_token_ids"] = tuple(map(int, given.get("stop_token_ids", ())))
    with _encoding("logit_bias"):
        bias = given.get("logit_bias", {})
        values["logit_bias"] = {int(token_id): float(value) for token_id, value in bias.items()}
    beams = _beams(given)
    if beams is not None:
        values = {"temperature": 0.0, **values, "beams": beams}
    params = SamplingParams(**values)
    params.check(ANY_VOCABULARY)  # the gateway alone knows the size of the model's
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


def _split_bad_words(words: Sequence[str | Sequence[int]]) -> tuple[list[str], tuple[TokenIds, ...]]:
    # ["damn", [8, 9]]: (["damn"], ((8, 9),))
    if isinstance(words, str):
        raise InvalidRequest(
            f"bad_words is {words!r}, must be a list of words or of token sequences", param="bad_words"
        )
    texts = list[str]()
    sequences = list[TokenIds]()
    for word in words:
        if isinstance(word, str):
            texts.append(word)
            continue
        with _encoding("bad_words"):
            sequences.append(tuple(map(int, word)))
    return texts, tuple(sequences)


def _stop_strings(stop: Any) -> tuple[Any, ...]:
    if isinstance(stop, str):
        return (stop,)
    with _encoding("stop"):
        return tuple(stop)


def _num_choices(n: int) -> int:
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n is {n}, must be from 1 to {MAX_CHOICES}", param="n")
    return int(n)


# ---- how drafts are made, and what the output must be


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
        with _encoding("speculation.draft_topk"):
            message.draft_topk = options.draft_topk
    if options.acceptance is not None:
        message.acceptance = _ACCEPTANCE[_member(AcceptanceRule, "acceptance", options.acceptance)]
    if options.lenience is not None:
        message.lenience = _lenience(options.lenience)
    if options.drafter is not None:
        message.drafter = _member(Drafter, "drafter", options.drafter)
    if options.tree is not None:
        if not isinstance(options.tree, str):
            raise InvalidRequest(f"speculation.tree is {options.tree!r}; write {SYNTAX}", param="speculation.tree")
        message.tree.CopyFrom(TreeShape.parse(options.tree, "speculation.tree").to_proto())
    return message


def _member(kind: type[Kind], name: str, value: Kind | str) -> Kind:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise InvalidRequest(
            f"speculation.{name} is {value!r}, must be one of {known}", param=f"speculation.{name}"
        ) from None


def _lenience(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequest(f"speculation.lenience is {value!r}, must be a number", param="speculation.lenience")
    return float(value)


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
        with _encoding(f"{param}.json"):
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
    elif name == "choice":
        value = _choices(f"{param}.choice", value)
    with _encoding(f"{param}.{name}"):
        return gateway_pb2.StructuredOutputs(strict=output.strict, **{name: value})


def _choices(param: str, value: Any) -> gateway_pb2.Choices:
    if isinstance(value, str):
        raise InvalidRequest(f"{param} is {value!r}, must be a list of strings", param=param)
    with _encoding(param):
        texts = tuple(value)
    return gateway_pb2.Choices(texts=[_text(param, text, "give a list of strings") for text in texts])


# ---- what cannot be encoded


def _text(param: str, value: Any, remedy: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} is {repr(value)[:100]}, must be a string; {remedy}", param=param)
    with _encoding(param):
        value.encode("utf-8")
    return value


@contextmanager
def _encoding(param: str) -> Iterator[None]:
    # Errors of protobuf and `int` describe the value, but do not name the parameter.
    try:
        yield
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidRequest(f"{param} cannot be sent: {error}", param=param) from None
