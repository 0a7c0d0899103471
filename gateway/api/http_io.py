"""Responses of the HTTP endpoints: JSON, errors in the form of each API, and streams of server-sent events.

Raw ASGI, for speed. `gateway.api.request_body` reads bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.telemetry.request_record import note_failure
from outrider.wire.errors import ENDINGS, OutriderError, Unauthenticated
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
"""Event that ends OpenAI's streams."""
PING = b": ping\n\n"
"""Comment that is sent between events of OpenAI's streams to keep the connection alive. Clients skip it."""
MESSAGES_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""Ping event of Anthropic's streams, which keeps the connection alive."""
WRITE_TIMEOUT_S = 60.0
"""Seconds that one write to a client may take. A client that reads nothing of its response for so long is
disconnected."""
MAX_ERROR_CHARS = 1000
"""Maximal number of characters that a response has of an error's message, and of the name of the wrong parameter.
Longer ones are cut."""
ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""Anthropic's type of error for each HTTP status. Other statuses have the type `invalid_request_error` if below 500,
else `api_error`."""
CLIENT_CLOSED = 499
"""HTTP status, as in nginx, of a response that is made after its client has disconnected. No client receives it."""


class JsonResponse(Response):
    """A JSON response that orjson encodes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def event(data: Any) -> bytes:
    """Return a JSON value as a server-sent event in bytes, without a name."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def error_body(error: OutriderError) -> dict[str, Any]:
    """Return the JSON body of an error in OpenAI's form."""
    param = error.param and shortened(error.param)
    fields = {"type": error.openai_type, "param": param, "code": error.openai_code}
    return {"error": {"message": shortened(error.message), **fields}}


def anthropic_error_body(error: OutriderError) -> dict[str, Any]:
    """Return the JSON body of an error in Anthropic's form."""
    default = "invalid_request_error"
    if error.http_status >= 500:
        default = "api_error"
    kind = ANTHROPIC_ERRORS.get(error.http_status, default)
    fields: dict[str, Any] = {"type": kind, "message": shortened(error.message)}
    if error.details is not None:
        fields["details"] = error.details
    return {"type": "error", "error": fields}


def body_of_error(error: OutriderError, path: str) -> dict[str, Any]:
    """Return the JSON body of an error, in the form of the API to which the endpoint at `path` belongs."""
    if is_anthropic_path(path):
        return anthropic_error_body(error)
    return error_body(error)


def is_anthropic_path(path: str) -> bool:
    """Return whether a URL path is /v1/messages or below it."""
    return f"{path}/".startswith("/v1/messages/")


def shortened(text: str) -> str:
    """Return `text`. If it is longer than MAX_ERROR_CHARS, return so many characters of it, and "...".

    Errors quote what a caller sent, which may be megabytes.
    """
    if len(text) <= MAX_ERROR_CHARS:
        return text
    return f"{text[:MAX_ERROR_CHARS]}..."


def error_response(error: OutriderError, path: str) -> JsonResponse:
    """Return the response for an error of a request to `path`. Also record the error as the request's outcome."""
    note_failure(error)
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return JsonResponse(body_of_error(error, path), error.http_status, headers)


def internal_error(error: BaseException) -> OutriderError:
    """Log a fault of the gateway with its traceback. Return the error, without details, that the client is sent."""
    log.error("a handler failed with %s", type(error).__name__, exc_info=error)
    return OutriderError("internal error; the gateway's log has the place")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Await `work` and return its result. If the client disconnects first, cancel `work`, wait until it has ended, and
    return None.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response that is a stream of server-sent events.

    Status 200 is sent with the first item that `events` yields. If that item is empty, the status is sent alone. An
    error before the first item is sent as an error response with the error's own status.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Callable[[], AsyncGenerator[bytes]],
        ping_s: float,
        failure: Callable[[OutriderError], bytes] = lambda error: event(error_body(error)) + DONE,
        ping: bytes = PING,
    ) -> None:
        """Create the response.

        events: yields bytes, each with one or more complete events. ping_s: `ping` is sent whenever nothing was sent
        for this many seconds; 0 for never. failure: returns the events that end a stream which failed after its first
        item.
        """
        self.status_code = 200  # Response.__init__ would add a content-length
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._failure = failure
        self._ping_s = ping_s
        self._ping = ping
        self._started = False
        self._sent_s = 0.0
        """Time of the last send, in seconds on the event loop's clock."""
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
            if not isinstance(error, OutriderError):
                error = internal_error(error)
            note_failure(error)
            await self._send(send, self._failure(error))
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
                return  # sending the next event fails in the same way
