"""The document /openapi.json: made by FastAPI from the routes and their models, completed with what FastAPI leaves out.

`gateway.api.routes` uses the functions here to describe statuses and streams.
"""

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
"""Format string of the reference to a schema in /openapi.json; {model} is the name of the model."""

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
"""For each HTTP status of an error response: its description in /openapi.json."""
_HEADERS: dict[int, Json] = {
    401: {"www-authenticate": {"schema": {"type": "string"}}},
    429: {"retry-after": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}},
}


class App(FastAPI):
    """A FastAPI application that adds to /openapi.json what FastAPI does not know, such as the events of streams."""

    def openapi(self) -> Json:
        """Return the document /openapi.json.

        It is made at the first call and then stored. Making it blocks the event loop, so running streams pause
        meanwhile.
        """
        if self.openapi_schema is None:
            self.openapi_schema = _completed(super().openapi())
        return self.openapi_schema


def errors(*statuses: int, model: type[BaseModel] = Error) -> dict[int | str, Json]:
    """Return the value of FastAPI's parameter `responses` for an endpoint that may answer with these error statuses.

    model: pydantic model of an error's body.
    """
    responses: dict[int | str, Json] = {}
    for status in statuses:
        headers = dict(_HEADERS.get(status, {}))
        responses[status] = {"model": model, "description": STATUSES[status], "headers": headers}
    return responses


def named_event_stream(model: type[BaseModel]) -> Json:
    """Return the value of FastAPI's `openapi_extra` for an endpoint that may respond with a stream of named events.

    model: pydantic model of the events. An event's field `type` is also its name.
    """
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": REF.format(model=model.__name__)},
    }
    schema = {
        "type": "object",
        "description": f"With `stream`: each event is a {model.__name__}.",
        "required": ["event", "data"],
        "properties": {"event": {"type": "string"}, "data": data},
    }
    return _event_stream(schema)


def events(chunk: type[BaseModel]) -> Json:
    """Return the value of FastAPI's `openapi_extra` for an endpoint that may stream chunks, which `[DONE]` ends.

    chunk: pydantic model of the chunks.
    """
    name = chunk.__name__
    description = (
        f"With `stream`: each event is a {name}, the last one `[DONE]`. An error after the first is an event, too."
    )
    either = {"anyOf": [{"$ref": REF.format(model=name)}, {"$ref": REF.format(model=Error.__name__)}]}
    json_data = {"contentMediaType": "application/json", "contentSchema": either}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, json_data]}
    schema = {"type": "object", "description": description, "required": ["data"], "properties": {"data": data}}
    return _event_stream(schema)


def _event_stream(schema: Json) -> Json:
    return {"responses": {"200": {"content": {"text/event-stream": {"schema": schema}}}}}


def _completed(document: Json) -> Json:
    schemas = document["components"]["schemas"]
    # No route returns these models, so FastAPI does not know them.
    streamed: Any = [(model, "serialization") for model in (ChatChunk, ResponseEvent, MessageEvent)]
    schemas |= models_json_schema(streamed, ref_template=REF)[1]["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    request_id = {"x-request-id": {"schema": {"type": "string"}, "description": "Of the request, in logs too."}}
    for item in document["paths"].values():
        for operation in item.values():
            operation["responses"].pop("422", None)  # FastAPI's status of a bad body, which is 400 here
            for response in operation["responses"].values():
                response["headers"] = request_id | response.get("headers", {})
    return document
