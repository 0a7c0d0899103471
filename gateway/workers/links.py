"""The gateway's end of a worker.

A `WorkerLink` keeps one worker connected for ever, and asks it once or twice a second how it is: its load, whether it
drains, whether it makes steps. Each life of its Control stream is a `Connection`, and what was opened on one is gone
with it: a `WorkerSlot` knows on which connection a request's slot is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import IncompatiblePair, OutriderError, WorkerFault, WorkerLost
from outrider.wire.models.model_id import short_name
from outrider.wire.peer_text import MAX_REASON_BYTES, Reasons, bound_strings, bound_text, describe_excess
from outrider.wire.protocol import other_protocol
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.hang_watch import HangWatch
from outrider.wire.transport.roles import Role
from outrider.wire.transport.rpc import describe_failure, max_control_bytes, proxy_note
from outrider.wire.transport.streams import Outbox, PendingReplies, Replies
from outrider.wire.transport.tls import CertificateFolder, Dialer

log = get_logger(__name__)

RequestType = type[dpb.DraftRequest] | type[tpb.TargetRequest]

RECONNECT_S = 0.2
"""Seconds between two attempts to connect."""
MAX_PAUSE_S = 30.0
"""Longest pause before the next attempt, in seconds. The pause doubles each time a worker is refused or its stream ends
at once, and is short again after a stream that lived longer than this."""
MAX_PATH_BYTES = 4096
"""Bytes of a path, as Linux has them at most."""
CALL_TIMEOUT_S = 10.0
"""Seconds for what is asked once of each life of a worker. Doubled, one that hangs then is tried half as often."""
PAIR_TIMEOUT_S = 120.0
"""Seconds for a draft to register at a target, 1 GiB at most, and to test itself there. Doubled, one that hangs is
tried half as often."""
POLL_S = 0.5
"""Seconds between two questions how a worker is that has work of ours."""
IDLE_POLL_S = 1.0
"""Seconds between two questions to one that has none: half of the `NOTICE_S` of workers that drain."""
POLL_TIMEOUT_S = 1.0
"""Seconds for the answer. Doubled, one that does not come delays the next question so much longer."""
RTT_GAIN = 1 / 8
"""Share of the newest round trip in the smoothed time, TCP's (RFC 6298). Doubled, it follows twice as fast, and jitter
moves it twice as much."""
_TYPES: dict[str, tuple[Any, Any]] = {
    "draft": (draft_pb2_grpc.DraftServiceStub, dpb.DraftRequestBatch),
    "target": (target_pb2_grpc.TargetServiceStub, tpb.TargetRequestBatch),
}


def check_protocol(role: str, info: pb.WorkerInfo) -> None:
    """Raise IncompatiblePair for a worker that speaks another protocol than this gateway."""
    peer = f"the {role} {info.model_id} (version {info.version or 'unknown'})"
    refusal = other_protocol(peer, info.protocol, "this gateway")
    if refusal is not None:
        raise IncompatiblePair(refusal)


def _life(info: pb.WorkerInfo) -> tuple[object, ...]:
    """Return what does not change as long as a worker lives."""
    return info.epoch, info.model_id, info.vocab_size, info.tokenizer_fingerprint


class WorkerSlot:
    """Knows a request's slot on one worker: where it is open, and the committed length that both sides agree on."""

    def __init__(self, slot_id: int, request_type: RequestType) -> None:
        self.agreed_len = 0
        """Tokens that both sides agreed on last."""
        self._slot_id = slot_id
        self._request_type = request_type
        self._connection: Connection | None = None
        self._target_epoch = 0
        self._needs_open = True

    def is_open_on(self, connection: Connection, target_epoch: int = 0) -> bool:
        """`target_epoch`: for a draft's slot, the target that it delivers to."""
        same = self._connection is connection and self._target_epoch == target_epoch
        return same and connection.alive and not self._needs_open

    def opened(self, connection: Connection, committed_len: int, target_epoch: int = 0) -> None:
        self._connection, self._target_epoch = connection, target_epoch
        self.agreed_len, self._needs_open = committed_len, False

    def open_again(self) -> None:
        """Let the next message open the slot anew, under the same id: the worker's is not what we thought."""
        self._needs_open = True

    def truncate(self, committed_len: int, reason: pb.TruncateReason) -> bool:
        """Send, with what leaves next, that the slot is cut. Return False when there is no slot to truncate."""
        message = pb.Truncate(slot=self._slot_id, committed_len=committed_len, reason=reason)
        return self._send(self._request_type(truncate=message))

    def close(self) -> None:
        """Send that the slot is not needed, which cancels a round in flight."""
        self._send(self._request_type(close=pb.CloseSlot(slot=self._slot_id)))
        self._connection = None

    def _send(self, request: Any) -> bool:
        if self._connection is None or not self._connection.alive:
            return False
        self._connection.send(request)
        return True


