"""Roles: they say who a peer is, by its certificate, and which methods it may call. Without TLS it may call all."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum
from typing import Any

import grpc
import grpc.aio

from outrider.wire.errors import Forbidden
from outrider.wire.transport.rpc import abort

_PREFIX = "outrider://"
_DOMAIN = "outrider.internal"


class Role(Enum):
    """A part of the system.

    Its certificate names it twice: as `uri`, by which servers know their callers, and as `host_name`, by which callers
    know the server they reached, whatever its address is.
    """

    GATEWAY = "gateway"
    DRAFT = "draft"
    TARGET = "target"
    LAUNCHER = "launcher"

    @property
    def uri(self) -> str:
        return f"{_PREFIX}{self.value}"

    @property
    def host_name(self) -> str:
        return f"{self.value}.{_DOMAIN}"


_GATEWAY = frozenset({Role.GATEWAY})
_ALLOWED = {
    "/outrider.v1.DraftService/GetInfo": frozenset({Role.GATEWAY, Role.LAUNCHER, Role.DRAFT}),
    "/outrider.v1.DraftService/GetTokenizer": _GATEWAY,
    "/outrider.v1.DraftService/Control": _GATEWAY,
    "/outrider.v1.DraftService/Pair": _GATEWAY,
    "/outrider.v1.TargetService/GetInfo": frozenset({Role.GATEWAY, Role.LAUNCHER, Role.DRAFT, Role.TARGET}),
    "/outrider.v1.TargetService/GetTokenizer": frozenset({Role.GATEWAY, Role.DRAFT}),
    "/outrider.v1.TargetService/Control": _GATEWAY,
    "/outrider.v1.TargetService/Deliver": frozenset({Role.DRAFT}),
    "/outrider.v1.TargetService/Probe": frozenset({Role.DRAFT}),
    "/outrider.v1.RegistryService/Join": _GATEWAY,
    "/outrider.v1.RegistryService/Scale": frozenset({Role.LAUNCHER}),
}
"""Roles that may call each method; a worker's probe asks it for its facts with its own certificate. Others are refused,
except those of the services in _FOR_ANY_CERTIFICATE."""
_FOR_ANY_CERTIFICATE = ("/grpc.health.v1.Health/", "/grpc.reflection.")


def check_may_call(method: str, uris: Iterable[str]) -> None:
    """Raise Forbidden unless the caller may call.

    method: as in "/package.Service/Method". uris: of the caller's certificate.
    """
    if method.startswith(_FOR_ANY_CERTIFICATE):
        return
    allowed = _ALLOWED.get(method, frozenset())
    known = {role.uri: role for role in Role}
    roles = {known[uri] for uri in uris if uri in known}
    if not roles & allowed:
        caller = " and ".join(sorted(role.value for role in roles)) or "without a role"
        others = " or ".join(sorted(role.value for role in allowed)) or "nobody"
        raise Forbidden(f"the caller's certificate is {caller}; {method} is for {others}")


class RoleInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Checks the caller's certificate before each call. For servers that require one."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method: Any = handler_call_details.method
        streaming = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if streams else "unary" for streams in streaming)
        return handler._replace(**{kind: _checked(method, getattr(handler, kind))})


def _checked(method: str, inner: Any) -> Any:
    async def check(context: Any) -> None:
        try:
            check_may_call(method, [uri.decode() for uri in context.auth_context().get("peer_uri", ())])
        except Forbidden as error:
            await abort(context, error)

    async def answer(request: Any, context: Any) -> Any:
        await check(context)
        return await inner(request, context)

    async def answers(request: Any, context: Any) -> Any:
        await check(context)
        async for response in inner(request, context):
            yield response

    return answers if inspect.isasyncgenfunction(inner) else answer
