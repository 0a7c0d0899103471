"""The two halves of a long-lived stream: one writer that coalesces, and a reader that matches replies by id.

Sending everything queued as one message takes a round of 64 requests from 16.7 to 7.9 ms. A worker serves its Control
streams with the same writer: one owner per stream, freed when it ends. All on the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

from outrider.wire.errors import InvalidRequest, Unavailable, WorkerLost
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES, describe_failure

log = get_logger(__name__)

MAX_BATCH_ITEMS = 1024
"""Items of a message; who sends more is refused. Twice as many hold up the messages behind them twice as long."""

Item = TypeVar("Item")


def check_batch(num_items: int) -> None:
    """Raise InvalidRequest for a received message of too many items."""
    if num_items > MAX_BATCH_ITEMS:
        raise InvalidRequest(f"a message of {num_items} items, at most {MAX_BATCH_ITEMS} are allowed", param="items")


class Outbox(Generic[Item]):
    """The only writer of one stream direction. `put` never blocks; a batch is all that queued during the last write."""

    def __init__(
        self,
        write: Callable[[list[Item]], Awaitable[None]],
        end_stream: Callable[[], object],
        max_batch_bytes: int | None = None,
        size_of: Callable[[Item], int] = lambda item: 0,
    ) -> None:
        """Begin to write.

        end_stream: called when `write` fails while the stream is up (a message that cannot be serialised, say): with
        nobody to write, those who wait for answers hear of it from the stream's reader.

        max_batch_bytes: no more in one batch, by `size_of`; an item that is larger goes alone.
        """
        self._write = write
        self._end_stream = end_stream
        self._max_batch_bytes = max_batch_bytes
        self._size_of = size_of
        self._queue: list[Item] = []
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._closed = False
        self._task = asyncio.create_task(self._run())

    def put(self, item: Item) -> None:
        """Queue an item. It is dropped when the outbox is closed: the stream's reader reports the loss."""
        if not self._closed:
            self._queue.append(item)
            self._wake.set()

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    batch = self._queue[: self._num_that_fit()]
                    await self._write(batch)
                    del self._queue[: len(batch)]
                    self._written.set()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.BaseError):
            pass  # writing to a stream that has ended, whose peer or own server ends; the reader says why
        except Exception:
            log.exception("writing to a stream failed; the stream ends")
            self._end_stream()
        finally:  # also when grpc cancels the writer of a call that it has cancelled
            self._closed = True
            self._queue.clear()
            self._written.set()

    async def wait_below(self, num_items: int) -> None:
        """Wait until no more than this many are to be written, or the stream has ended."""
        while len(self._queue) > num_items:
            self._written.clear()
            await self._written.wait()

    def _num_that_fit(self) -> int:
        """Return how many of the queue's first items go into one message: at least 1."""
        if self._max_batch_bytes is None:
            return MAX_BATCH_ITEMS
        num_bytes = 0
        for count, item in enumerate(self._queue[:MAX_BATCH_ITEMS]):
            num_bytes += self._size_of(item)
            if count and num_bytes > self._max_batch_bytes:
                return count
        return MAX_BATCH_ITEMS

    async def close(self) -> None:
        self._closed = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class _Identified(Protocol):
    @property
    def id(self) -> int: ...


Reply = TypeVar("Reply", bound=_Identified)


class Replies(Generic[Reply]):
    """All replies under one message's id, in order, until it is closed or the stream ends. One reader."""

    def __init__(self, expects: bool, forget: Callable[[], object]) -> None:
        self.expects = expects
        """The peer owes one as long as this is open."""
        self._forget = forget
        self._arrived: deque[Reply] = deque()
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    async def next(self) -> Reply:
        """Return the next reply. Raises WorkerLost when the stream has ended and none is left."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        return self._arrived.popleft()

    def take(self) -> list[Reply]:
        """Return the replies that are here and were not read yet."""
        taken = list(self._arrived)
        self._arrived.clear()
        return taken

    def close(self) -> None:
        """Take no more. Idempotent."""
        self._forget()

    def put(self, reply: Reply) -> None:
        """Add one that has arrived."""
        self._arrived.append(reply)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Let the reader have what has arrived, and then this."""
        self._error = error
        self._changed.set()


