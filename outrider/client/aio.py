"""`AsyncClient`, the SDK's core. `sync.Client` and `llm.LLM` run one on a thread of their own."""

from __future__ import annotations

from collections.abc import Awaitable
from types import TracebackType
from typing import Unpack

from outrider.client.connect import ConnectOptions
from outrider.client.generate_options import GenerateOptions
from outrider.client.parse import parse_model
from outrider.client.request import build_request
from outrider.client.retry import RetryPolicy, call_with_retries, generate_with_retries
from outrider.client.stream import RoundStream, collect
from outrider.client.transport import GrpcTransport, Transport
from outrider.client.types import Completion, Model
from outrider.v1.gateway_pb2 import GetModelsRequest, GetModelsResponse
from outrider.wire.errors import ConfigError

DEFAULT_ADDRESS = "127.0.0.1:8001"
DEFAULT_TIMEOUT_S = 600.0
"""Default deadline of a call in seconds, retries included."""


class AsyncClient:
    """A client of one gateway over gRPC. Use it as `async with`. Each event loop needs a client of its own, which any
    number of its tasks may share.

    address: host:port, or a URL of the gateway's HTTP server. timeout_s: deadline of a call in seconds, retries
    included, unless the call has a `timeout_s`; None = no deadline. retries: maximum number of attempts after the
    first, or a RetryPolicy. transport: replaces gRPC; `address` and `connect` are then not used. connect: TLS, API key
    and pings of the connection.

    Every method raises subclasses of `OutriderError`.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retries: int | RetryPolicy = 2,
        transport: Transport | None = None,
        **connect: Unpack[ConnectOptions],
    ) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"timeout_s is {timeout_s}, must be greater than 0, or None", param="timeout_s")
        self._timeout_s = timeout_s
        if isinstance(retries, int):
            retries = RetryPolicy(retries)
        if transport is None:
            transport = GrpcTransport(address, **connect)
        self._policy = retries
        self._transport = transport

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every call in progress. Idempotent."""
        await self._transport.close()

    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """Return the completion of a request. Give one of `prompt`, `prompt_ids` and `messages`."""
        return await collect(self.stream(prompt, **options))

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> RoundStream:
        """Return a stream of the request's rounds, each as soon as it is made. Give one of `prompt`, `prompt_ids` and
        `messages`. Arguments are checked here; the call to the gateway starts when the first round is read.
        """
        request = build_request(prompt, options)
        timeout_s = options.get("timeout_s", self._timeout_s)
        return RoundStream(generate_with_retries(self._transport, request, timeout_s, self._policy))

    async def models(self) -> tuple[Model, ...]:
        """Return the models that the gateway serves now."""
        reply = await self._get_models()
        return tuple(map(parse_model, reply.models))

    async def http_port(self) -> int:
        """Return the port of the gateway's HTTP server, or 0 where the gateway does not report it."""
        reply = await self._get_models()
        return int(reply.http_port)

    async def _get_models(self) -> GetModelsResponse:
        def attempt(remaining_s: float | None) -> Awaitable[GetModelsResponse]:
            return self._transport.get_models(GetModelsRequest(), remaining_s)

        return await call_with_retries(attempt, self._timeout_s, self._policy)
