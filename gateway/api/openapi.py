"""/openapi.json: what FastAPI makes of the routes and their models, with what it cannot know of them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.api.schemas.answers.messages import MessageEvent
from gateway.api.schemas.answers.openai import ChatChunk
from gateway.api.schemas.answers.responses import ResponseEvent
from gateway.api.schemas.answers.server import Error

Json = dict[str, Any]
REF = "#/components/schemas/{model}"

STATUSES = {
    400: "The request cannot be served as it is; `param` names what to change.",
    401: "No API key, or one that is not valid.",
    403: "Without API keys: a page of another origin, or another name of the host.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body does not say that it is JSON.",
    429: "Overloaded, or the API key is over a limit.",
    500: "A fault of the gateway's own.",
    503: "A part of the system is not there.",
    504: "The request took too long.",
}
_HEADERS: dict[int, Json] = {
    401: {"www-authenticate": {"schema": {"type": "string"}}},
    429: {"retry-after": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}},
}


class App(FastAPI):
    def openapi(self) -> Json:
        """Return the document, made once: it takes long enough to be felt by running streams."""
        if self.openapi_schema is None:
            self.openapi_schema = _completed(super().openapi())
        return self.openapi_schema


def errors(*statuses: int, model: type[BaseModel] = Error) -> dict[int | str, Json]:
    """Return what FastAPI's `responses` says of these statuses."""
    return {
        status: {"model": model, "description": STATUSES[status], "headers": dict(_HEADERS.get(status, {}))}
        for status in statuses
    }


def named_events(each: type[BaseModel]) -> Json:
    """Return the `openapi_extra` of an endpoint that may answer with a stream of such events, named by their types."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": REF.format(model=each.__name__)},
    }
    schema = {
        "type": "object",
        "description": f"With `stream`: each event is a {each.__name__}.",
        "required": ["event", "data"],
        "properties": {"event": {"type": "string"}, "data": data},
    }
    return {"responses": {"200": {"content": {"text/event-stream": {"schema": schema}}}}}


def events(chunk: type[BaseModel]) -> Json:
    """Return the `openapi_extra` of an endpoint that may answer with a stream of such chunks."""
    name = chunk.__name__
    told = f"With `stream`: each event is a {name}, the last one `[DONE]`. An error after the first is an event, too."
    either = {"anyOf": [{"$ref": REF.format(model=model)} for model in (name, Error.__name__)]}
    json_data = {"contentMediaType": "application/json", "contentSchema": either}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, json_data]}
    schema = {"type": "object", "description": told, "required": ["data"], "properties": {"data": data}}
    return {"responses": {"200": {"content": {"text/event-stream": {"schema": schema}}}}}


def _completed(document: Json) -> Json:
    schemas = document["components"]["schemas"]
    streamed: Any = [(each, "serialization") for each in (ChatChunk, ResponseEvent, MessageEvent)]
    schemas |= models_json_schema(streamed, ref_template=REF)[1]["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    request_id = {"x-request-id": {"schema": {"type": "string"}, "description": "Of the request, in logs too."}}
    for item in document["paths"].values():
        for operation in item.values():
            operation["responses"].pop("422", None)  # FastAPI's own answer to a bad body; ours is 400
            for response in operation["responses"].values():
                response["headers"] = request_id | response.get("headers", {})
    return document