class PendingReplies(Generic[Reply]):
    """Futures and subscriptions by message id. A reply nobody waits for (cancelled, repeated, unknown) is dropped."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[Reply]] = {}
        self._subscriptions: dict[int, Replies[Reply]] = {}
        self._next_id = 1

    def new(self) -> tuple[int, asyncio.Future[Reply]]:
        """Return the id of a message that has one answer, and that."""
        message_id, self._next_id = self._next_id, self._next_id + 1
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._futures[message_id] = future
        future.add_done_callback(lambda _: self._futures.pop(message_id, None))
        return message_id, future

    def subscribe(self, expects: bool) -> tuple[int, Replies[Reply]]:
        """Return the id of a message that has any number of answers, and those."""
        message_id, self._next_id = self._next_id, self._next_id + 1
        replies: Replies[Reply] = Replies(expects, lambda: self._subscriptions.pop(message_id, None))
        self._subscriptions[message_id] = replies
        return message_id, replies

    def __len__(self) -> int:
        """Count the messages that the peer owes a reply."""
        return len(self._futures) + sum(replies.expects for replies in self._subscriptions.values())

    async def read(self, batches: AsyncIterable[list[Reply]]) -> None:
        """Hand replies out until the stream ends; then all who wait fail with WorkerLost."""
        reason = "the stream ended"
        try:
            async for batch in batches:
                for reply in batch:
                    replies = self._subscriptions.get(reply.id)
                    future = self._futures.get(reply.id)
                    if replies is not None:
                        replies.put(reply)
                    elif future is not None and not future.done():
                        future.set_result(reply)
        except grpc.aio.AioRpcError as error:
            reason = describe_failure(error)
        finally:
            self.fail(WorkerLost(f"lost the worker: {reason}"))

    def fail(self, error: Exception) -> None:
        for replies in self._subscriptions.values():
            replies.fail(error)
        for future in list(self._futures.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting any more; that is no fault


MAX_UNREAD = 16 * MAX_BATCH_ITEMS
"""Answers that may wait for a peer to read. Of one that asks on without reading, no more is taken until it reads."""


class ControlStreams:
    """Counts owners and remembers the open streams' readers, so that a stopping server can end them."""

    def __init__(self) -> None:
        self._owners = itertools.count(1)
        self._reading: set[asyncio.Task[None]] = set()
        self._others: set[asyncio.Task[Any]] = set()
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
        """Call `dispatch(owner, item, put)` for each item until the stream ends, then `gone(owner)`.

        A cancelled, closed or broken stream all end the iteration alike, so the owner is freed in `finally`.
        """
        owner = next(self._owners)
        # Before there is a writer: an abort beside the first write would send it twice, and the call would never end.
        await context.send_initial_metadata(())

        async def write(items: list[Any]) -> None:
            await context.write(make_batch(items))

        max_batch_bytes = MAX_MESSAGE_BYTES - (1 << 16)  # the rest is for the items' headers
        outbox: Outbox[Any] = Outbox(write, lambda: reading.cancel(), max_batch_bytes, lambda item: item.ByteSize())

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

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Let `end_all` end the stream whose task this is, too. Raises Unavailable then."""
        task = asyncio.current_task()
        assert task is not None
        self._others.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            raise Unavailable("this worker is stopping; connect again") from None
        finally:
            self._others.discard(task)

    async def end_all(self) -> None:
        """End every open stream: a graceful stop would otherwise wait its whole grace for them."""
        self._stopping = True
        for reading in (*self._reading, *self._others):
            reading.cancel()
