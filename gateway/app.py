"""The HTTP application, assembled: routes, the one place where errors become statuses, request ids."""

from __future__ import annotations

import uuid

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.generation import Generator
from gateway.http_io import JsonResponse, error_response, unexpected
from gateway.routes import Routes
from outrider.wire.config import GatewayConfig
from outrider.wire.errors import OutriderError


def create_app(generator: Generator, config: GatewayConfig, registry: CollectorRegistry) -> FastAPI:
    """`registry` is what /metrics shows."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)  # bodies are read by hand, so FastAPI knows no schema
    app.include_router(Routes(generator, config, registry).router())
    app.add_exception_handler(OutriderError, _outrider_error)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_middleware(Envelope)
    return app


class Envelope:
    """Outermost: `x-request-id` on every response, and a clear 500 for a fault of our own. Pure ASGI: 4x faster."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["request_id"] = f"req-{uuid.uuid4().hex}"
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = scope["request_id"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # it left while sending its body: nobody is there to be told
        except Exception as error:
            fault = unexpected(error)
            if not started:
                await error_response(fault)(scope, receive, send_with_id)


async def _outrider_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, OutriderError)
    return error_response(error)


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405 in OpenAI's form."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    text = f"no such endpoint: {what}" if error.status_code == 404 else f"{what}: {error.detail}"
    fields = {"type": "invalid_request_error", "param": None, "code": None}
    return JsonResponse({"error": {"message": text, **fields}}, error.status_code, dict(error.headers or {}))
