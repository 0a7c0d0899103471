"""/openapi.json: the HTTP interface as a schema, from the models of bodies and answers. In prose: docs/openai.md."""

from __future__ import annotations

import functools
from typing import Any

import orjson
from pydantic.json_schema import models_json_schema

import outrider
from gateway.answer_schemas import ANSWERS
from gateway.parameters import IGNORED, NEUTRAL
from gateway.requests import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS, MAX_USER_CHARS
from gateway.schemas import ChatBody, CompletionBody
from outrider.wire.params import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_DRAFT_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SALT_BYTES,
    MAX_STOP_TOKEN_IDS,
)

Json = dict[str, Any]

_TEXT = {"minLength": 1, "maxLength": MAX_STOP_CHARS}
_SPECULATION: dict[str, Json] = {
    "num_draft_tokens": {"minimum": 0, "maximum": MAX_DRAFT_TOKENS},
    "lenience": {"exclusiveMinimum": 0, "maximum": 1},
    "tree": {"pattern": "^([1-9][0-9]?(x[1-9][0-9]?){0,63}|best:[1-9][0-9]?x[1-9][0-9]?)$"},
    "draft_logprobs": {"pattern": "^(auto|full|topk|topk:[1-9][0-9]{0,9})$"},
}
BOUNDS: dict[str, Json] = {
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "best_of": {"minimum": 1, "maximum": MAX_CHOICES},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "logit_bias": {"maxProperties": MAX_LOGIT_BIAS, "propertyNames": {"pattern": "^[0-9]{1,10}$"}},
    "bad_words": {"maxItems": MAX_BAD_WORDS, **_TEXT},
    "stop": {"maxItems": MAX_STOPS, **_TEXT},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS, "items": {"type": "integer", "minimum": 0}},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "cache_salt": {"minLength": 1, "maxLength": MAX_SALT_BYTES},
    "user": {"maxLength": MAX_USER_CHARS},
    "safety_identifier": {"maxLength": MAX_USER_CHARS},
    "messages": {"maxItems": MAX_MESSAGES},
}
"""What each parameter takes beyond its type, where a schema can say it. The gateway checks by code, cheapest first."""

_STATUSES = {
    400: "The request cannot be served as it is; `param` names what to change.",
    401: "No API key, or one that is not valid.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Overloaded, or the API key is over a limit.",
    500: "A fault of the gateway's own.",
    503: "A part of the system is not there.",
    504: "The request took too long.",
}
_ID = {"x-request-id": {"schema": {"type": "string"}, "description": "Of the request, in logs too."}}
_RETRY = {"retry-after": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}}
_CHALLENGE = {"www-authenticate": {"schema": {"type": "string"}}}
_HEADERS: dict[int, Json] = {401: _CHALLENGE, 429: _RETRY}


@functools.cache
def openapi_json(asks_for_keys: bool) -> bytes:
    """The document, made once: it takes long enough to be felt by running streams."""
    return orjson.dumps(openapi_document(asks_for_keys))


def openapi_document(asks_for_keys: bool) -> Json:
    """`asks_for_keys`: whether /v1 needs an API key."""
    document: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "Outrider",
            "version": outrider.__version__,
            "description": "OpenAI's interface, over disaggregated speculative decoding.",
        },
        "paths": _paths(),
        "components": {"schemas": _schemas()},
    }
    if asks_for_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, item in document["paths"].items():
            if path.startswith("/v1/"):
                for operation in item.values():
                    operation["security"] = [{"key": []}]
    return document


def _schemas() -> Json:
    bodies = [(model, "validation") for model in (CompletionBody, ChatBody)]
    answers = [(model, "serialization") for model in ANSWERS]
    _, found = models_json_schema([*bodies, *answers], ref_template="#/components/schemas/{model}")  # type: ignore[list-item]
    schemas: Json = found["$defs"]
    for model in (CompletionBody, ChatBody):
        properties = schemas[model.__name__]["properties"]
        _bound(properties, BOUNDS)
        if model is CompletionBody:  # in a chat it is true or false
            properties["logprobs"] |= {"minimum": 0, "maximum": MAX_LOGPROBS}
        for name in sorted(IGNORED):
            properties.setdefault(name, {"description": "Accepted, changing nothing."})
        for name, values in NEUTRAL.items():
            properties.setdefault(name, {"description": "Not offered; these ask for nothing.", "enum": [None, *values]})
    _bound(schemas["SpeculationBody"]["properties"], _SPECULATION)
    return schemas


def _bound(properties: Json, bounds: dict[str, Json]) -> None:
    for name, bound in bounds.items():
        if name in properties:
            items = {key: value for key, value in bound.items() if key in ("minLength", "maxLength")}
            properties[name] |= bound
            for variant in properties[name].get("anyOf", ()):
                if items and variant.get("type") == "array":
                    variant["items"] |= items


def _paths() -> Json:
    asked = (400, 401, 404, 408, 413, 429, 500, 503, 504)
    return {
        "/v1/completions": {"post": _generation("CompletionBody", "Completion", "Completion", asked)},
        "/v1/chat/completions": {"post": _generation("ChatBody", "ChatCompletion", "ChatChunk", asked)},
        "/v1/models": {"get": _get("The served models.", "ModelList", (401,))},
        "/v1/models/{model_id}": {
            "get": {
                **_get("One of them.", "Model", (401, 404)),
                "parameters": [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}],
            }
        },
        "/metrics": {"get": _text("Prometheus series.", "text/plain")},
        "/healthz": {"get": _get("The process lives.", "Alive", ())},
        "/readyz": {
            "get": _get("A request would be served now.", "Ready", ())
            | {"responses": {"200": _answer("It would.", "Ready"), "503": _answer("It would not.", "Ready")}}
        },
        "/sd": {"get": _get("The workers' metrics endpoints, for Prometheus' http_sd_configs.", "TargetGroups", ())},
        "/openapi.json": {"get": _text("This document.", "application/json")},
    }


def _generation(body: str, whole: str, chunk: str, statuses: tuple[int, ...]) -> Json:
    told = f"With `stream`: each event is a {chunk}, the last one `[DONE]`. An error after the first is an event, too."
    json_data = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [_ref(chunk), _ref("Error")]}}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, json_data]}
    events = {"type": "object", "description": told, "required": ["data"], "properties": {"data": data}}
    found = _answer("The answer.", whole)
    found["content"]["text/event-stream"] = {"schema": events}
    return {
        "summary": f"{whole}, whole or as a stream of {chunk}.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
        "responses": {"200": found, **_errors(statuses)},
    }


def _get(summary: str, schema: str, statuses: tuple[int, ...]) -> Json:
    return {"summary": summary, "responses": {"200": _answer(summary, schema), **_errors(statuses)}}


def _text(summary: str, media_type: str) -> Json:
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "headers": _ID, "content": {media_type: {}}}},
    }


def _answer(description: str, schema: str, headers: Json | None = None) -> Json:
    content = {"application/json": {"schema": _ref(schema)}}
    return {"description": description, "headers": {**_ID, **(headers or {})}, "content": content}


def _errors(statuses: tuple[int, ...]) -> Json:
    return {str(status): _answer(_STATUSES[status], "Error", _HEADERS.get(status)) for status in statuses}


def _ref(schema: str) -> Json:
    return {"$ref": f"#/components/schemas/{schema}"}
