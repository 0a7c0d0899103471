"""The SDK: call a gateway over gRPC from Python. See docs/sdk.md.

Users import from here alone. Start at `aio`: `AsyncClient` builds a message (`request`), sends it (`retry`,
`transport`) and reads the rounds (`stream`, `parse`); `sync.Client` runs it on a thread, `llm.LLM` starts a system of
its own. This package may import `outrider.wire` and `outrider.v1`, and no torch and no server.
"""

from outrider.client.aio import AsyncClient
from outrider.client.connect import ConnectOptions
from outrider.client.generate_options import GenerateOptions, Message
from outrider.client.retry import RetryPolicy
from outrider.client.stream import RoundStream
from outrider.client.sync import Client, SyncRoundStream
from outrider.client.transport import GrpcTransport, Transport
from outrider.client.types import (
    AcceptanceRule,
    Choice,
    Completion,
    DraftLogprobs,
    DraftToken,
    DraftTokenKind,
    Explanation,
    FinishReason,
    Model,
    RankedToken,
    Rejection,
    Round,
    RoundTimings,
    Speculation,
    StructuredOutputs,
    Token,
    TokenKind,
    TokenLogprobs,
)
from outrider.client.usage import Usage
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
from outrider.wire.requests.drafters import Drafter

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
    "DraftToken",
    "DraftTokenKind",
    "Drafter",
    "Explanation",
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
    "RankedToken",
    "RateLimited",
    "Rejection",
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
