"""One life of the Control stream to a worker, and the slots that requests have on it.

Slots that were opened on a `Connection` end with it. A `WorkerSlot` records on which connection a request's slot is
open. `WorkerLink` opens connections; the rounds of a choice send and receive on them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import WorkerLost
from outrider.wire.transport.rpc import max_control_bytes
from outrider.wire.transport.streams import Outbox, PendingReplies, Replies

RequestType = type[dpb.DraftRequest] | type[tpb.TargetRequest]
"""Class of the messages that the gateway sends on a Control stream: DraftRequest to draft workers, TargetRequest to
targets."""


class WorkerSlot:
    """The gateway's record of one choice's slot on one worker.

    It holds the connection on which the slot is open, and the committed length that both sides agreed on.
    """

    def __init__(self, slot_id: int, request_type: RequestType) -> None:
        self.agreed_len = 0
        """Number of committed tokens, from the begin of the prompt, that the worker's slot is known to hold."""
        self._slot_id = slot_id
        self._request_type = request_type
        self._connection: Connection | None = None
        self._target_epoch = 0
        self._needs_open = True

    def is_open_on(self, connection: Connection, target_epoch: int = 0) -> bool:
        """Return whether the slot is open on this connection, so that no OpenSlot is needed.

        target_epoch: for a draft slot, the epoch of the target to which it delivers; 0 for a target slot.
        """
        same = self._connection is connection and self._target_epoch == target_epoch
        return same and connection.is_alive and not self._needs_open

    def note_opened(self, connection: Connection, committed_len: int, target_epoch: int = 0) -> None:
        """Record that the slot was opened on `connection` with `committed_len` tokens.

        target_epoch: for a draft slot, the epoch of the target to which it delivers; 0 for a target slot.
        """
        self._connection = connection
        self._target_epoch = target_epoch
        self.agreed_len = committed_len
        self._needs_open = False

    def open_again(self) -> None:
        """Mark the slot as not open, so that the next round opens it again under the same id.

        Call it if the slot on the worker may be closed or hold other tokens than the gateway assumes.
        """
        self._needs_open = True

    def truncate(self, committed_len: int, reason: pb.TruncateReason) -> bool:
        """Send a message that cuts the slot to its first `committed_len` tokens. Return False if it is not open."""
        message = pb.Truncate(slot=self._slot_id, committed_len=committed_len, reason=reason)
        return self._send(self._request_type(truncate=message))

    def close(self) -> None:
        """Send a message that closes the slot, which cancels a round in flight. Do nothing if it is not open."""
        self._send(self._request_type(close=pb.CloseSlot(slot=self._slot_id)))
        self._connection = None

    def _send(self, request: Any) -> bool:
        if self._connection is None or not self._connection.is_alive:
            return False
        self._connection.send(request)
        return True


class Connection:
    """One Control stream to a worker until it ends: sends messages in batches and matches each reply to its message.

    `call`, `subscribe` and `send` never block.
    """

    def __init__(
        self,
        info: pb.WorkerInfo,
        stream: Any,
        make_batch: Callable[[list[Any]], Any],
        count_bytes: Callable[[int], None],
    ) -> None:
        self.last_reply_s = time.monotonic()
        """Monotonic time of the last batch of replies, in seconds; before the first, the time when the stream was
        opened."""
        self.info = info
        self.epoch: int = info.epoch
        self.is_alive = True
        self.is_hung = False
        """Whether the stream was dropped because the worker made no step although it had work."""
        self._owes_step = False
        self._stream = stream
        self._pending: PendingReplies[Any] = PendingReplies()

        async def write(items: list[Any]) -> None:
            batch = make_batch(items)
            count_bytes(batch.ByteSize())
            await stream.write(batch)

        max_batch_bytes = max_control_bytes(info.context_limit) - (1 << 16)  # the rest is for the items' headers
        self._outbox: Outbox[Any] = Outbox(write, stream.cancel, max_batch_bytes, lambda item: item.ByteSize())
        self._count_bytes = count_bytes

    def call(self, request: Any) -> asyncio.Future[Any]:
        """Send a message that has one reply, and return a future of the reply.

        The future fails with WorkerLost if the stream ends first.
        """
        message_id, future = self._pending.new()
        if not self.is_alive:
            future.set_exception(WorkerLost("lost the worker: the stream has ended"))
            future.exception()
            return future
        request.id = message_id
        request.epoch = self.epoch
        self._outbox.put(request)
        return future

    def subscribe(self, request: Any, *, is_expecting: bool = True) -> Replies[Any]:
        """Send a message that has many replies, and return them. They fail with WorkerLost if the stream ends.

        is_expecting: whether the worker counts as having work for as long as the replies are open.
        """
        message_id, replies = self._pending.subscribe(is_expecting)
        if not self.is_alive:
            replies.close()
            replies.fail(WorkerLost("lost the worker: the stream has ended"))
            return replies
        request.id = message_id
        request.epoch = self.epoch
        self._outbox.put(request)
        return replies

    def send(self, request: Any, *, owes_step: bool = False) -> None:
        """Send a message that has no reply, with the next batch.

        owes_step: whether the worker must make a step because of the message.
        """
        self._owes_step |= owes_step
        request.epoch = self.epoch
        self._outbox.put(request)

    def drop(self) -> None:
        """Cancel this stream. The worker's `WorkerLink` then opens another stream."""
        self._stream.cancel()

    async def run(self) -> None:
        """Read replies and match them to their messages until the stream ends."""

        async def batches() -> AsyncIterator[list[Any]]:
            async for batch in self._stream:
                self.last_reply_s = time.monotonic()
                self._owes_step = False
                self._count_bytes(batch.ByteSize())
                yield list(batch.items)

        try:
            await self._pending.read(batches())
        finally:
            self.is_alive = False
            self._stream.cancel()
            await self._outbox.close()

    @property
    def has_work(self) -> bool:
        """Whether the worker still has to send a reply or make a step for this gateway."""
        return self._owes_step or len(self._pending) > 0

    def note_step(self) -> None:
        """Record that the worker has made the step that a message sent with `owes_step` called for."""
        self._owes_step = False
