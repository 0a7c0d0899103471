"""A relay between two parts that knows their messages: it records, drops, repeats and delays items of batches.

For tests and benchmarks. Every method passes as bytes, whatever its kind; of those that carry deliveries or a gateway's
requests each item has a fate of its own, and so have the rows of features that come back. With a `TcpRelay` behind it:
over a given round trip and bandwidth.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES, client_options, server_options

DELIVER = "/outrider.v1.TargetService/Deliver"
BATCHES: dict[str, Any] = {
    "/outrider.v1.TargetService/Control": tpb.TargetRequestBatch,
    DELIVER: tpb.DeliveryBatch,
    "/outrider.v1.DraftService/Control": dpb.DraftRequestBatch,
}
Fate = Callable[[Any], Sequence[float]]
"""Of an item, after how many seconds it passes: (0.0,) as it comes, () never, two of them twice."""
ONE_WAY = frozenset({"delivery", "extend", "advance", "features", "features asked for"})
"""Kinds of items that may be lost, come twice and in another order."""


def kind_of(item: Any) -> str:
    """Return "delivery", "features", "features asked for", or the name of a request."""
    if isinstance(item, tpb.Delivery):
        return "delivery"
    if isinstance(item, tpb.FeatureChunk):
        return "features"
    name = str(item.WhichOneof("item"))
    return f"{name} asked for" if isinstance(item, tpb.HeadRequest) else name


def as_batch(method: str, items: Sequence[Any]) -> bytes:
    """Return one message with these items."""
    if method != DELIVER:
        return bytes(BATCHES[method](items=items).SerializeToString())
    deliveries = [item for item in items if isinstance(item, tpb.Delivery)]
    asks = [item for item in items if isinstance(item, tpb.HeadRequest)]
    return tpb.DeliveryBatch(items=deliveries, head_requests=asks).SerializeToString()


def items_of(method: str, message: bytes) -> list[Any]:
    batch = BATCHES[method].FromString(message)
    return [*batch.items, *(batch.head_requests if method == DELIVER else ())]


def as_it_comes(item: Any) -> Sequence[float]:
    return (0.0,)


@dataclass
class Faults:
    """A fate of one-way items, by chance. Requests with an answer pass as they come."""

    seed: int = 0
    drop: float = 0.0
    """Probability that an item never arrives."""
    repeat: float = 0.0
    """Probability that it arrives twice, the second time late."""
    reorder: float = 0.0
    """Probability that it arrives late, after some that came later."""
    late_s: float = 0.02
    """Most that an item is late; how late is uniform."""
    kinds: frozenset[str] = ONE_WAY
    num_dropped: int = 0
    num_repeated: int = 0
    num_reordered: int = 0
    _dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)

    def __call__(self, item: Any) -> Sequence[float]:
        if kind_of(item) not in self.kinds:
            return (0.0,)
        drop, repeat, reorder, late = (self._dice.random() for _ in range(4))
        if drop < self.drop:
            self.num_dropped += 1
            return ()
        first = 0.0
        if reorder < self.reorder:
            self.num_reordered += 1
            first = late * self.late_s
        if repeat < self.repeat:
            self.num_repeated += 1
            return first, first + self.late_s
        return (first,)


class MessageRelay(grpc.GenericRpcHandler):
    """Use as `async with`. Listens on a free port, and passes on to `upstream` ("host:port")."""

    def __init__(self, upstream: str, fate: Fate = as_it_comes) -> None:
        self.batches: list[list[Any]] = []
        """Items that came, batch by batch."""
        self.address = ""
        self.num_held = 0
        """Items that did not pass as they came."""
        self._fate = fate
        self._channel = grpc.aio.insecure_channel(upstream, options=client_options(upstream, MAX_MESSAGE_BYTES))

    async def __aenter__(self) -> "MessageRelay":
        self._server = grpc.aio.server(options=server_options(MAX_MESSAGE_BYTES))
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._server.stop(0)
        await self._channel.close()  # type: ignore[call-arg]

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """A unary call is a stream of one message: all are passed on as streams."""

        async def relay(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            metadata = [(key, value) for key, value in details.invocation_metadata if key != "user-agent"]
            call = self._channel.stream_stream(details.method)(metadata=metadata)  # type: ignore[call-arg]
            feed = self._feed_items if details.method in BATCHES else self._feed
            feeding = asyncio.create_task(feed(details.method, messages, call))
            try:
                async for reply in self._features(call) if details.method == DELIVER else call:
                    yield reply
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(relay)

    async def _feed(self, method: str, messages: AsyncIterator[bytes], call: Any) -> None:
        async for message in messages:
            await call.write(message)
        await call.done_writing()

    async def _feed_items(self, method: str, messages: AsyncIterator[bytes], call: Any) -> None:
        writing = asyncio.Lock()  # one write at a time

        async def send(items: list[Any], delay_s: float = 0.0) -> None:
            await asyncio.sleep(delay_s)
            async with writing:
                await call.write(as_batch(method, items))

        async with asyncio.TaskGroup() as late:
            async for message in messages:
                items = items_of(method, message)
                self.batches.append(items)
                now, later = self._fates(items)
                if now:
                    await send(now)
                for item, delay_s in later:
                    late.create_task(send([item], delay_s))
        await call.done_writing()

    async def _features(self, call: Any) -> AsyncIterator[bytes]:
        """What a target says to a draft. Rows that are late when the stream ends do not come."""
        came: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def read() -> None:
            try:
                async for message in call:
                    batch = tpb.FeatureBatch.FromString(message)
                    now, later = self._fates(list(batch.chunks))
                    del batch.chunks[:]
                    batch.chunks.extend(now)
                    came.put_nowait(batch.SerializeToString())
                    for rows, delay_s in later:
                        one = tpb.FeatureBatch(chunks=[rows]).SerializeToString()
                        asyncio.get_running_loop().call_later(delay_s, came.put_nowait, one)
            finally:
                came.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (message := await came.get()) is not None:
                yield message
            await reading  # which raises what ended the call
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _fates(self, items: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, float]]]:
        """Return what passes now, and what passes so many seconds later."""
        fates = [tuple(self._fate(item)) for item in items]
        self.num_held += sum(fate != (0.0,) for fate in fates)
        each = [(item, delay_s) for item, fate in zip(items, fates, strict=True) for delay_s in fate]
        return [item for item, delay_s in each if not delay_s], [(item, delay_s) for item, delay_s in each if delay_s]
