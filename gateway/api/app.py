"""The HTTP application, assembled: routes, the one place where errors become statuses, request ids."""

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
from gateway.api.http_io import WRITE_TIMEOUT_S, JsonResponse, error_response, is_anthropics, unexpected
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
"""By path: what the ids of its answers begin with, and what OpenTelemetry calls it."""
TOKENS = ("/tokenize", "/detokenize", "/tokenizer_info")
"""vLLM's, which are not under /v1."""
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
"""OpenAI's, Anthropic's and vLLM's endpoints under /v1 that are refused by name."""


def create_app(
    admission: Admission, members: Callable[[], Iterable[Member]] = tuple, grpc_port: int | None = None
) -> App:
    """`members`: the workers as they are when it is called, for /sd. `grpc_port`: what clients are told of it."""
    description = "OpenAI's interface, over disaggregated speculative decoding."
    version = outrider.__version__
    app = App(title="Outrider", version=version, description=description, openapi_url=None, redirect_slashes=False)
    operations = Operations(admission.generator, admission.registry, members)
    app.include_router(Routes(admission, operations).router())
    if admission.config.page:
        app.router.routes.extend(page_routes())
    app.add_exception_handler(OutriderError, _outrider_error)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_middleware(Gate, admission=admission)
    policy = CallerPolicy(admission.config)
    if policy.allows_any_origin and admission.config.api_keys is None:
        log.warning("allowed_origins is *, without api_keys: every web page that somebody visits may call")
    app.add_middleware(CallerCheck, policy=policy)
    app.add_middleware(Envelope, admission=admission, grpc_port=grpc_port)
    app.add_middleware(CorsHeaders, policy=policy)
    return app


class Gate:
    """Nobody comes to anything under /v1, nor to a tokenizer, without a key that is valid, where keys are asked for.
    OpenAI's clients send it in `authorization`, Anthropic's in `x-api-key`. Pure ASGI.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (f"{scope['path']}/".startswith("/v1/") or scope["path"] in TOKENS):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        authorization, key = headers.get("authorization"), headers.get("x-api-key")
        if key is not None and not (authorization or "").lower().startswith("bearer "):
            authorization = f"Bearer {key}"
        try:
            incoming = self._admission.incoming(authorization)
        except OutriderError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        scope["incoming"] = incoming
        scope["models"] = self._admission.generator.models
        try:
            await self._app(scope, receive, send)
        finally:
            incoming.release()


class Envelope:
    """Below CORS alone: `x-request-id` on every response, a record of every request for answers, and a clear 500 for a
    fault of our own. Every answer of /v1/models, a refusal too, names the gRPC port for clients that were given this
    one. Pure ASGI: 4x faster.
    """

    def __init__(self, app: ASGIApp, admission: Admission, grpc_port: int | None) -> None:
        self._app = app
        self._admission = admission
        self._grpc_port = grpc_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # as GET; the server leaves the body out
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        is_post = scope["method"] == "POST"
        prefix, operation = (is_post and OPERATIONS.get(scope["path"])) or ("req", None)
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
            return  # it left while sending its body, or reads nothing: nobody is there to be told
        except ENDINGS:
            raise
        except BaseException as error:
            fault = unexpected(error)
            note_failure(fault)
            if not started:
                await error_response(fault, scope["path"])(scope, receive, send_with_id)


async def _outrider_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OutriderError)
    return error_response(error, request.url.path)


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405 in the form of the protocol's errors."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    what = f"{request.method} {path}"
    text = f"no such endpoint: {what}" if error.status_code == 404 else f"{what}: {error.detail}"
    for name in NOT_OFFERED:
        if error.status_code == 404 and f"{path}/".startswith(f"/v1/{name}/"):
            kind = f"stored {name}" if name == "responses" else name
            text = f"{kind} are not offered by this server; GET /openapi.json lists its endpoints ({what})"
    headers = dict(error.headers or {})
    if is_anthropics(path):
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        told: Any = {"type": "error", "error": {"type": kind, "message": text}}
    else:
        fields = {"type": "invalid_request_error", "param": None, "code": None}
        told = {"error": {"message": text, **fields}}
    return JsonResponse(told, error.status_code, headers)
