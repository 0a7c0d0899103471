"""`Transport`, the protocol by which the SDK reaches a gateway, and `GrpcTransport`, its implementation over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
import weakref
from collections.abc import AsyncGenerator
from typing import Any, NoReturn, Protocol, Unpack

import grpc
import grpc.aio

from outrider.client.address import find_grpc, read_address
from outrider.client.connect import ConnectOptions, credentials_of, keepalive_of, metadata_of
from outrider.client.errors import from_rpc_error
from outrider.v1.gateway_pb2 import GenerateRequest, GenerateResponse, GetModelsRequest, GetModelsResponse
from outrider.v1.gateway_pb2_grpc import GenerationServiceStub
from outrider.wire.errors import OutriderError, Unavailable
from outrider.wire.transport.rpc import client_options

_MAX_MESSAGE_BYTES = 64 << 20
_Stub: Any = GenerationServiceStub  # generated without types

TEARDOWN_S = 0.1
"""Minimum seconds between the close of a gRPC channel and a fork of this process, so that gRPC's threads can end
before. Of 4,300 children forked right after a close, 7 hung in gRPC's start; of 1,384 forked at least 0.05 s later,
none did."""
_open_channels: weakref.WeakSet[Any] = weakref.WeakSet()
"""Channels that are open in this process, or were open in its parent when it was forked."""
_last_close_s = -math.inf
"""Monotonic time at which a channel was last closed, in seconds."""
_was_forked_from_grpc = False
"""Whether this process was forked from one that had an open channel."""


def _wait_for_teardown() -> None:
    remaining_s = _last_close_s + TEARDOWN_S - time.monotonic()
    if remaining_s > 0:
        time.sleep(remaining_s)


def _note_fork() -> None:
    global _was_forked_from_grpc
    _was_forked_from_grpc = _was_forked_from_grpc or bool(_open_channels)


os.register_at_fork(before=_wait_for_teardown, after_in_child=_note_fork)


def check_fork() -> None:
    """Raise OutriderError if this process was forked while a client had a connection.

    gRPC's threads do not exist in such a process: no call of any client there would ever end.
    """
    if _was_forked_from_grpc:
        raise OutriderError(
            "this process was forked from one in which a client was connected, and gRPC cannot be used here; start it "
            "by spawn or forkserver, fork before the first call, or close every client before the fork"
        )


class Transport(Protocol):
    """Interface by which clients call a gateway. Implement it to replace gRPC, in tests for example.

    Methods must raise OutriderErrors only. timeout_s: deadline of the call in seconds; None = no deadline.
    """

    def generate(self, request: GenerateRequest, timeout_s: float | None) -> AsyncGenerator[GenerateResponse, None]:
        """Yield a Generate call's messages. Reading the first starts the call; closing the generator cancels it."""

    async def get_models(self, request: GetModelsRequest, timeout_s: float | None) -> GetModelsResponse:
        """Return the gateway's reply to GetModels: the models that it serves now, and its HTTP port."""

    async def close(self) -> None:
        """End every call in progress. Idempotent."""


class GrpcTransport:
    """Transport over one gRPC channel to one gateway. The first call opens the channel, and only the event loop of that
    call may use it.

    address: host:port of the gateway's gRPC server, or the address of its HTTP server, which returns the gRPC port.
    Raises ConfigError for an address, file or API key that cannot be used.
    """

    def __init__(self, address: str, **options: Unpack[ConnectOptions]) -> None:
        self._given = read_address(address)
        self.address = self._given.target
        """host:port of the gateway's gRPC server, or a name that gRPC resolves."""
        if self._given.is_tls:
            options = {**options, "tls": True}
        self._credentials = credentials_of(options)
        self._was_probed = False
        """Whether the given address was probed for an HTTP server, which is done once."""
        self._metadata = metadata_of(options)
        self._keepalive = keepalive_of(options)
        self._channel: Any = None  # grpc's own types are partial
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def _find_grpc_at_http(self) -> bool:
        # Returns whether the given address is a gateway's HTTP server, and then sets `address` to that of its gRPC.
        # Raises Unavailable for a URL at which no gateway answers.
        if self._was_probed or self._given.is_grpcs_own:
            return False
        self._was_probed = not self._given.is_http  # a URL is probed again where nothing answered
        found = await find_grpc(self._given, self._credentials is not None)
        self._was_probed = True
        if found is None:
            return False
        self.address = found
        await self._close_channel()
        return True

    async def _stub(self) -> Any:
        check_fork()
        if self._given.is_http and not self._was_probed and not await self._find_grpc_at_http():
            raise Unavailable(f"{self._given.target} is no gateway's HTTP port; say --address host:port of its gRPC")
        if self._closed:
            raise OutriderError("this client is closed; make a new one")
        loop = asyncio.get_running_loop()
        if self._channel is None:
            options = client_options(self.address, _MAX_MESSAGE_BYTES, self._keepalive)
            self._loop = loop
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.address, options=options)
            else:
                self._channel = grpc.aio.secure_channel(self.address, self._credentials, options=options)
            _open_channels.add(self._channel)
        elif self._loop is not loop:
            raise OutriderError("an AsyncClient belongs to the event loop of its first call; make one per loop")
        return _Stub(self._channel)

    async def generate(
        self, request: GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[GenerateResponse, None]:
        call = (await self._stub()).Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            await self._raise(error, timeout_s)
        except asyncio.CancelledError:
            self._reraise_cancelled()
        finally:
            call.cancel()

    async def get_models(self, request: GetModelsRequest, timeout_s: float | None) -> GetModelsResponse:
        try:
            call = (await self._stub()).GetModels(request, timeout=timeout_s, metadata=self._metadata)
            response: GetModelsResponse = await call
        except grpc.aio.AioRpcError as error:
            await self._raise(error, timeout_s)
        except asyncio.CancelledError:
            self._reraise_cancelled()
        return response

    async def _raise(self, error: grpc.aio.AioRpcError, timeout_s: float | None) -> NoReturn:
        connected_states = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE)
        connected = self._channel is not None and self._channel.get_state() in connected_states
        is_http = False
        if error.code() is grpc.StatusCode.UNAVAILABLE and not connected:
            with contextlib.suppress(Unavailable):  # the error below reports it
                is_http = await self._find_grpc_at_http()
        if is_http:  # a further attempt of the caller goes to gRPC
            raise Unavailable(f"{self._given.target} is the HTTP port; gRPC is at {self.address}") from None
        raise from_rpc_error(
            error, self.address, connected=connected, timeout_s=timeout_s, tls=self._credentials is not None
        ) from None

    def _reraise_cancelled(self) -> NoReturn:
        task = asyncio.current_task()  # a closed channel cancels its calls; the caller's task was not cancelled
        if self._closed and task is not None and not task.cancelling():
            raise OutriderError("the client was closed while this call was in progress") from None
        raise asyncio.CancelledError

    async def close(self) -> None:
        self._closed = True
        await self._close_channel()

    async def _close_channel(self) -> None:
        global _last_close_s
        channel = self._channel
        self._channel = None
        if channel is not None:
            await channel.close()
            _open_channels.discard(channel)
            _last_close_s = time.monotonic()