class Connection:
    """One life of a Control stream. `call`, `subscribe` and `send` never block."""

    def __init__(
        self,
        info: pb.WorkerInfo,
        stream: Any,
        make_batch: Callable[[list[Any]], Any],
        count_bytes: Callable[[int], None],
    ) -> None:
        self.heard_s = time.monotonic()
        """When the last answer came."""
        self.info = info
        self.epoch: int = info.epoch
        self.alive = True
        self.hung = False
        """It was given up because the worker made no step."""
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
        """Send an item that is answered. The future fails with WorkerLost when the stream ends first."""
        message_id, future = self._pending.new()
        if not self.alive:
            future.set_exception(WorkerLost("lost the worker: the stream has ended"))
            future.exception()
            return future
        request.id, request.epoch = message_id, self.epoch
        self._outbox.put(request)
        return future

    def subscribe(self, request: Any, *, expects: bool = True) -> Replies[Any]:
        """Send an item whose answers go on until they are closed. They fail with WorkerLost when the stream ends.

        expects: the worker owes one as long as they are open.
        """
        message_id, replies = self._pending.subscribe(expects)
        if not self.alive:
            replies.close()
            replies.fail(WorkerLost("lost the worker: the stream has ended"))
            return replies
        request.id, request.epoch = message_id, self.epoch
        self._outbox.put(request)
        return replies

    def send(self, request: Any, *, owes_step: bool = False) -> None:
        """Send a one-way item, coalesced with whatever leaves next. owes_step: the worker has to make a step for it."""
        self._owes_step |= owes_step
        request.epoch = self.epoch
        self._outbox.put(request)

    def drop(self) -> None:
        """Give this life of the stream up; the link makes another."""
        self._stream.cancel()

    async def run(self) -> None:
        """Read replies until the stream ends."""

        async def batches() -> AsyncIterator[list[Any]]:
            async for batch in self._stream:
                self.heard_s = time.monotonic()
                self._owes_step = False
                self._count_bytes(batch.ByteSize())
                yield list(batch.items)

        try:
            await self._pending.read(batches())
        finally:
            self.alive = False
            self._stream.cancel()
            await self._outbox.close()

    @property
    def has_work(self) -> bool:
        """Whether the worker owes a reply or a step."""
        return self._owes_step or len(self._pending) > 0

    def stepped(self) -> None:
        """Note that the worker has made a step."""
        self._owes_step = False


