"""The one error tree. Each class owns its gRPC code, its HTTP status and whether a retry can help.

OutriderError
|- InvalidRequest        the caller's fault; names the parameter
|  |- NoThreads
|  |- ModelNotFound
|  |- ContextExceeded
|  |- RequestTooLarge
|  |- UnsupportedMediaType
|  `- RequestTooSlow
|- Unauthenticated       no API key, or an unknown one
|- Forbidden             a peer, key or web page that may not do this
|- Overloaded            refused at admission
|  `- RateLimited        an API key is over a limit of its own
|- Unavailable           a part of the system is not there
|  `- WorkerLost         a worker's stream ended
|- DeadlineExceeded
|- IncompatiblePair      workers do not fit one another; the one that came later is not used
|- WorkerFault           a worker answered with an error that the gateway could not mend
`- ConfigError           bad settings; start refused
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import grpc

ENDINGS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""Exceptions that end a task, a generator or a process on purpose, and are not answered or logged as faults. A panic of
compiled code is no subclass of Exception either, but is a fault.
"""


class OutriderError(Exception):
    """Base of every error that crosses a process boundary."""

    grpc_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    openai_type: ClassVar[str] = "server_error"
    openai_code: ClassVar[str | None] = None
    details: ClassVar[dict[str, Any] | None] = None
    """What Anthropic's client reads of an error besides, to go on by itself."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """Name of the offending request field, as the caller spelt it."""
        self.retry_after_s = retry_after_s
        """Seconds after which a retry may succeed."""


class InvalidRequest(OutriderError):
    """The request cannot be served as it is; the message says what to change."""

    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    openai_type = "invalid_request_error"


class NoThreads(InvalidRequest):
    """The request asks to go on with a conversation that a server keeps, and nothing is kept here."""

    details: ClassVar[dict[str, Any] | None] = {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


class ModelNotFound(InvalidRequest):
    grpc_code = grpc.StatusCode.NOT_FOUND
    http_status = 404
    openai_code = "model_not_found"


class ContextExceeded(InvalidRequest):
    """Prompt and output together are longer than the model's context."""

    openai_code = "context_length_exceeded"


class RequestTooLarge(InvalidRequest):
    """The body is over the size limit."""

    http_status = 413
    openai_code = "request_too_large"


class UnsupportedMediaType(InvalidRequest):
    """The body does not say that it is JSON."""

    http_status = 415
    openai_code = "unsupported_media_type"


class RequestTooSlow(InvalidRequest):
    """The body did not arrive in time."""

    grpc_code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 408
    openai_code = "request_timeout"


class Overloaded(OutriderError):
    """The queue is full; nothing was started."""

    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    retryable = True
    openai_type = "rate_limit_error"
    openai_code = "overloaded"


class RateLimited(Overloaded):
    """The requests, tokens or concurrent answers of an API key exceed its limits."""

    openai_code = "rate_limit_exceeded"


class Unauthenticated(OutriderError):
    """The caller is not known."""

    grpc_code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    openai_type = "invalid_request_error"
    openai_code = "invalid_api_key"


class Forbidden(OutriderError):
    """The caller may not do this."""

    grpc_code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    openai_type = "invalid_request_error"


class Unavailable(OutriderError):
    grpc_code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class WorkerLost(Unavailable):
    """The stream to a worker ended with this request in flight."""


class DeadlineExceeded(OutriderError):
    grpc_code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    openai_type = "timeout_error"


class IncompatiblePair(OutriderError):
    """Draft and target do not share a vocabulary, a target came back as another model, or two parts speak different
    protocols.
    """

    http_status = 503
    grpc_code = grpc.StatusCode.FAILED_PRECONDITION


class WorkerFault(OutriderError):
    """A worker reported a fault of its own."""


class ConfigError(OutriderError):
    """Settings that cannot work; the message names the setting, its value and the remedy."""

    grpc_code = grpc.StatusCode.FAILED_PRECONDITION
