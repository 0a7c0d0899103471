"""`from_rpc_error` turns a failed gRPC call into an `OutriderError`. In the gateway `wire.transport.rpc.abort` does the
reverse.
"""

from __future__ import annotations

import math
import re
from typing import Any

import grpc
import grpc.aio

from outrider.wire.errors import (
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    OutriderError,
    Overloaded,
    RateLimited,
    RequestTooLarge,
    Unauthenticated,
    Unavailable,
)

_BY_CODE: dict[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
}
_UNTRUSTED = re.compile("CERTIFICATE_VERIFY_FAILED|Hostname Verification")
"""Matches gRPC's error text for a certificate that is not trusted."""
_CUT_OFF = re.compile("Socket closed|Connection reset|WRONG_VERSION_NUMBER")
"""Matches gRPC's error text for a connection that the other side closed."""
_OWN_DEADLINE = "Deadline Exceeded"
"""gRPC's error text for a deadline that passed on the client's clock, not on the gateway's."""


def from_rpc_error(
    error: grpc.aio.AioRpcError,
    address: str,
    *,
    connected: bool = True,
    timeout_s: float | None = None,
    tls: bool = False,
) -> OutriderError:
    """Return the `OutriderError` for a failed gRPC call, whether the gateway or gRPC itself raised the error.

    address: host:port of the gateway, for the message. connected: whether the channel has a connection now. timeout_s:
    the call's timeout in seconds; None = it had none. tls: whether the channel uses TLS.
    """
    code = error.code()
    details = error.details() or "no details"
    if code is grpc.StatusCode.UNAVAILABLE and not connected:
        return Unavailable(f"no gateway answers at {address} ({details}); {_remedy(details, tls)}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None and _OWN_DEADLINE in details:
        return DeadlineExceeded(f"{address} had not finished after {timeout_s:.3g} s; raise timeout_s")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return OutriderError(
            f"{address} does not offer outrider.v1.GenerationService ({details}); "
            "is it a gateway's gRPC port, and of this version?"
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return RequestTooLarge(f"message over the size limit: {details}")  # gRPC's own refusal: waiting cannot help
    trailers = _trailers(error)
    kind = _BY_CODE.get(code, OutriderError)
    if kind is Overloaded and trailers.get("outrider-code") == RateLimited.openai_code:
        kind = RateLimited
    return kind(details, param=trailers.get("outrider-param"), retry_after_s=_seconds(trailers.get("retry-after")))


def _remedy(details: str, tls: bool) -> str:
    if _UNTRUSTED.search(details):
        return "its certificate is not trusted: give its CA (tls_ca), and a name that the certificate is for"
    if _CUT_OFF.search(details) and tls:
        return "it hung up: does it speak without TLS, or ask for a certificate (tls_cert, tls_key)?"
    if _CUT_OFF.search(details):
        return "it hung up: does it speak TLS (tls, or tls_ca with its CA)?"
    return "start one with `outrider up`, or give its gRPC address"


def _trailers(error: grpc.aio.AioRpcError) -> dict[str, str]:
    metadata: Any = error.trailing_metadata() or ()  # grpc's own type does not say that it iterates
    return {key: value for key, value in metadata if isinstance(value, str)}


def _seconds(text: str | None) -> float | None:
    # Proxies may send dates or rubbish in `retry-after`: then our own back-off decides.
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        return None
    if not math.isfinite(seconds) or seconds < 0:
        return None
    return seconds
