"""Reads the JSON body of an HTTP request, with limits on its size, its arrival time and the work for the event loop.

`gateway.api.routes` calls `read_json`. The gRPC front end uses some of these limits for its messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import orjson
from starlette.requests import Request

from gateway.admission.admission import IncomingRequest
from gateway.generation import ServedFacts
from outrider.wire.errors import InvalidRequest, RequestTooLarge, RequestTooSlow, UnsupportedMediaType

BODY_TIMEOUT_S = 60.0
"""Seconds within which the body of a request must arrive, counted from when the gateway begins to read it."""
LARGE_BYTES = 64 << 10
"""Size of a request, in bytes, that takes about a millisecond to parse and check. Between the steps of work on a larger
request, other tasks of the event loop run."""
MAX_VALUES = 300_000
"""Maximal number of values in a JSON body, to which `max_values` adds room for a prompt of token ids. To parse 300,000
values takes 10 ms. A /detokenize body with 262,144 tokens fits."""
OBJECT_MARKS = (b"[", b"{", b":")
"""Characters of JSON, outside of strings, that are counted for MAX_OBJECTS."""
MAX_OBJECTS = 100_000
"""Maximal number of lists, objects and fields of objects in a JSON body. To parse 100,000 of them takes 10 ms. A
request with 250 tools, each with 60 fields that have descriptions, has 94,000."""


async def read_json(request: Request, incoming: IncomingRequest, models: Callable[[], Iterable[ServedFacts]]) -> Any:
    """Read the body of a request, and return the parsed JSON value.

    models: returns the served models, whose context limits determine how many values a body may have.

    Raises UnsupportedMediaType if the content type is not JSON, RequestTooLarge as soon as the size or the number of
    values is known to be too large, RequestTooSlow, Overloaded if too many bodies are being read, and InvalidRequest
    for invalid JSON.
    """
    check_is_json(request.headers.get("content-type", ""))
    body = await _read_bytes(request, incoming)
    await yield_to_loop(len(body))
    if len(body) > LARGE_BYTES:
        await check_values(body, max_values(models()))
    try:
        with _without_collections():
            data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    await yield_to_loop(len(body))
    return data


async def _read_bytes(request: Request, incoming: IncomingRequest) -> bytearray:
    max_bytes = incoming.max_bytes
    too_large = RequestTooLarge(f"the body is over {max_bytes} bytes (max_body_bytes); send less")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                incoming.hold(len(part))
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise RequestTooSlow(f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it faster") from None
    return body


def check_is_json(content_type: str) -> None:
    """Raise UnsupportedMediaType unless the type is application/json or application/...+json.

    This protects from web pages: a browser sends bodies of other types (forms, plain text, none) for any page without a
    preflight request. Parameters of the type are ignored, because JSON is always UTF-8 (RFC 8259).
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json")):
        return
    problem = "content-type is missing"
    if content_type:
        problem = f"content-type is {content_type!r}"
    raise UnsupportedMediaType(
        f"{problem}: a body must say that it is JSON; send `Content-Type: application/json` (curl -d says a form's "
        "type unless it is given with -H)",
        param="content-type",
    )


def max_values(models: Iterable[ServedFacts]) -> int:
    """Return the maximal number of values in a body: MAX_VALUES plus twice the longest context limit of `models`.

    A prompt of token ids that is up to twice as long as the context limit therefore passes. It is refused later, with
    an error that names its length.
    """
    return MAX_VALUES + 2 * max((facts.context_limit for facts in models), default=0)


async def check_values(body: bytes | bytearray, num_allowed: int) -> None:
    """Raise RequestTooLarge for a JSON body whose parsing would block the event loop for too long: `num_allowed` values
    or more, counted by the commas between them, or more than MAX_OBJECTS lists, objects and fields.
    """
    # {"a": [1, "x,y"]}: one comma outside texts, and the marks "{", ":" and "["
    num_values = 0
    num_objects = 0
    is_in_text = 0
    for part in _parts(body):
        unescaped = part.replace(rb"\\", b"").replace(rb"\"", b"")  # each quote begins or ends a text from here on
        pieces = unescaped.split(b'"')
        outside = b"".join(pieces[is_in_text::2])
        is_in_text = (is_in_text + len(pieces) - 1) % 2
        num_values += outside.count(b",")
        num_objects += sum(map(outside.count, OBJECT_MARKS))
        if num_values >= num_allowed:
            raise RequestTooLarge(f"the body holds more than {num_allowed} values; split the request")
        if num_objects > MAX_OBJECTS:
            raise RequestTooLarge(
                f"the body holds more than {MAX_OBJECTS} lists, objects and fields; split the request"
            )
        await asyncio.sleep(0)


def _parts(body: bytes | bytearray) -> Iterator[bytes]:
    start = 0
    while start < len(body):
        part = bytes(body[start : start + LARGE_BYTES])
        num_backslashes = len(part) - len(part.rstrip(b"\\"))
        if num_backslashes % 2:  # no part ends between a backslash and what it escapes
            part = bytes(body[start : start + LARGE_BYTES + 1])
        yield part
        start += len(part)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    # JSON has no cycles, and 100,000 new lists would start full collections of garbage.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def yield_to_loop(num_bytes: int) -> None:
    """Let other tasks of the event loop run once if a request of `num_bytes` is larger than LARGE_BYTES.

    Call it between two steps of long work on a request.
    """
    if num_bytes > LARGE_BYTES:
        await asyncio.sleep(0)
