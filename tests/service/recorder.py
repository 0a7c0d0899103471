"""A peer in the target's place, which keeps what drafts deliver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from outrider.engine.speculation.nodes import NodeKind, from_proto
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

    async def chain(self, ticket: int, num: int) -> list[int]:
        """The first ids of what first_chain finds under a ticket, once there are so many."""

        def here() -> bool:
            return len(first_chain(self.parts.get(ticket, []), num)) == num

        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(here)
        return first_chain(self.parts[ticket], num)


def first_chain(parts: list[tpb.Delivery], most: int, vocab_size: int = 320) -> list[int]:
    """The likeliest ids of a tree, or the first drawn ones, from its root on."""
    found = list[int]()
    by_path = dict[tuple[int, ...], int]()  # the likeliest child of each path
    for part in parts:
        nodes = from_proto(part, vocab_size)
        paths: list[tuple[int, ...]] = [()]
        for token_id, parent, rank, kind in zip(nodes.ids, nodes.parents, nodes.ranks, nodes.kinds, strict=True):
            above = paths[parent + 1]
            paths.append((*above, token_id))
            if rank == 0 and kind is not NodeKind.KEY:
                by_path[above] = token_id
    while tuple(found) in by_path and len(found) < most:
        found.append(by_path[tuple(found)])
    return found


async def started(recorder: Recorder, port: int = 0) -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    target_pb2_grpc.add_TargetServiceServicer_to_server(recorder, server)
    recorder.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    return server
