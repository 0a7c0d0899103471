"""What HTTP asks for around an answer: bodies in, errors out, events, and clients that leave. Raw ASGI for speed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.admission.admission import IncomingRequest
from gateway.generation import ServedFacts
from gateway.telemetry.request_record import note_failure
from outrider.wire.errors import (
    ENDINGS,
    InvalidRequest,
    OutriderError,
    RequestTooLarge,
    RequestTooSlow,
    Unauthenticated,
    UnsupportedMediaType,
)
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment, which clients pass over."""
MESSAGES_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""Anthropic's."""
BODY_TIMEOUT_S = 60.0
"""How long a body may take to arrive."""
WRITE_TIMEOUT_S = 60.0
"""A client that takes nothing for this long is left."""
MAX_ERROR_CHARS = 1000
LARGE_BYTES = 64 << 10
"""Bytes of a request that take about a millisecond to read and check."""
MAX_VALUES = 300_000
"""Numbers and texts of a JSON body beside those of its prompt: so many take 10 ms to read. The 262,144 tokens of
/detokenize fit."""
OBJECT_MARKS = (b"[", b"{", b":")
MAX_OBJECTS = 100_000
"""Lists, objects and their fields in a JSON body, which take 10 ms to read. 250 tools of 60 described fields have
94,000."""
ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""Its names for statuses; of others those below 500 are `invalid_request_error`, and the rest `api_error`."""
CLIENT_CLOSED = 499
"""nginx's status for a client that left; nobody reads it."""


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def error_body(error: OutriderError) -> dict[str, Any]:
    """OpenAI's error form."""
    param = None if error.param is None else shortened(error.param)
    fields = {"type": error.openai_type, "param": param, "code": error.openai_code}
    return {"error": {"message": shortened(error.message), **fields}}


def anthropic_error_body(error: OutriderError) -> dict[str, Any]:
    """Anthropic's error form."""
    kind = ANTHROPIC_ERRORS.get(error.http_status, "api_error" if error.http_status >= 500 else "invalid_request_error")
    details = {} if error.details is None else {"details": error.details}
    return {"type": "error", "error": {"type": kind, "message": shortened(error.message), **details}}


def body_of_error(error: OutriderError, path: str) -> dict[str, Any]:
    """Return it as the protocol of this endpoint spells it."""
    return anthropic_error_body(error) if is_anthropics(path) else error_body(error)


def is_anthropics(path: str) -> bool:
    return f"{path}/".startswith("/v1/messages/")


def shortened(text: str) -> str:
    """Errors quote what a caller sent, which may be megabytes."""
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}..."


def error_response(error: OutriderError, path: str) -> JsonResponse:
    note_failure(error)
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return JsonResponse(body_of_error(error, path), error.http_status, headers)


def unexpected(error: BaseException) -> OutriderError:
    """Logs where it happened. The client learns that it is our fault."""
    log.error("a handler failed with %s", type(error).__name__, exc_info=error)
    return OutriderError("internal error; the gateway's log has the place")


def max_values(models: Iterable[ServedFacts]) -> int:
    """Return how many values a body may hold: as a prompt, ids for twice the longest context fit, so that one too long
    is told how long it is.
    """
    return MAX_VALUES + 2 * max((facts.context_limit for facts in models), default=0)


async def check_values(body: bytes | bytearray, most: int) -> None:
    """Raise RequestTooLarge for JSON of more than `most` values, or of more objects than MAX_OBJECTS: to read it would
    hold the event loop.
    """
    num_values = num_objects = is_inside = 0
    for part in _parts(body):
        text = part.replace(rb"\\", b"").replace(rb"\"", b"")  # each quote begins or ends a text from here on
        pieces = text.split(b'"')
        outside = b"".join(pieces[is_inside::2])
        is_inside = (is_inside + len(pieces) - 1) % 2
        num_values += outside.count(b",")
        num_objects += sum(map(outside.count, OBJECT_MARKS))
        if num_values >= most:
            raise RequestTooLarge(f"the body holds more than {most} values; split the request")
        if num_objects > MAX_OBJECTS:
            raise RequestTooLarge(
                f"the body holds more than {MAX_OBJECTS} lists, objects and fields; split the request"
            )
        await asyncio.sleep(0)


