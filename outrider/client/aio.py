"""The SDK's core: `AsyncClient`. `sync.Client` runs this one on a thread of its own."""

from __future__ import annotations

from types import TracebackType
from typing import Unpack

from outrider.client.connect import ConnectOptions
from outrider.client.parse import parse_model
from outrider.client.request import GenerateOptions, build_request
from outrider.client.retry import RetryPolicy, call_with_retries, generate_with_retries
from outrider.client.stream import RoundStream, collect
from outrider.client.transport import GrpcTransport, Transport
from outrider.client.types import Completion, Model
from outrider.v1.gateway_pb2 import GetModelsRequest
from outrider.wire.errors import ConfigError

DEFAULT_ADDRESS = "127.0.0.1:8001"
DEFAULT_TIMEOUT_S = 600.0


class AsyncClient:
    """Calls one gateway over gRPC. Use as `async with`; one per event loop, shared by any number of tasks.

    `timeout_s` is each call's deadline, retries included, unless the call gives its own; None = none.
    `retries` is a number of further attempts or a RetryPolicy. `transport` replaces gRPC (then `address` and
    `connect` are not used). `connect`: see `ConnectOptions`. Every method raises the tree of `outrider.client` errors.
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
        self._policy = RetryPolicy(retries) if isinstance(retries, int) else retries
        self._transport = GrpcTransport(address, **connect) if transport is None else transport

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
        """Return the whole answer. Give one of `prompt`, `prompt_ids` and `messages`."""
        return await collect(self.stream(prompt, **options))

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> RoundStream:
        """Return the answer round by round. The call starts with the first read; bad arguments raise here."""
        request = build_request(prompt, options)
        timeout_s = options.get("timeout_s", self._timeout_s)
        return RoundStream(generate_with_retries(self._transport, request, timeout_s, self._policy))

    async def models(self) -> tuple[Model, ...]:
        """Return the pairs served now."""
        reply = await call_with_retries(
            lambda left_s: self._transport.get_models(GetModelsRequest(), left_s), self._timeout_s, self._policy
        )
        return tuple(parse_model(model) for model in reply.models)

    async def http_port(self) -> int:
        """Return the port of the gateway's HTTP server; 0 where it does not say."""
        reply = await call_with_retries(
            lambda left_s: self._transport.get_models(GetModelsRequest(), left_s), self._timeout_s, self._policy
        )
        return int(reply.http_port)
