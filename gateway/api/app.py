"""Assembles the HTTP application: the routes, and around them middleware for request ids, errors, API keys and CORS.

`gateway.__main__` calls `create_app`. A request passes CorsHeaders, Envelope, CallerCheck and KeyGate in this order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import outrider
from gateway.admission.admission import Admission
from gateway.api.callers import CallerCheck, CallerPolicy, CorsHeaders
from gateway.api.http_io import WRITE_TIMEOUT_S, JsonResponse, error_response, internal_error, is_anthropic_path
from gateway.api.openapi import App
from gateway.api.operations import Operations
from gateway.api.page import page_routes
from gateway.api.routes import Routes
from gateway.telemetry.request_record import note_failure, request_id_of
from gateway.workers.member import Member
from outrider.wire.errors import ENDINGS, OutriderError
from outrider.wire.telemetry.log import get_logger, log_fields
from outrider.wire.transport.address import GRPC_PORT_HEADER

log = get_logger(__name__)

OPERATIONS = {
    "/v1/completions": ("cmpl", "text_completion"),
    "/v1/chat/completions": ("chatcmpl", "chat"),
    "/v1/responses": ("resp", "chat"),
    "/v1/messages": ("msg", "chat"),
}
"""Endpoints that generate tokens, by path: (prefix of their responses' ids, OpenTelemetry's name of the operation)."""
TOKENIZER_PATHS = ("/tokenize", "/detokenize", "/tokenizer_info")
"""Paths of vLLM's endpoints that need an API key although they are outside of /v1."""
NOT_OFFERED = (
    "audio",
    "assistants",
    "batches",
    "conversations",
    "embeddings",
    "files",
    "fine_tuning",
    "images",
    "messages/batches",
    "moderations",
    "realtime",
    "rerank",
    "responses",
    "score",
    "threads",
    "uploads",
    "vector_stores",
    "videos",
)
"""Endpoints of OpenAI, Anthropic and vLLM that this server does not have, as paths below /v1. For a request to one of
them, the message of the 404 response says that this server does not have it."""


def create_app(
    admission: Admission, members: Callable[[], Iterable[Member]] = tuple, grpc_port: int | None = None
) -> App:
    """Return the HTTP application of a gateway.

    members: function that returns the workers as they are now. /sd, Prometheus' service discovery, lists them.
    grpc_port: port of the gRPC server, which responses of /v1/models have in a header; None for no such header.
    """
    app = App(
        title="Outrider",
        version=outrider.__version__,
        description="OpenAI's interface, over disaggregated speculative decoding.",
        openapi_url=None,
        redirect_slashes=False,
    )
    operations = Operations(admission.generator, admission.registry, members)
    app.include_router(Routes(admission, operations).router())
    if admission.config.page:
        app.router.routes.extend(page_routes())
    app.add_exception_handler(OutriderError, _outrider_error)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_middleware(KeyGate, admission=admission)
    policy = CallerPolicy(admission.config)
    if policy.allows_any_origin and admission.config.api_keys is None:
        log.warning("allowed_origins is *, without api_keys: every web page that somebody visits may call")
    app.add_middleware(CallerCheck, policy=policy)
    app.add_middleware(Envelope, admission=admission, grpc_port=grpc_port)
    app.add_middleware(CorsHeaders, policy=policy)
    return app


class KeyGate:
    """Middleware that refuses requests without a valid API key, if the gateway has keys.

    Keys are needed for paths below /v1 and for TOKENIZER_PATHS. OpenAI's clients send the key in `authorization`,
    Anthropic's clients in `x-api-key`. For a request to one of these paths that is not refused, the middleware stores
    an IncomingRequest, which knows the caller to whom the key belongs, in `scope["incoming"]`. Pure ASGI.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _needs_key(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            incoming = self._admission.incoming(_authorization(Headers(scope=scope)))
        except OutriderError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        scope["incoming"] = incoming
        scope["models"] = self._admission.generator.models
        try:
            await self._app(scope, receive, send)
        finally:
            incoming.release()


def _needs_key(path: str) -> bool:
    return f"{path}/".startswith("/v1/") or path in TOKENIZER_PATHS


def _authorization(headers: Headers) -> str | None:
    authorization = headers.get("authorization")
    key = headers.get("x-api-key")
    if key is not None and not (authorization or "").lower().startswith("bearer "):
        return f"Bearer {key}"
    return authorization


class Envelope:
    """Middleware that gives each request an id, records it, and responds with 500 after an unexpected exception.

    Every response gets the header `x-request-id`. Every request that generates tokens is recorded, for logs and
    metrics. The 500 response has the form of an error of the API that was called. Every response to /v1/models, also a
    refusal, has the gRPC port in a header, for SDKs that know only the HTTP port. Pure ASGI, for speed.
    """

    def __init__(self, app: ASGIApp, admission: Admission, grpc_port: int | None) -> None:
        self._app = app
        self._admission = admission
        self._grpc_port = grpc_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # served as GET: uvicorn leaves the body out
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        prefix = "req"
        operation = None
        if scope["method"] == "POST" and scope["path"] in OPERATIONS:
            prefix, operation = OPERATIONS[scope["path"]]
        scope["request_id"], scope["answer_id"] = request_id_of(headers.get("x-request-id"), prefix)
        if operation is None:
            with log_fields(request_id=scope["request_id"]):
                await self._serve(scope, receive, send)
        else:
            with self._admission.records.record(scope["request_id"], operation, headers.get("traceparent")):
                await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = scope["request_id"]
                if self._grpc_port is not None and scope["path"] == "/v1/models":
                    headers[GRPC_PORT_HEADER] = str(self._grpc_port)
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await send(message)
            except TimeoutError:
                log.info("request %s: its client reads nothing and is left", scope["request_id"])
                raise ClientDisconnect from None

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # it disconnected while sending its body, or reads nothing: no response would arrive
        except ENDINGS:
            raise
        except BaseException as error:
            fault = internal_error(error)
            note_failure(fault)
            if not started:
                await error_response(fault, scope["path"])(scope, receive, send_with_id)


async def _outrider_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OutriderError)
    return error_response(error, request.url.path)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    request_line = f"{request.method} {path}"
    if error.status_code == 404:
        message = _not_found_message(path, request_line)
        anthropic_type = "not_found_error"
    else:
        message = f"{request_line}: {error.detail}"
        anthropic_type = "invalid_request_error"
    if is_anthropic_path(path):
        body: Any = {"type": "error", "error": {"type": anthropic_type, "message": message}}
    else:
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    return JsonResponse(body, error.status_code, dict(error.headers or {}))


def _not_found_message(path: str, request_line: str) -> str:
    message = f"no such endpoint: {request_line}"
    for name in NOT_OFFERED:
        if f"{path}/".startswith(f"/v1/{name}/"):
            kind = "stored responses" if name == "responses" else name
            message = f"{kind} are not offered by this server; GET /openapi.json lists its endpoints ({request_line})"
    return message
