"""A peer in the target's place, which keeps what drafts deliver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc


class Recorder(target_pb2_grpc.TargetServiceServicer):
    """A peer that takes deliveries in and keeps them; the draft dials it as it would a target."""

    def __init__(self) -> None:
        self.address = ""
        self.parts: dict[int, list[tpb.Delivery]] = {}
        self._changed = asyncio.Condition()

    async def Deliver(self, batches: AsyncIterator[tpb.DeliveryBatch], context: Any) -> tpb.DeliverSummary:
        async for batch in batches:
            async with self._changed:
                for item in batch.items:
                    self.parts.setdefault(item.ticket, []).append(item)
                self._changed.notify_all()
        return tpb.DeliverSummary()

    async def complete(self, ticket: int) -> list[tpb.Delivery]:
        """The parts of a proposal once all have come."""

        def here() -> bool:
            parts = self.parts.get(ticket, [])
            return bool(parts) and sum(len(p.draft_ids) for p in parts) == parts[-1].num_draft_tokens

        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(here)
        return self.parts.pop(ticket)


async def started(recorder: Recorder, port: int = 0) -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    target_pb2_grpc.add_TargetServiceServicer_to_server(recorder, server)
    recorder.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    return server