def _parts(body: bytes | bytearray) -> Iterator[bytes]:
    """Yield the body in parts of about LARGE_BYTES, none of which ends between a backslash and what it escapes."""
    start = 0
    while start < len(body):
        part = bytes(body[start : start + LARGE_BYTES])
        num_backslashes = len(part) - len(part.rstrip(b"\\"))
        if num_backslashes % 2:
            part = bytes(body[start : start + LARGE_BYTES + 1])
        yield part
        start += len(part)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Let the garbage collector wait. JSON has no cycles, and 100,000 new lists would set off full collections."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def read_json(request: Request, incoming: IncomingRequest, models: Callable[[], Iterable[ServedFacts]]) -> Any:
    """Return the body. models: those served, whose context says how long a prompt of ids may be.

    Raise UnsupportedMediaType for one that does not say JSON, RequestTooLarge as soon as the size or the number of its
    values is known, RequestTooSlow, Overloaded when too many are being read, and InvalidRequest for what is no JSON.
    """
    check_is_json(request.headers.get("content-type", ""))
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
    await let_others_run(len(body))
    if len(body) > LARGE_BYTES:
        await check_values(body, max_values(models()))
    try:
        with _without_collections():
            data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    await let_others_run(len(body))
    return data


async def let_others_run(num_bytes: int) -> None:
    """Give the event loop back between two steps of work on a large request."""
    if num_bytes > LARGE_BYTES:
        await asyncio.sleep(0)


def check_is_json(content_type: str) -> None:
    """Raise UnsupportedMediaType unless it is application/json, or another of application that ends with +json.

    Of other types are the bodies that a browser sends for any page without asking first (forms, plain text, none).
    Parameters mean nothing: JSON is UTF-8 (RFC 8259).
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json")):
        return
    told = f"content-type is {content_type!r}" if content_type else "content-type is missing"
    raise UnsupportedMediaType(
        f"{told}: a body must say that it is JSON; send `Content-Type: application/json` (curl -d says a form's type "
        "unless it is given with -H)",
        param="content-type",
    )


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the client left first; by then `work` has been cancelled and has ended."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from `events`, the last of which says that the stream is complete; `failure` makes what ends
    one that failed instead.

    The status waits for the first item, so that an error before it is an error response and not a broken stream. An
    empty item sends the status alone. From then on `ping` is sent whenever nothing else was for `ping_s`, unless that
    is 0.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Callable[[], AsyncGenerator[bytes]],
        ping_s: float,
        failure: Callable[[OutriderError], bytes] = lambda error: event(error_body(error)) + DONE,
        ping: bytes = PING,
    ) -> None:
        self.status_code = 200  # Response.__init__ would add a content-length
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._failure = failure
        self._ping_s = ping_s
        self._ping = ping
        self._started = False
        self._sent_s = 0.0
        """When something was sent last, on the loop's clock."""
        self._pinger: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events()) as events:
                async for data in events:
                    await self._send(send, data)
        except (ClientDisconnect, *ENDINGS):
            raise
        except BaseException as error:
            if not self._started:
                raise
            known = error if isinstance(error, OutriderError) else unexpected(error)
            note_failure(known)
            await self._send(send, self._failure(known))
        finally:
            if self._pinger is not None:
                self._pinger.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if self._ping_s:
                self._pinger = loop.create_task(self._send_pings(send))
        self._sent_s = loop.time()
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _send_pings(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._sent_s + self._ping_s - loop.time())
            if loop.time() < self._sent_s + self._ping_s:
                continue  # something was sent meanwhile
            try:
                await self._send(send, self._ping)
            except ClientDisconnect:
                return  # whoever sends the events finds out by itself
