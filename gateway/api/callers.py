"""Decides by the headers `Origin` and `Host` which web pages may call a gateway, and sets CORS headers for them.

Without API keys, any page in a browser on a host that reaches the gateway could otherwise use it. Requests to
`metrics_port` are checked only if that port is on a loopback address, because on others probes use many host names.

starlette's CORSMiddleware is not used. It sends some headers to origins that are not listed, its refusals name no
setting, and its oldest supported version does not support private network access.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.http_io import error_response
from outrider.wire.errors import Forbidden
from outrider.wire.processes.origin import ANY, Origin, OriginHost, read_host_names, read_origins
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.transport.address import is_loopback

_EXPOSED = "x-request-id, retry-after"
_PREFLIGHT_MAX_AGE_S = 600
"""Seconds for which a browser may reuse the response to a preflight request, as in starlette."""


class CallerPolicy:
    """Decides by a request's headers `Origin` and `Host`, and by the gateway's settings, whether it may be served."""

    def __init__(self, config: GatewayConfig) -> None:
        self.has_origins = config.allowed_origins is not None
        """Whether the setting allowed_origins is set, so that pages of other servers may call the gateway."""
        self._origins = read_origins(config.allowed_origins or "")
        """Origins that the setting allowed_origins lists; None if it is `*`, for any origin."""
        self._hosts = read_host_names(config.allowed_hosts or "")
        self._has_keys = config.api_keys is not None
        self._checks_host = is_loopback(config.host) or config.allowed_hosts is not None
        self._on_loopback = is_loopback(config.host)

    @property
    def allows_any_origin(self) -> bool:
        """Whether the setting allowed_origins is `*`."""
        return self._origins is None

    def allows_origin(self, origin: str) -> bool:
        """Return whether allowed_origins permits `origin`, the value of an `Origin` header."""
        if self._origins is None:
            return True
        parsed = Origin.parse(origin)
        return parsed is not None and parsed in self._origins

    def check(self, headers: Headers) -> None:
        """Raise Forbidden for a request from another server's page, or with a `Host` that does not name the gateway.

        A page is of another server if its `Origin` is neither the origin that `Host` names nor listed in
        allowed_origins. `Host` is checked only if the gateway listens on a loopback address or the setting
        allowed_hosts is set. If the gateway has API keys, nothing is checked here: a page of another server does not
        know a key.
        """
        if self._has_keys:
            return
        host = headers.get("host")
        origin = headers.get("origin")
        if host and self._checks_host and not self._allows_host(host):
            raise Forbidden(
                f"Host is {host!r}, which is no loopback name and not in allowed_hosts: call this server as localhost, "
                "add the name (--allowed-hosts or OUTRIDER_GATEWAY_ALLOWED_HOSTS of the gateway), or ask for keys "
                "(--api-keys)"
            )
        if origin is not None and not self.allows_origin(origin) and not _is_own(origin, host or ""):
            raise Forbidden(
                f"Origin is {origin!r}, which is neither that of Host ({host!r}) nor in allowed_origins: add it "
                "(--allowed-origins or OUTRIDER_GATEWAY_ALLOWED_ORIGINS of the gateway), or ask for keys (--api-keys)"
            )

    def _allows_host(self, text: str) -> bool:
        host = OriginHost.parse(text)
        if self._hosts is None:
            return True
        if host is None:
            return False
        # Beyond loopback, probes and clients call by the machine's address.
        is_address_of_machine = host.is_address and not self._on_loopback
        return host.is_loopback or is_address_of_machine or host.name in self._hosts


class CallerCheck:
    """Middleware that refuses, on every path, the requests that a CallerPolicy does not allow.

    It also answers the CORS preflight requests of allowed origins itself. Pure ASGI.
    """

    def __init__(self, app: ASGIApp, policy: CallerPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._policy.check(headers)
        except Forbidden as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and self._is_allowed_preflight(headers):
            await Response(status_code=204, headers=_preflight_headers(headers))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed_preflight(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        return origin is not None and "access-control-request-method" in headers and self._policy.allows_origin(origin)


class CorsHeaders:
    """Middleware that adds CORS headers to every response to an allowed origin.

    It must be the outermost middleware, so that responses of the other middleware, such as refusals, have these
    headers, too. Pure ASGI.
    """

    def __init__(self, app: ASGIApp, policy: CallerPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._policy.has_origins:
            await self._app(scope, receive, send)
            return
        added = self._headers(Headers(scope=scope).get("origin"))

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(added)
                headers.add_vary_header("Origin")
            await send(message)

        await self._app(scope, receive, send_with_cors)

    def _headers(self, origin: str | None) -> dict[str, str]:
        if origin is None or not self._policy.allows_origin(origin):
            return {}
        allowed = origin
        if self._policy.allows_any_origin:
            allowed = ANY
        return {"access-control-allow-origin": allowed, "access-control-expose-headers": _EXPOSED}


def _is_own(origin: str, host: str) -> bool:
    parsed_origin = Origin.parse(origin)
    parsed_host = OriginHost.parse(host)
    return parsed_origin is not None and parsed_host is not None and parsed_origin.is_of(parsed_host)


def _preflight_headers(preflight: Headers) -> dict[str, str]:
    # Every method and header is allowed: keys and limits decide about the request itself.
    headers = {
        "access-control-allow-methods": preflight["access-control-request-method"],
        "access-control-max-age": str(_PREFLIGHT_MAX_AGE_S),
    }
    if "access-control-request-headers" in preflight:
        headers["access-control-allow-headers"] = preflight["access-control-request-headers"]
    if "access-control-request-private-network" in preflight:
        headers["access-control-allow-private-network"] = "true"
    return headers
