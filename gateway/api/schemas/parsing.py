"""Parses JSON values as bodies, and turns pydantic's errors into InvalidRequest with the parameter's name."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gateway.api.schemas.content_parts import NoTextBlock, NoTextPart
from gateway.generation import ServedFacts
from outrider.wire.errors import InvalidRequest

Body = TypeVar("Body", bound=BaseModel)


def parse_body(cls: type[Body], data: Any, models: Callable[[], Iterable[ServedFacts]] = tuple) -> Body:
    """Parse a JSON value as a body of the class `cls`, and return the body.

    models: function that returns the served models. If a message has an image, and the checkpoint of the requested
    model has parts for images, which Outrider does not load, the error says so.

    Raises InvalidRequest, which names the first parameter that is unknown, not supported, or of the wrong type.
    """
    try:
        return cls.model_validate(data)
    except NoTextBlock as error:
        error.message += _note_on_text_only(data.get("model"), models())
        raise
    except ValidationError as error:
        invalid = _invalid_request(error)
        cause = error.errors(include_url=False)[0].get("ctx", {}).get("error")
        if isinstance(cause, NoTextPart):
            invalid.message += _note_on_text_only(data.get("model"), models())
        raise invalid from None


def _note_on_text_only(name: Any, models: Iterable[ServedFacts]) -> str:
    """Return what to add to an error about an image: something where the model `name` reads images and its part for
    them is not loaded, else nothing.
    """
    for facts in models:
        is_meant = not name or (isinstance(name, str) and (facts.id == name or facts.is_at(name)))
        if is_meant and facts.text_only:
            return f"; {facts.id} is served text only: what reads images, video and sound is not loaded"
    return ""


def _invalid_request(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    param = _parameter_at(first["loc"])
    value = first["input"]
    if first["type"] == "extra_forbidden":
        text = f"unknown parameter {param}; leave it out, or see GET /openapi.json of this gateway for those offered"
        return InvalidRequest(text, param=param)
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", param=param)
    message = first.get("ctx", {}).get("error", first["msg"])
    if not param:
        if isinstance(value, dict):
            return InvalidRequest(f"the body {message}")
        return InvalidRequest(f"the body is a JSON {type(value).__name__}, must be an object")
    if first["type"] in ("too_long", "too_short") and isinstance(value, list):
        return InvalidRequest(f"{param} has {len(value)} items, {_bound_of(first['ctx'])}", param=param)
    if first["type"] == "model_type":
        message = "must be an object"
        if param == "speculation":
            message += ', such as {"enabled": false}'
    return InvalidRequest(f"{param} is {reprlib.repr(value)}: {message}", param=param)


def _parameter_at(location: Iterable[int | str]) -> str:
    """Return the location of an error as a caller writes it.

    Tags in angle brackets are left out: pydantic adds one for the kind of an entry that may be of several kinds.
    """
    # ("messages", 0, "<text>", "content") is messages[0].content
    param = ""
    for part in location:
        if isinstance(part, int):
            param += f"[{part}]"
        elif not part.startswith("<"):
            param += f".{part}" if param else part
    return param


def _bound_of(context: dict[str, Any]) -> str:
    """Return pydantic's bound on the length of a list, without the list, which its own message quotes."""
    if "max_length" in context:
        return f"at most {context['max_length']} are allowed"
    return f"at least {context['min_length']} is needed"
