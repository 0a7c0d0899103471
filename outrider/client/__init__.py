"""The SDK: call a gateway over gRPC. No torch, no server. See docs/sdk.md."""

from outrider.client.aio import AsyncClient
from outrider.client.connect import ConnectOptions
from outrider.client.request import GenerateOptions, Message
from outrider.client.retry import RetryPolicy
from outrider.client.stream import RoundStream
from outrider.client.sync import Client, SyncRoundStream
from outrider.client.transport import GrpcTransport, Transport
from outrider.client.types import (
    AcceptanceRule,
    Choice,
    Completion,
    Drafter,
    DraftLogprobs,
    FinishReason,
    Model,
    Round,
    RoundTimings,
    Speculation,
    StructuredOutputs,
    Token,
    TokenKind,
    TokenLogprobs,
    Usage,
)
from outrider.wire.errors import (
    ConfigError,
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

__all__ = [
    "AcceptanceRule",
    "AsyncClient",
    "Choice",
    "Client",
    "Completion",
    "ConfigError",
    "ConnectOptions",
    "DeadlineExceeded",
    "DraftLogprobs",
    "Drafter",
    "FinishReason",
    "Forbidden",
    "GenerateOptions",
    "GrpcTransport",
    "InvalidRequest",
    "Message",
    "Model",
    "ModelNotFound",
    "OutriderError",
    "Overloaded",
    "RateLimited",
    "RequestTooLarge",
    "RetryPolicy",
    "Round",
    "RoundStream",
    "RoundTimings",
    "Speculation",
    "StructuredOutputs",
    "SyncRoundStream",
    "Token",
    "TokenKind",
    "TokenLogprobs",
    "Transport",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
