"""The gateway's links to workers.

A `WorkerLink` connects to one worker, connects again whenever the stream ends, and polls its load, drain state and step
count once or twice a second. `Pools` has one for each member.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from gateway.workers.connection import Connection
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import IncompatiblePair, OutriderError, WorkerFault
from outrider.wire.models.model_id import short_name
from outrider.wire.peer_text import MAX_REASON_BYTES, Reasons, bound_strings, bound_text, describe_excess
from outrider.wire.protocol import other_protocol
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.hang_watch import HangWatch
from outrider.wire.transport.roles import Role
from outrider.wire.transport.rpc import describe_failure, proxy_note
from outrider.wire.transport.tls import CertificateFolder, Dialer

log = get_logger(__name__)

RECONNECT_S = 0.2
"""Shortest pause between two attempts to connect to a worker, in seconds."""
MAX_PAUSE_S = 30.0
"""Longest pause between two attempts to connect, in seconds. The pause doubles each time a worker is refused or its
stream ends at once. It is reset after a stream that lived longer than this."""
MAX_PATH_BYTES = 4096
"""Maximal length of a model's path, in bytes: Linux's own limit."""
CALL_TIMEOUT_S = 10.0
"""Timeout of the calls GetInfo and GetTokenizer, in seconds. They are made once in each life of a worker."""
PAIR_TIMEOUT_S = 120.0
"""Timeout of a pairing check, in seconds. In a check a draft worker with a head sends the target the weights of its
projection, at most 1 GiB, so that the target can compute features. Then it tests itself with that target."""
POLL_S = 0.5
"""Seconds between two polls of a worker that has work from this gateway."""
IDLE_POLL_S = 1.0
"""Seconds between two polls of a worker without work. A worker that begins to drain waits for two such polls, so that
every gateway notices it."""
POLL_TIMEOUT_S = 1.0
"""Timeout of one poll of a worker, in seconds."""
RTT_GAIN = 1 / 8
"""Weight of the newest round-trip time in the smoothed round-trip time, as in TCP (RFC 6298)."""
_TYPES: dict[str, tuple[Any, Any]] = {
    "draft": (draft_pb2_grpc.DraftServiceStub, dpb.DraftRequestBatch),
    "target": (target_pb2_grpc.TargetServiceStub, tpb.TargetRequestBatch),
}


def check_protocol(role: str, info: pb.WorkerInfo) -> None:
    """Raise IncompatiblePair if the worker's protocol version is not this gateway's.

    role: "target" or "draft", for the message.
    """
    peer = f"the {role} {info.model_id} (version {info.version or 'unknown'})"
    refusal = other_protocol(peer, info.protocol, "this gateway")
    if refusal is not None:
        raise IncompatiblePair(refusal)


def _life(info: pb.WorkerInfo) -> tuple[object, ...]:
    return info.epoch, info.model_id, info.vocab_size, info.tokenizer_fingerprint


class WorkerLink:
    """Keeps one worker connected: opens a Control stream, polls the worker, and connects again when the stream ends.

    `connection` is None while the worker is not connected.
    """

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
        """Start to connect. Must be called on a running event loop.

        silence_s: minimal and maximal time that a worker with work may be silent, in seconds; see `HangWatch`. accept:
        checks a worker that has connected, and raises an OutriderError if it must not be used. It may wait until it can
        decide. on_change: called with the previous and the new connection whenever one begins or ends, and when the
        worker begins to drain. on_info: called with the worker's info after each poll.
        """
        self.name = name
        self.address = address
        self.info: pb.WorkerInfo | None = None
        """Last WorkerInfo that the worker sent; None before the first."""
        self.model_path = ""
        """Path or hub id with which the worker was started, for comparisons and the log. `info.model_id` is its last
        part."""
        self.rtt_s = 0.0
        """Smoothed round-trip time of polls of the worker, in seconds."""
        self.refused: OutriderError | None = None
        """Error for which the gateway does not use the worker although it answers; None if the worker is compatible or
        has not answered yet."""
        self._connection: Connection | None = None
        self._hang: HangWatch | None = None
        self._answered_s = 0.0
        """Monotonic time of the last successful poll, in seconds."""
        self._refused_epoch = 0
        self._silence_s = silence_s
        self._accept = accept
        self._count_bytes = count_bytes
        self._on_change = on_change
        self._on_info = on_info
        self._failures = Reasons()
        """Reasons why the worker is away or refused."""
        self._pause_s = RECONNECT_S
        self._again = asyncio.Event()
        """Event that is set to try a refused worker at once."""
        self._dialer = Dialer(address, Role(name), max_message_bytes, certificates)
        self._stub_type, self._batch_type = _TYPES[name]
        self._stub = self._stub_type(self._dialer.channel())
        self._task = asyncio.create_task(self._keep_connected())

    @property
    def connection(self) -> Connection | None:
        """Current connection; None from the moment when its stream ends."""
        if self._connection is None or not self._connection.is_alive:
            return None
        return self._connection

    @property
    def last_reply_s(self) -> float:
        """Monotonic time of the worker's last reply of any kind, in seconds; 0.0 while it is not connected."""
        connection = self.connection
        if connection is None:
            return 0.0
        return max(connection.last_reply_s, self._answered_s)

    @property
    def silent_s(self) -> float:
        """Seconds for which the worker has made no step and sent no reply although it has work; 0.0 without work."""
        connection = self.connection
        watch = self._hang
        if connection is None or watch is None or not connection.has_work:
            return 0.0
        return watch.silent_s(connection.last_reply_s, time.monotonic())

    async def get_info(self, timeout_s: float = CALL_TIMEOUT_S) -> pb.WorkerInfo:
        """Fetch the worker's WorkerInfo.

        Texts in it that are too long are cut, and of the path in `model_id` only the last part is left. Raises
        grpc.aio.AioRpcError if the call fails, and IncompatiblePair if the info is too large.
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
        """Fetch the files of the worker's tokenizer. Raises grpc.aio.AioRpcError if the call fails."""
        files: pb.TokenizerFiles = await self._stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=CALL_TIMEOUT_S)
        return files

    async def pair(self, target_address: str, target_epoch: int) -> str | None:
        """Run the pairing check of this link's draft worker with a target. Return why the two are incompatible, or
        None.

        In the check the draft worker registers at the target and tests itself. Raises grpc.aio.AioRpcError if the check
        could not be finished.
        """
        request = dpb.PairRequest(target_address=target_address, target_epoch=target_epoch)
        reply: dpb.PairReply = await self._stub.Pair(request, timeout=PAIR_TIMEOUT_S)
        if reply.is_compatible:
            return None
        return bound_text(reply.reason, MAX_REASON_BYTES)

    async def _keep_connected(self) -> None:
        # An absent worker is tried again soon. A worker that was refused or leaves at once is tried later and later,
        # whatever it reports of itself.
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause_s):
                await self._again.wait()
        self._again.clear()

    async def _connect_once(self) -> None:
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
        self._update_info(info)
        connection = Connection(
            info,
            self._stub.Control(),
            lambda items: self._batch_type(items=items),
            self._count_bytes,
        )
        tries = ""
        if self._failures.num_failures:
            tries = f" after {self._failures.num_failures} that failed"
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
            connection.is_alive = False
            for task in (reading, watching):
                task.cancel()
            await asyncio.gather(reading, watching, return_exceptions=True)
            log.info("disconnected from the %s at %s", self.name, self.address)
            self._set(None, None)

    async def _watch(self, connection: Connection) -> None:
        watch = self._hang = HangWatch(*self._silence_s, time.monotonic())
        while connection.is_alive:
            poll_s = IDLE_POLL_S
            if connection.has_work:
                poll_s = POLL_S
            await asyncio.sleep(min(poll_s, self._silence_s[1] / 4))
            began_s = time.monotonic()
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
                    connection.drop()  # another worker, or another life of it, than the one that was accepted
                    return
                is_resting = not info.current_step_us  # it has finished all that it was sent
                if is_resting or (self.info is not None and info.num_steps != self.info.num_steps):
                    connection.note_step()
                self._note_poll(info, now - began_s)
                watch.note_step(info.num_steps, info.longest_step_us / 1e6, now)
            if not connection.has_work:
                watch.idle(now)
            elif watch.is_hung(connection.last_reply_s, now):
                log.error(
                    "the %s at %s made no step for %g s with work to do: dropping its stream",
                    self.name,
                    self.address,
                    watch.limit_s,
                )
                connection.is_hung = True
                connection.drop()
                return

    def _note_poll(self, info: pb.WorkerInfo, took_s: float) -> None:
        previous = self.info
        self._update_info(info)
        self._answered_s = time.monotonic()
        if previous is None or previous.is_draining != info.is_draining:
            self._on_change(self.connection, self.connection)
        gain = 1.0  # for the first one
        if self.rtt_s:
            gain = RTT_GAIN
        self.rtt_s += (took_s - self.rtt_s) * gain

    def _update_info(self, info: pb.WorkerInfo) -> None:
        self.info = info
        self._on_info(info)

    def _set(self, connection: Connection | None, refused: OutriderError | None) -> None:
        previous = self._connection
        self._connection = connection
        self.refused = refused
        self._on_change(previous, connection)

    def retry_now(self) -> None:
        """Check this link's worker again now if it was refused as incompatible; else do nothing.

        Call it after a change of the membership, or of the reference target with which the worker is compared.
        """
        if self.refused is not None:
            self._refused_epoch = 0
            self._pause_s = RECONNECT_S
            self._again.set()

    async def close(self) -> None:
        """Stop connecting, and close the channel."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._dialer.close()
