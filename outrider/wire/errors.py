"""The error tree of all processes. Each class has its gRPC code, its HTTP status and whether a retry can help.

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
|- Unavailable           a process that the request needs does not run
|  `- WorkerLost         a worker's stream ended
|- DeadlineExceeded
|- IncompatiblePair      two processes are not compatible; the one that came later is not used
|- WorkerFault           a worker returned an error from which the gateway could not recover
`- ConfigError           bad settings; start refused
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import grpc

ENDINGS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""Exceptions that end a task, a generator or a process on purpose. They are not reported as faults. All others are
reported, even those that are not subclasses of Exception, such as a panic of compiled code."""


class OutriderError(Exception):
    """Base class of all errors that one process reports to another or to a user."""

    grpc_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    """Whether the same request may succeed when it is sent again."""
    openai_type: ClassVar[str] = "server_error"
    """Field `type` of the error body in OpenAI's API."""
    openai_code: ClassVar[str | None] = None
    """Field `code` of the error body in OpenAI's API; None = null."""
    details: ClassVar[dict[str, Any] | None] = None
    """Field `details` of the error body in Anthropic's API, from which Anthropic's clients recover by themselves. None
    = the body has no such field."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """Name of the wrong request field or setting; None = the error is not about a single one."""
        self.retry_after_s = retry_after_s
        """Seconds after which a retry may succeed; None = unknown."""


class InvalidRequest(OutriderError):
    """The request cannot be served as it is; the message says what to change."""

    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    openai_type = "invalid_request_error"


class NoThreads(InvalidRequest):
    """The request asks to continue a conversation that the server should have stored. This server stores no
    conversations.
    """

    details: ClassVar[dict[str, Any] | None] = {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served."""

    grpc_code = grpc.StatusCode.NOT_FOUND
    http_status = 404
    openai_code = "model_not_found"


class ContextExceeded(InvalidRequest):
    """Prompt and output together are longer than the model's context."""

    openai_code = "context_length_exceeded"


class RequestTooLarge(InvalidRequest):
    """The request's body or message is over the size limit."""

    http_status = 413
    openai_code = "request_too_large"


class UnsupportedMediaType(InvalidRequest):
    """The content type of the request's body is not JSON."""

    http_status = 415
    openai_code = "unsupported_media_type"


class RequestTooSlow(InvalidRequest):
    """The request's body did not arrive in time."""

    grpc_code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 408
    openai_code = "request_timeout"


class Overloaded(OutriderError):
    """The request was refused at admission, because the queue is full or the wait would be too long."""

    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429
    retryable = True
    openai_type = "rate_limit_error"
    openai_code = "overloaded"


class RateLimited(Overloaded):
    """The requests, tokens or concurrent choices of an API key exceed its limits."""

    openai_code = "rate_limit_exceeded"


class Unauthenticated(OutriderError):
    """The request has no API key, or an unknown one."""

    grpc_code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    openai_type = "invalid_request_error"
    openai_code = "invalid_api_key"


class Forbidden(OutriderError):
    """The server knows the peer, API key or web page that sent the request, but does not allow it to send such a
    request.
    """

    grpc_code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    openai_type = "invalid_request_error"


class Unavailable(OutriderError):
    """A process that the request needs (such as the target) does not run, does not reply, or is stopping."""

    grpc_code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    retryable = True


class WorkerLost(Unavailable):
    """The stream between gateway and worker ended while the worker ran this request."""


class DeadlineExceeded(OutriderError):
    """The request was not finished by its deadline."""

    grpc_code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    openai_type = "timeout_error"


class IncompatiblePair(OutriderError):
    """Two processes cannot work together: draft and target do not share a vocabulary, a target restarted with another
    model, or the processes have different protocol numbers.
    """

    http_status = 503
    grpc_code = grpc.StatusCode.FAILED_PRECONDITION


class WorkerFault(OutriderError):
    """A worker reported an internal error."""


class ConfigError(OutriderError):
    """A setting cannot be used. The message names the setting, its value and the remedy."""

    grpc_code = grpc.StatusCode.FAILED_PRECONDITION
