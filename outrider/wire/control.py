"""The serving side of a Control stream: one owner per stream, freed when it ends, answers coalesced. Loop thread."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from outrider.wire.log import get_logger
from outrider.wire.streams import MAX_BATCH_ITEMS, Outbox, check_batch

log = get_logger(__name__)

MAX_UNREAD = 16 * MAX_BATCH_ITEMS
"""Answers that may wait for a peer to read. Of one that asks on without reading, no more is taken until it reads."""


class ControlStreams:
    """Counts owners and remembers the open streams' readers, so that a stopping server can end them."""

    def __init__(self) -> None:
        self._owners = itertools.count(1)
        self._reading: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def num_open(self) -> int:
        return len(self._reading)

    async def serve(
        self,
        requests: AsyncIterator[Any],
        context: grpc.aio.ServicerContext[Any, Any],
        make_batch: Callable[[list[Any]], Any],
        dispatch: Callable[[int, Any, Callable[[Any], None]], None],
        gone: Callable[[int], None],
    ) -> None:
        """Until the stream ends: `dispatch(owner, item, put)` each item; then `gone(owner)`.

        A cancelled, closed or broken stream all end the iteration alike, so the owner is freed in `finally`.
        """
        owner = next(self._owners)
        # Before there is a writer: an abort beside the first write would send it twice, and the call would never end.
        await context.send_initial_metadata(())

        async def write(items: list[Any]) -> None:
            await context.write(make_batch(items))

        outbox: Outbox[Any] = Outbox(write, lambda: reading.cancel())

        async def read() -> None:
            async for batch in requests:
                check_batch(len(batch.items))
                for item in batch.items:
                    dispatch(owner, item, outbox.put)
                await outbox.wait_below(MAX_UNREAD)

        reading = asyncio.create_task(read())
        self._reading.add(reading)
        try:
            await asyncio.wait({reading})
            if reading.cancelled() and self._stopping:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker is stopping; connect again")
            elif reading.cancelled():
                await context.abort(grpc.StatusCode.INTERNAL, "an answer could not be written; connect again")
            reading.result()
        except grpc.aio.AioRpcError as error:
            log.info("control stream %d ended: %s", owner, error.code().name)
        finally:
            self._reading.discard(reading)
            reading.cancel()
            gone(owner)
            await outbox.close()

    async def end_all(self) -> None:
        """End every open stream: a graceful stop would otherwise wait its whole grace for them."""
        self._stopping = True
        for reading in list(self._reading):
            reading.cancel()
