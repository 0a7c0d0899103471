"""A peer in the target's place, which keeps what drafts deliver."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import torch
from torch import Tensor

from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import NodeKind, read_delivery
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from tests.wire_rows import decode_rows

Path = tuple[int, ...]
"""Ids that lead to a node from the last token before its root."""


class Grown:
    """The tree that came under one ticket and root_len, its laws checked as a target checks them."""

    def __init__(self, parts: list[tpb.Delivery], vocab_size: int = 320) -> None:
        """parts: all that came under the ticket; those of the first root_len count."""
        self.parts = [part for part in parts if part.root_len == parts[0].root_len]
        self.ranks: dict[Path, int] = {}
        self.kinds: dict[Path, NodeKind] = {}
        self.laws: dict[Path, Tensor] = {}
        """By parent, [V] float32 log-probs that its LAW children were drawn from."""
        self.forms: set[type] = set()
        """How laws came."""
        self.ended: set[Path] = set()
        for part in self.parts:
            self._add(part, vocab_size)

    def _add(self, part: tpb.Delivery, vocab_size: int) -> None:
        nodes = read_delivery(part, vocab_size)
        paths: dict[int, Path] = {ROOT: ()}
        drawn: dict[Path, int] = {}  # the first of each parent
        for index, (token_id, parent) in enumerate(zip(nodes.ids, nodes.parents, strict=True)):
            path = paths[index] = (*paths[parent], token_id)
            if nodes.kinds[index] is NodeKind.REFERENCE:
                assert path in self.kinds, "what is on the way came before"
                continue
            assert path not in self.kinds, "a node comes once"
            self.ranks[path], self.kinds[path] = nodes.ranks[index], nodes.kinds[index]
            if nodes.kinds[index] is NodeKind.SAMPLED:
                drawn.setdefault(path[:-1], token_id)
        if nodes.rows is not None:
            self.forms.add(type(nodes.rows))
            self.laws.update(zip(drawn, decode_rows(nodes.rows, vocab_size, list(drawn.values())), strict=True))
        self.ended |= {paths[index] for index in nodes.ends}

    def children(self, path: Path = (), *kinds: NodeKind) -> list[int]:
        """The ids that follow, by rank."""
        found = [each for each in self.ranks if each[:-1] == path and len(each) == len(path) + 1]
        ids = [each[-1] for each in sorted(found, key=self.ranks.__getitem__)]
        return [token_id for token_id in ids if not kinds or self.kinds[*path, token_id] in kinds]

    def chain(self, most: int = 64) -> list[int]:
        """The likeliest ids, or the first drawn ones, from the root on."""
        found = list[int]()
        while len(found) < most:
            first = [i for i in self.children((*found,)) if self.ranks[*found, i] == 0]
            if not first or self.kinds[*found, first[0]] is NodeKind.RECOVERY:
                break
            found.append(first[0])
        return found

    def drawn(self, num: int) -> Tensor:
        """[num, V] float32: what the first tokens of the chain were drawn from."""
        chain = self.chain(num)
        return torch.stack([self.laws[tuple(chain[:j])] for j in range(num)])


class Recorder(target_pb2_grpc.TargetServiceServicer):
    """A peer that takes deliveries in and keeps them; the draft dials it as it would a target."""

    def __init__(self) -> None:
        self.address = ""
        self.parts: dict[int, list[tpb.Delivery]] = {}
        self._changed = asyncio.Condition()

    async def Deliver(self, batches: AsyncIterator[tpb.DeliveryBatch], context: Any) -> AsyncIterator[tpb.FeatureBatch]:
        async for batch in batches:
            async with self._changed:
                for item in batch.items:
                    self.parts.setdefault(item.ticket, []).append(item)
                self._changed.notify_all()
        yield tpb.FeatureBatch(summary=tpb.DeliverSummary())

    async def grown(self, ticket: int, is_enough: Callable[[Grown], bool]) -> Grown:
        """What came under a ticket, once it is enough."""

        def here() -> bool:
            return ticket in self.parts and is_enough(Grown(self.parts[ticket]))

        await self.until(here)
        return Grown(self.parts[ticket])

    async def until(self, check: Callable[[], bool]) -> None:
        """Return once what came satisfies `check`."""
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(check)

    async def chain(self, ticket: int, num: int) -> list[int]:
        """The first ids of the chain that came under a ticket, once there are so many."""
        return (await self.grown(ticket, lambda grown: len(grown.chain(num)) == num)).chain(num)


async def started(recorder: Recorder, port: int = 0) -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    target_pb2_grpc.add_TargetServiceServicer_to_server(recorder, server)
    recorder.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    return server
