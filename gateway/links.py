"""The gateway's end of a worker: connects, learns the epoch, keeps one Control stream, reconnects for ever.

Who is alive is what these streams say; nothing else is asked. A Connection is one life of the stream: slots opened on
it are gone when it is gone, whatever the worker's epoch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import IncompatiblePair, Unavailable, WorkerLost
from outrider.wire.log import get_logger
from outrider.wire.rpc import client_options
from outrider.wire.streams import Outbox, PendingReplies

log = get_logger(__name__)

RECONNECT_S = 0.2
CALL_TIMEOUT_S = 10.0
_TYPES: dict[str, tuple[Any, Any]] = {
    "draft": (draft_pb2_grpc.DraftServiceStub, dpb.DraftRequestBatch),
    "target": (target_pb2_grpc.TargetServiceStub, tpb.TargetRequestBatch),
}


class Connection:
    """One life of a Control stream. `call` and `send` never block; replies come as futures."""

    def __init__(
        self,
        info: pb.WorkerInfo,
        stream: Any,
        make_batch: Callable[[list[Any]], Any],
        count_bytes: Callable[[int], None],
    ) -> None:
        self._last_heard_s = time.monotonic()
        self.info = info
        self.epoch: int = info.epoch
        self.alive = True
        self._stream = stream
        self._pending: PendingReplies[Any] = PendingReplies()

        async def write(items: list[Any]) -> None:
            batch = make_batch(items)
            count_bytes(batch.ByteSize())
            await stream.write(batch)

        self._outbox: Outbox[Any] = Outbox(write, stream.cancel)
        self._count_bytes = count_bytes

    def call(self, request: Any) -> asyncio.Future[Any]:
        """Send an item that is answered. The future fails with WorkerLost when the stream ends first."""
        message_id, future = self._pending.new()
        if not self.alive:
            future.set_exception(WorkerLost("lost the worker: the stream has ended"))
            future.exception()
            return future
        request.id, request.epoch = message_id, self.epoch
        self._outbox.put(request)
        return future

    def send(self, request: Any) -> None:
        """Send a one-way item, coalesced with whatever leaves next."""
        request.epoch = self.epoch
        self._outbox.put(request)

    def drop(self) -> None:
        """Give this life of the stream up; the link makes another."""
        self._stream.cancel()

    async def run(self) -> None:
        """Reads replies until the stream ends."""

        async def batches() -> AsyncIterator[list[Any]]:
            async for batch in self._stream:
                self._last_heard_s = time.monotonic()
                self._count_bytes(batch.ByteSize())
                yield list(batch.items)

        try:
            await self._pending.read(batches())
        finally:
            self.alive = False
            self._stream.cancel()
            await self._outbox.close()

    async def drop_when_hung(self, silence_s: float, num_steps: Callable[[], Awaitable[int]]) -> None:
        """Drops the stream of a worker that has work, answers nothing and makes no step for `silence_s`.

        A long prompt keeps a worker silent while its steps go on; an engine that hangs leaves its server answering.
        """
        seen_s, seen_steps = time.monotonic(), -1
        while self.alive:
            await asyncio.sleep(silence_s / 4)
            now = time.monotonic()
            if not len(self._pending) or now - self._last_heard_s < silence_s / 2:
                seen_s = now
                continue
            try:
                steps = await num_steps()
            except grpc.aio.AioRpcError:
                steps = seen_steps
            if steps != seen_steps:
                seen_s, seen_steps = now, steps
            elif now - seen_s >= silence_s:
                log.error("the worker made no step for %g s with work to do: dropping its stream", silence_s)
                self.drop()
                return


class WorkerLink:
    """Keeps a Connection to one worker. `connection` is None while there is none."""

    def __init__(
        self,
        name: str,
        address: str,
        *,
        max_message_bytes: int,
        silence_s: float,
        accept: Callable[[pb.WorkerInfo], None],
        count_bytes: Callable[[int], None],
        on_change: Callable[[bool], None],
    ) -> None:
        """`accept` raises IncompatiblePair for a worker that must not be used."""
        self.name = name
        self.address = address
        self._connection: Connection | None = None
        self.refused: str | None = None
        """Why the worker at this address is not used, when it answers but does not fit."""
        self._silence_s = silence_s
        self._accept = accept
        self._count_bytes = count_bytes
        self._on_change = on_change
        self._changed = asyncio.Condition()
        self._channel = grpc.aio.insecure_channel(address, options=client_options(max_message_bytes))
        stub_type, self._batch_type = _TYPES[name]
        self._stub = stub_type(self._channel)
        self._task = asyncio.create_task(self._keep_connected())

    @property
    def connection(self) -> Connection | None:
        """None from the moment the stream ends: a round must not go to a worker that is known to be gone."""
        return self._connection if self._connection is not None and self._connection.alive else None

    async def get_info(self) -> pb.WorkerInfo:
        info: pb.WorkerInfo = await self._stub.GetInfo(pb.GetInfoRequest(), timeout=CALL_TIMEOUT_S)
        return info

    async def get_tokenizer(self) -> pb.TokenizerFiles:
        files: pb.TokenizerFiles = await self._stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=CALL_TIMEOUT_S)
        return files

    async def wait_connected(self, timeout_s: float) -> Connection:
        """Raises IncompatiblePair when the worker does not fit, Unavailable when it does not come in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.connection is not None or self.refused is not None)
        except TimeoutError:
            raise Unavailable(
                f"no {self.name} at {self.address} within {timeout_s:g} s: is it running there?", retry_after_s=1.0
            ) from None
        connection = self.connection
        if connection is None:
            raise IncompatiblePair(self.refused or f"the {self.name} was refused")
        return connection

    async def _keep_connected(self) -> None:
        while True:
            try:
                await self._connect_once()
            except grpc.aio.AioRpcError as error:
                log.debug("%s at %s: %s", self.name, self.address, error.code().name)
            except IncompatiblePair as error:
                log.error("the %s at %s is not used: %s", self.name, self.address, error.message)
                await self._set(None, error.message)
            except Exception:  # whatever it was, the worker may come back
                log.exception("the connection to the %s at %s failed", self.name, self.address)
            await asyncio.sleep(RECONNECT_S)

    async def _connect_once(self) -> None:
        """Until the stream ends."""
        info = await self.get_info()
        self._accept(info)
        connection = Connection(
            info, self._stub.Control(), lambda items: self._batch_type(items=items), self._count_bytes
        )
        log.info("connected to the %s %s at %s", self.name, info.model_id, self.address)
        reading = asyncio.create_task(connection.run())
        watching = asyncio.create_task(connection.drop_when_hung(self._silence_s, self._num_steps))
        try:
            await self._set(connection, None)
            await reading
        finally:
            connection.alive = False
            for task in (reading, watching):
                task.cancel()
            await asyncio.gather(reading, watching, return_exceptions=True)
            log.info("disconnected from the %s at %s", self.name, self.address)
            await self._set(None, None)

    async def _num_steps(self) -> int:
        return int((await self.get_info()).num_steps)

    async def _set(self, connection: Connection | None, refused: str | None) -> None:
        async with self._changed:
            self._connection, self.refused = connection, refused
            self._on_change(connection is not None)
            self._changed.notify_all()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close(None)
