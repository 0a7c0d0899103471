"""`Role`, the part of the system that a peer's certificate names, and the table of the methods that each role may call.

Servers with TLS check the role of every client (`RoleInterceptor`). Without TLS every peer may call every method.
"""

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
    """A part of the system, such as the gateway. With TLS, a process shows a certificate that names its role.

    A certificate names the role in two ways. A server checks the `uri` in the certificate of its client. A client
    checks the `host_name` in the certificate of the server, in place of the server's real address.
    """

    GATEWAY = "gateway"
    DRAFT = "draft"
    TARGET = "target"
    LAUNCHER = "launcher"

    @property
    def uri(self) -> str:
        """URI that stands for the role in a client's certificate. The server checks it."""
        return f"{_PREFIX}{self.value}"

    @property
    def host_name(self) -> str:
        """Host name that stands for the role in a server's certificate. The client that connects checks it."""
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
"""Roles that may call a method, by the method's path. (A worker may call its own GetInfo, because its container's probe
does.) Methods that are not listed are refused, except those of _FOR_ANY_CERTIFICATE."""
_FOR_ANY_CERTIFICATE = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""First parts of the paths of methods that every role may call."""


def check_may_call(method: str, uris: Iterable[str]) -> None:
    """Raise Forbidden unless the client's role may call a method.

    method: path of the method, "/package.Service/Method". uris: the URIs in the client's certificate, one of which
    names its role.
    """
    if method.startswith(_FOR_ANY_CERTIFICATE):
        return
    allowed = _ALLOWED.get(method, frozenset())
    caller_uris = set(uris)
    roles = frozenset(role for role in Role if role.uri in caller_uris)
    if roles & allowed:
        return
    caller = " and ".join(_sorted_names(roles)) or "without a role"
    others = " or ".join(_sorted_names(allowed)) or "nobody"
    raise Forbidden(f"the caller's certificate is {caller}; {method} is for {others}")


def _sorted_names(roles: Iterable[Role]) -> list[str]:
    return sorted(role.value for role in roles)


class RoleInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Interceptor of a server whose clients must show a certificate. Before each call it checks that the role in the
    client's certificate may make the call.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method: Any = handler_call_details.method
        requests = "stream" if handler.request_streaming else "unary"
        responses = "stream" if handler.response_streaming else "unary"
        kind = f"{requests}_{responses}"  # field of the handler's method
        return handler._replace(**{kind: _checked(method, getattr(handler, kind))})


def _checked(method: str, inner: Any) -> Any:
    async def check(context: Any) -> None:
        uris = context.auth_context().get("peer_uri", ())
        try:
            check_may_call(method, list(map(bytes.decode, uris)))
        except Forbidden as error:
            await abort(context, error)

    async def respond(request: Any, context: Any) -> Any:
        await check(context)
        return await inner(request, context)

    async def respond_stream(request: Any, context: Any) -> Any:
        await check(context)
        async for response in inner(request, context):
            yield response

    if inspect.isasyncgenfunction(inner):
        return respond_stream
    return respond