class WorkerLink:
    """Keeps a Connection to one worker. `connection` is None while there is none."""

    def __init__(
        self,
        name: str,
        address: str,
        *,
        max_message_bytes: int,
        silence_s: tuple[float, float],
        accept: Callable[[pb.WorkerInfo, WorkerLink], Awaitable[None]],
        count_bytes: Callable[[int], None],
        on_change: Callable[[Connection | None, Connection | None], None],
        on_info: Callable[[pb.WorkerInfo], None],
        certificates: CertificateFolder | None = None,
    ) -> None:
        """`silence_s`: the least and the most that a worker with work may be silent, see `HangWatch`.
        `accept` raises an OutriderError for a worker that must not be used, or waits until it can tell.
        `on_change(before, after)`: a connection came or went, or the worker began to drain.
        `on_info`: it said how it is.
        """
        self.name = name
        self.address = address
        self.info: pb.WorkerInfo | None = None
        """What the worker said of itself last."""
        self.model_path = ""
        """What it was told to load, of which `model_id` is the name. For comparing and for the log."""
        self.rtt_s = 0.0
        """Round-trip time of a call, smoothed."""
        self.refused: OutriderError | None = None
        """Why the worker at this address is not used, when it answers but does not fit."""
        self._connection: Connection | None = None
        self._hang: HangWatch | None = None
        self._answered_s = 0.0
        """When it last said how it is."""
        self._refused_epoch = 0
        self._silence_s = silence_s
        self._accept = accept
        self._count_bytes = count_bytes
        self._on_change = on_change
        self._on_info = on_info
        self._failures = Reasons()
        """Why the worker is away or refused."""
        self._pause_s = RECONNECT_S
        self._again = asyncio.Event()
        """Set when a worker that was refused is to be tried at once."""
        self._dialer = Dialer(address, Role(name), max_message_bytes, certificates)
        self._stub_type, self._batch_type = _TYPES[name]
        self._stub = self._stub_type(self._dialer.channel())
        self._task = asyncio.create_task(self._keep_connected())

    @property
    def connection(self) -> Connection | None:
        """Return None from the moment the stream ends: a round must not go to a worker that is known to be gone."""
        return self._connection if self._connection is not None and self._connection.alive else None

    @property
    def heard_s(self) -> float:
        """Return the time.monotonic at which it last answered anything, 0.0 while it is not connected."""
        connection = self.connection
        return 0.0 if connection is None else max(connection.heard_s, self._answered_s)

    @property
    def silent_s(self) -> float:
        """Return for how long it has made no step and answered nothing, with work to do."""
        connection, watch = self.connection, self._hang
        if connection is None or watch is None or not connection.has_work:
            return 0.0
        return watch.silent_s(connection.heard_s, time.monotonic())

    async def get_info(self, timeout_s: float = CALL_TIMEOUT_S) -> pb.WorkerInfo:
        """Return what the worker says of itself, its texts bounded, the model by its short name.

        Raises grpc.aio.AioRpcError, and IncompatiblePair when there is too much of it.
        """
        info: pb.WorkerInfo = await self._stub.GetInfo(pb.GetInfoRequest(), timeout=timeout_s)
        too_long = describe_excess(info)
        if too_long is not None:
            raise IncompatiblePair(f"the {self.name} {too_long}")
        self.model_path = bound_text(info.model_id, MAX_PATH_BYTES)
        info.model_id = short_name(info.model_id)
        bound_strings(info)
        return info

    async def get_tokenizer(self) -> pb.TokenizerFiles:
        files: pb.TokenizerFiles = await self._stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=CALL_TIMEOUT_S)
        return files

    async def pair(self, target_address: str, target_epoch: int) -> str | None:
        """Return why this draft may not serve a target, None when it may. It registers there and tests itself.

        Raises grpc.aio.AioRpcError while that cannot be told.
        """
        request = dpb.PairRequest(deliver_to=target_address, target_epoch=target_epoch)
        reply: dpb.PairReply = await self._stub.Pair(request, timeout=PAIR_TIMEOUT_S)
        return None if reply.ok else bound_text(reply.why, MAX_REASON_BYTES)

    async def _keep_connected(self) -> None:
        """Try for ever. One that is away is tried again soon; one that was refused, or leaves at once, later and
        later, whatever it says that it is.
        """
        while True:
            began_s = time.monotonic()
            is_away = False
            try:
                await self._connect_once()
            except grpc.aio.AioRpcError as error:
                is_away = True
                why = describe_failure(error)
                if self._failures.note(why):
                    log.warning(
                        "no answer from the %s at %s: %s", self.name, self.address, why + proxy_note(self.address)
                    )
            except OutriderError as error:
                if self._failures.note(error.message):
                    log.warning(
                        "the %s at %s is not used: %s (it loaded %s)",
                        self.name,
                        self.address,
                        error.message,
                        self.model_path,
                    )
                self._set(None, error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # else it is grpc's: the call was cancelled, or its channel closed for new certificates
            except Exception as error:  # whatever it was, the worker may come back
                if self._failures.note(type(error).__name__):
                    log.exception("the connection to the %s at %s failed", self.name, self.address)
                self._refused_epoch = 0  # so that it is judged anew
                kind = type(error).__name__
                self._set(None, WorkerFault(f"the connection to it failed ({kind}); the gateway's log says where"))
            if time.monotonic() - began_s > MAX_PAUSE_S:
                self._pause_s = RECONNECT_S
            await self._pause()
            if not is_away:
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    async def _pause(self) -> None:
        """Wait before the next attempt, or until `ask_again`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause_s):
                await self._again.wait()
        self._again.clear()

    async def _connect_once(self) -> None:
        """Connect, and return when the stream ends."""
        self._stub = self._stub_type(self._dialer.channel())  # another one, once our certificates were replaced
        info = await self.get_info()
        if self.refused is not None and info.epoch == self._refused_epoch:
            return  # it is still what it was
        try:
            check_protocol(self.name, info)
            await self._accept(info, self)
        except OutriderError:
            self._refused_epoch = info.epoch
            raise
        accepted = info
        info = await self.get_info()  # the first may be old by now
        if _life(info) != _life(accepted):
            return
        is_back = self.info is not None and self._failures.num_failures > 0
        self._hear(info)
        connection = Connection(
            info,
            self._stub.Control(),
            lambda items: self._batch_type(items=items),
            self._count_bytes,
        )
        tries = f" after {self._failures.num_failures} that failed" if self._failures.num_failures else ""
        log.info("connected to the %s %s at %s%s", self.name, self.model_path, self.address, tries)
        if is_back:
            log.info("the %s at %s is back", self.name, self.address)
        self._failures = Reasons()
        reading = asyncio.create_task(connection.run())
        watching = asyncio.create_task(self._watch(connection))
        try:
            self._set(connection, None)
            await asyncio.wait({reading})  # which ends cancelled when the stream was dropped
            if not reading.cancelled():
                reading.result()
        finally:
            connection.alive = False
            for task in (reading, watching):
                task.cancel()
            await asyncio.gather(reading, watching, return_exceptions=True)
            log.info("disconnected from the %s at %s", self.name, self.address)
            self._set(None, None)

    async def _watch(self, connection: Connection) -> None:
        """Ask how the worker is, and drop the stream of one that hangs."""
        watch = self._hang = HangWatch(*self._silence_s, time.monotonic())
        while connection.alive:
            poll_s = POLL_S if connection.has_work else IDLE_POLL_S
            await asyncio.sleep(min(poll_s, self._silence_s[1] / 4))
            asked_s = time.monotonic()
            try:
                info = await self.get_info(POLL_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                now = time.monotonic()
            except IncompatiblePair:  # it is refused at the next attempt
                connection.drop()
                return
            else:
                now = time.monotonic()
                if _life(info) != _life(connection.info):
                    connection.drop()  # who answers is not who was accepted
                    return
                is_resting = not info.current_step_us  # whatever it was sent is done with
                if is_resting or (self.info is not None and info.num_steps != self.info.num_steps):
                    connection.stepped()
                self._note(info, now - asked_s)
                watch.step_seen(info.num_steps, info.longest_step_us / 1e6, now)
            if not connection.has_work:
                watch.idle(now)
            elif watch.hangs(connection.heard_s, now):
                log.error(
                    "the %s at %s made no step for %g s with work to do: dropping its stream",
                    self.name,
                    self.address,
                    watch.limit_s,
                )
                connection.hung = True
                connection.drop()
                return

    def _note(self, info: pb.WorkerInfo, took_s: float) -> None:
        before = self.info
        self._hear(info)
        self._answered_s = time.monotonic()
        if before is None or before.draining != info.draining:
            self._on_change(self.connection, self.connection)
        self.rtt_s += (took_s - self.rtt_s) * (RTT_GAIN if self.rtt_s else 1.0)

    def _hear(self, info: pb.WorkerInfo) -> None:
        self.info = info
        self._on_info(info)

    def _set(self, connection: Connection | None, refused: OutriderError | None) -> None:
        before, self._connection, self.refused = self._connection, connection, refused
        self._on_change(before, connection)

    def ask_again(self) -> None:
        """Try one that was refused again: what it must fit has changed."""
        if self.refused is not None:
            self._refused_epoch = 0
            self._pause_s = RECONNECT_S
            self._again.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._dialer.close()
