"""The seam between the SDK and the network: a protocol of three methods, and gRPC behind it."""

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


_open_channels: weakref.WeakSet[Any] = weakref.WeakSet()
"""Of this process; those it inherited from a fork, too."""
_was_forked_from_grpc = False
_closed_s = -math.inf
"""Monotonic time at which the last channel was closed."""
TEARDOWN_S = 0.1
"""gRPC's threads end some milliseconds after a close. Of 4,300 children forked right after it 7 hung in gRPC's start,
of 1,384 forked 0.05 s later or more none."""


def _wait_for_teardown() -> None:
    left_s = _closed_s + TEARDOWN_S - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


def _note_fork() -> None:
    global _was_forked_from_grpc
    _was_forked_from_grpc = _was_forked_from_grpc or bool(_open_channels)


os.register_at_fork(before=_wait_for_teardown, after_in_child=_note_fork)


def check_fork() -> None:
    """Raise OutriderError in a process that was forked while a client had a connection. The threads of gRPC were not
    forked with it, so that a call would never end, whichever client makes it.
    """
    if _was_forked_from_grpc:
        raise OutriderError(
            "this process was forked from one in which a client was connected, and gRPC cannot be used here; start it "
            "by spawn or forkserver, fork before the first call, or close every client before the fork"
        )


class Transport(Protocol):
    """Carries calls to a gateway. Raises the error tree only. `timeout_s` None = no deadline."""

    def generate(self, request: GenerateRequest, timeout_s: float | None) -> AsyncGenerator[GenerateResponse, None]:
        """Start the call with the first read. Closing the generator cancels it."""

    async def get_models(self, request: GetModelsRequest, timeout_s: float | None) -> GetModelsResponse: ...

    async def close(self) -> None:
        """End every call in progress. Idempotent."""


class GrpcTransport:
    """One channel to one gateway, made with the first call. It belongs to the event loop of that call.

    An address of the gateway's HTTP server does, too: the gateway says there where its gRPC is.

    Raises ConfigError for an address gRPC cannot dial, and for files and keys that cannot be used.
    """

    def __init__(self, address: str, **options: Unpack[ConnectOptions]) -> None:
        self._given = read_address(address)
        self.address = self._given.target
        self._credentials = credentials_of({**options, "tls": True} if self._given.is_tls else options)
        self._is_found = False
        """Whether it was looked for another port than the one that was given."""
        self._metadata = metadata_of(options)
        self._keepalive = keepalive_of(options)
        self._channel: Any = None  # grpc's own types are partial
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def _find(self) -> bool:
        """Look whether the address is that of an HTTP server, which says where gRPC is; once. Return whether it is.

        Raises Unavailable for a URL at which no gateway answers.
        """
        if self._is_found or self._given.is_grpcs_own:
            return False
        self._is_found = not self._given.is_http
        found = await find_grpc(self._given, self._credentials is not None)
        self._is_found = True
        if found is None:
            return False
        self.address = found
        await self._close_channel()
        return True

    async def _stub(self) -> Any:
        check_fork()
        if self._given.is_http and not self._is_found and not await self._find():
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
        """Raise what the error means. One of an HTTP port may be tried again, and goes to gRPC's then."""
        up = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE)
        connected = self._channel is not None and self._channel.get_state() in up
        is_http = False
        if error.code() is grpc.StatusCode.UNAVAILABLE and not connected:
            with contextlib.suppress(Unavailable):  # nobody is there, which the error says
                is_http = await self._find()
        if is_http:
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
        global _closed_s
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
            _open_channels.discard(channel)
            _closed_s = time.monotonic()
