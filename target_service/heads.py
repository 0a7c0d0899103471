"""The heads that drafts have registered: whose maps come, which are here, and who uses them. On the gRPC loop's thread.

A map is here once, whatever draft sent it, and goes with the last stream that registered it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.engine.heads.opening import MAX_OPENING_BYTES, OpeningMap, digest_of, label_of
from outrider.engine.heads.wiring import MAX_PROBE_TAPS
from outrider.engine.loading.memory import Spare
from outrider.engine.paths.forward_path import NORMED
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import JobError
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import InvalidRequest
from outrider.wire.log import get_logger
from outrider.wire.metrics import WorkerMetrics
from target_service.feature_jobs import AddHead, DropHead

log = get_logger(__name__)

MAX_HEADS = 16
"""Maps that are here or on their way. Doubling it doubles what a step may spend on rows."""
MAX_HEADS_BYTES = 1 << 30
"""Bytes of all of them: two of three taps of 8192. Doubling it lets drafts take twice the memory of a target."""
MAX_PIECE_BYTES = 16 << 20
"""Bytes of a piece. Doubling it halves their number, and deliveries wait twice as long behind one."""
MAX_PROBE_TOKENS = 128
"""Tokens of a probe. Doubling it lets one hold up steps for about twice as long."""
PIECE_S = 15.0
"""Seconds that a piece may be awaited. Doubling it keeps room for a draft that hangs twice as long."""

Reply = Callable[["tpb.HeadState", str], None]
"""Answers a registration: with a state, and why."""


@dataclass(slots=True)
class _Head:
    """A map that is here, or that the engine is taking in."""

    num_bytes: int
    taps: Sequence[int]
    streams: dict[int, Reply] = field(default_factory=dict)
    is_ready: bool = False


@dataclass(eq=False, slots=True)
class _Upload:
    """A map that a stream sends."""

    digest: bytes
    num_bytes: int
    reply: Reply
    timer: asyncio.TimerHandle
    pieces: list[bytes] = field(default_factory=list)
    num_received: int = 0


class Heads:
    """Registers heads for streams, by number. A stream has one head."""

    def __init__(
        self,
        engine: EngineThread,
        metrics: WorkerMetrics,
        hidden_size: int,
        num_layers: int,
        refusal: str | None,
        spare: Spare,
    ) -> None:
        """refusal: why the target gives no features; None where it does. spare: of the target's device."""
        self._engine = engine
        self._metrics = metrics
        self._shape = (hidden_size, num_layers)
        self._refusal = refusal
        self._spare = spare
        self._heads: dict[bytes, _Head] = {}
        self._uploads: dict[int, _Upload] = {}
        self._reading: set[asyncio.Task[None]] = set()

    def is_ready(self, stream: int, digest: bytes) -> bool:
        """Return whether rows for this head may be asked for on this stream."""
        head = self._heads.get(digest)
        return head is not None and head.is_ready and stream in head.streams

    def register(self, stream: int, spec: tpb.HeadSpec, reply: Reply) -> None:
        """Register a head, again or for the first time; what is still to come of it begins anew."""
        self._end_upload(stream)
        why = self._refuses(stream, spec)
        if why is not None:
            reply(tpb.HEAD_STATE_REFUSED, why)
        elif spec.digest in self._heads:
            self._join(stream, spec.digest, reply)
        else:
            timer = self._await_piece(stream)
            self._uploads[stream] = _Upload(spec.digest, spec.num_bytes, reply, timer)
            reply(tpb.HEAD_STATE_WEIGHTS_WANTED, "")

    def refuses_probe(self, num_tokens: int, taps: Sequence[int]) -> str | None:
        """Return why so many tokens with these taps cannot be run; None where they can."""
        num_layers = self._shape[1]
        if self._refusal is not None:
            return f"the target gives no features: {self._refusal}"
        if not 1 <= num_tokens <= MAX_PROBE_TOKENS:
            return f"a probe of {num_tokens} tokens, must be from 1 to {MAX_PROBE_TOKENS}"
        if not 1 <= len(taps) <= MAX_PROBE_TAPS:
            return f"a probe of {len(taps)} taps, must be from 1 to {MAX_PROBE_TAPS}"
        wrong = [tap for tap in taps if not NORMED <= tap <= num_layers]
        return f"tap {wrong[0]} was asked for, must be from {NORMED} to {num_layers}" if wrong else None

    def _refuses(self, stream: int, spec: tpb.HeadSpec) -> str | None:
        if self._refusal is not None:
            return f"the target gives no features: {self._refusal}"
        if len(spec.digest) != 32:
            return f"the digest has {len(spec.digest)} bytes, must be a SHA-256 of 32"
        if not 1 <= spec.num_bytes <= MAX_OPENING_BYTES:
            return f"the opening map has {spec.num_bytes} bytes, must be from 1 to {MAX_OPENING_BYTES}"
        if any(stream in head.streams for digest, head in self._heads.items() if digest != spec.digest):
            return "this stream has another head; register each on a stream of its own"
        return None if spec.digest in self._heads else self._lacks_room(spec.num_bytes)

    def _lacks_room(self, num_bytes: int, taps: Sequence[int] = ()) -> str | None:
        """Return why a map has no room beside those that are here or on their way; None where it has.

        taps: its own, once they are known. Those of all heads are counted with the steps that they are tapped in.
        """
        num, num_held = len(self._heads) + len(self._uploads), self._num_bytes()
        tapped = set(taps).union(*(head.taps for head in self._heads.values()))
        num_tapped = self._spare.tap_bytes * len(tapped)
        room = max(0, min(MAX_HEADS_BYTES, self._spare.num_bytes - num_tapped))
        if num < MAX_HEADS and num_held + num_bytes <= room:
            return None
        return (
            f"the target holds {num} heads of {num_held} bytes, this has {num_bytes}; at most {MAX_HEADS} of {room} "
            f"bytes are taken: {self._spare.num_bytes} are free beside KV cache and steps, {num_tapped} of them for "
            f"{len(tapped)} hidden states that are tapped; stop drafts with other heads, or start the target with a "
            "lower kv_cache_fraction or kv_cache_tokens"
        )

    def _num_bytes(self) -> int:
        here, on_their_way = self._heads.values(), self._uploads.values()
        return sum(head.num_bytes for head in here) + sum(upload.num_bytes for upload in on_their_way)

    def add_piece(self, stream: int, piece: tpb.HeadWeights, refuse: Reply) -> None:
        """Take in a piece of the map that the stream sends. refuse: answers one of a map that is not awaited."""
        upload = self._uploads.get(stream)
        if upload is None or upload.digest != piece.digest:
            refuse(tpb.HEAD_STATE_REFUSED, "weights came that were not asked for; register the head first")
            return
        data = piece.data
        if piece.offset != upload.num_received:
            self._refuse(
                stream, f"weights from byte {piece.offset} came, {upload.num_received} was next; send in order"
            )
        elif not 1 <= len(data) <= MAX_PIECE_BYTES:
            self._refuse(stream, f"a piece of {len(data)} bytes came, must be from 1 to {MAX_PIECE_BYTES}")
        elif upload.num_received + len(data) > upload.num_bytes:
            self._refuse(stream, f"more than the {upload.num_bytes} bytes came that were registered")
        else:
            upload.timer.cancel()
            upload.pieces.append(data)
            upload.num_received += len(data)
            if upload.num_received < upload.num_bytes:
                upload.timer = self._await_piece(stream)
                return
            reading = asyncio.create_task(self._read(stream, upload))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)

    def _await_piece(self, stream: int) -> asyncio.TimerHandle:
        why = f"no weights came for {PIECE_S:g} s; register again"
        return asyncio.get_running_loop().call_later(PIECE_S, self._refuse, stream, why)

    def _refuse(self, stream: int, why: str) -> None:
        upload = self._end_upload(stream)
        if upload is not None:
            _refuse(upload, why)

    def _end_upload(self, stream: int) -> _Upload | None:
        upload = self._uploads.pop(stream, None)
        if upload is not None:
            upload.timer.cancel()
        return upload

    async def _read(self, stream: int, upload: _Upload) -> None:
        """Check a map that is complete, in another thread, and give it to the engine."""
        why, opening = "", None
        try:
            opening = await asyncio.to_thread(_opening_of, upload, *self._shape)
        except InvalidRequest as error:
            why = error.message
        if self._uploads.get(stream) is not upload:
            return  # the stream has ended, or begun anew
        if opening is None:
            self._refuse(stream, why)
            return
        self._end_upload(stream)
        if upload.digest not in self._heads:
            lacks = self._lacks_room(opening.num_bytes, opening.spec.taps)
            if lacks is not None:
                _refuse(upload, lacks)
                return
            self._add(upload, opening)
        self._join(stream, upload.digest, upload.reply)

    def _add(self, upload: _Upload, opening: OpeningMap) -> None:
        digest = upload.digest
        head = self._heads[digest] = _Head(opening.num_bytes, opening.spec.taps)

        def respond(error: JobError | None) -> None:
            if self._heads.get(digest) is not head:
                return  # all its streams have ended
            if error is not None:
                del self._heads[digest]
                log.warning("refused a head of %d bytes: %s", head.num_bytes, error.message)
            head.is_ready = error is None
            self._metrics.head_bytes.set(sum(each.num_bytes for each in self._heads.values()))
            for reply in head.streams.values():
                _answer(reply, error)

        self._engine.submit(AddHead(digest, opening, respond))
        log.info("a draft registered head %s, %d bytes", label_of(digest), head.num_bytes)

    def _join(self, stream: int, digest: bytes, reply: Reply) -> None:
        head = self._heads[digest]
        head.streams[stream] = reply
        if head.is_ready:
            _answer(reply, None)

    def gone(self, stream: int) -> None:
        """Forget a stream that has ended, and what it alone used."""
        self._end_upload(stream)
        for digest, head in list(self._heads.items()):
            if head.streams.pop(stream, None) is not None and not head.streams:
                del self._heads[digest]
                self._engine.submit(DropHead(digest))
                log.info("head %s has no draft any more", label_of(digest))
        self._metrics.head_bytes.set(sum(each.num_bytes for each in self._heads.values()))


def _refuse(upload: _Upload, why: str) -> None:
    log.warning("refused a head of %d bytes: %s", upload.num_bytes, why)
    upload.reply(tpb.HEAD_STATE_REFUSED, why)


def _answer(reply: Reply, error: JobError | None) -> None:
    reply(tpb.HEAD_STATE_READY if error is None else tpb.HEAD_STATE_REFUSED, "" if error is None else error.message)


def _opening_of(upload: _Upload, hidden_size: int, num_layers: int) -> OpeningMap:
    data = b"".join(upload.pieces)
    if digest_of(data) != upload.digest:
        raise InvalidRequest(f"the weights that came have digest {digest_of(data).hex()}, not {upload.digest.hex()}")
    return OpeningMap.from_bytes(data, hidden_size, num_layers)
