"""A relay between a gateway and a worker: it records every batch of the Control stream, and can hold items back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import grpc.aio

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from outrider.v1 import target_pb2 as tpb
from outrider.wire.transport.rpc import client_options, server_options
from outrider.wire.transport.streams import Outbox

MAX_BYTES = 64 << 20


class Relay:
    """Use as `async with`. `hold(item)`: seconds to keep a request back, None = for ever, 0 = not at all."""

    def __init__(
        self, worker: Literal["draft", "target"], address: str, hold: Callable[[Any], float | None] = lambda item: 0.0
    ) -> None:
        self.batches: list[list[Any]] = []
        """Requests of the gateway, batch by batch, as they came."""
        self.address = ""
        self.num_held = 0
        self._worker = worker
        self._hold = hold
        self._channel = grpc.aio.insecure_channel(address, options=client_options(MAX_BYTES))
        target = worker == "target"
        self._stub: Any = (target_pb2_grpc.TargetServiceStub if target else draft_pb2_grpc.DraftServiceStub)(
            self._channel
        )
        self._batch_type: Any = tpb.TargetRequestBatch if target else dpb.DraftRequestBatch

    async def __aenter__(self) -> Relay:
        self._server = grpc.aio.server(options=server_options(MAX_BYTES))
        add: Any = target_pb2_grpc.add_TargetServiceServicer_to_server
        if self._worker == "draft":
            add = draft_pb2_grpc.add_DraftServiceServicer_to_server
        add(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._server.stop(0)
        await self._channel.close()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.WorkerInfo:
        return await self._stub.GetInfo(request)

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.TokenizerFiles:
        return await self._stub.GetTokenizer(request)

    async def Deliver(self, batches: AsyncIterator[Any], context: Any) -> Any:
        """Proposals pass as they come: the draft is told to deliver here only when the test says so."""
        return await self._stub.Deliver(batches)

    async def Control(self, batches: AsyncIterator[Any], context: Any) -> None:
        call = self._stub.Control()

        async def write(items: list[Any]) -> None:
            await call.write(self._batch_type(items=items))

        outbox: Outbox[Any] = Outbox(write, call.cancel)
        back = asyncio.create_task(self._back(call, context))
        try:
            async for batch in batches:
                self.batches.append(list(batch.items))
                for item in batch.items:
                    self._pass_on(item, outbox)
        finally:
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)
            await outbox.close()
            call.cancel()

    def _pass_on(self, item: Any, outbox: Outbox[Any]) -> None:
        delay_s = self._hold(item)
        if delay_s == 0.0:
            outbox.put(item)
            return
        self.num_held += 1
        if delay_s is not None:
            asyncio.get_running_loop().call_later(delay_s, outbox.put, item)

    async def _back(self, call: Any, context: Any) -> None:
        async for replies in call:
            await context.write(replies)
