"""The heads that drafts have registered: whose projections are uploaded, which are here, and who uses them. On the gRPC
loop's thread.

A projection is here once, whatever draft sent it, and goes with the last stream that registered it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.engine.heads.opening import OpeningMap, check_taps, digest_of, label_of
from outrider.engine.heads.wiring import MAX_PROBE_TAPS
from outrider.engine.loading.memory import Spare
from outrider.engine.worker.engine_thread import EngineThread
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import InvalidRequest
from outrider.wire.log import get_logger
from outrider.wire.metrics import WorkerMetrics
from target_service.feature_jobs import FeatureJob

if TYPE_CHECKING:
    from target_service.feature_stream import FeatureStream

log = get_logger(__name__)

MAX_HEADS = 16
"""Projections that are here or being uploaded: each costs every step time."""
MAX_HEADS_BYTES = 1 << 30
"""Bytes of all of them: two of three taps of 8192."""
MAX_PIECE_BYTES = 16 << 20
"""Bytes of a piece; deliveries wait behind one."""
MAX_PROBE_TOKENS = 128
"""Tokens of a probe, which holds up steps."""
PIECE_S = 15.0
"""Seconds that a piece may be awaited."""


@dataclass(slots=True)
class _Head:
    """A projection that is here, or that the engine is taking in."""

    num_bytes: int
    taps: Sequence[int]
    streams: set[FeatureStream] = field(default_factory=set)
    is_ready: bool = False


@dataclass(eq=False, slots=True)
class _Upload:
    """A projection that a stream sends."""

    digest: bytes
    num_bytes: int
    timer: asyncio.TimerHandle
    data: bytearray = field(default_factory=bytearray)


class Heads:
    """Registers heads for the streams of drafts, each of which has one head."""

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
        self._uploads: dict[FeatureStream, _Upload] = {}
        self._reading: set[asyncio.Task[None]] = set()

    def is_ready(self, stream: FeatureStream, digest: bytes) -> bool:
        """Return whether a stream may subscribe to features of this head."""
        head = self._heads.get(digest)
        return head is not None and head.is_ready and stream in head.streams

    def register(self, stream: FeatureStream, spec: tpb.HeadSpec) -> None:
        """Register a head, again or for the first time; an upload of the stream begins anew. Raises InvalidRequest."""
        self._end_upload(stream)
        self._check_features()
        if not spec.num_bytes:
            raise InvalidRequest("the head's projection has num_bytes 0, must have at least 1")
        for digest, head in self._heads.items():
            if stream in head.streams and digest != spec.digest:
                raise InvalidRequest("this stream has another head; register each on a stream of its own")
        if spec.digest in self._heads:
            self._join(stream, spec.digest)
            return
        self._check_memory(spec.num_bytes)
        self._uploads[stream] = _Upload(spec.digest, spec.num_bytes, self._await_piece(stream))
        stream.reply(spec.digest, tpb.HEAD_STATE_WEIGHTS_WANTED)

    def check_probe(self, num_tokens: int, taps: Sequence[int]) -> None:
        """Raise InvalidRequest where so many tokens with these taps cannot be run."""
        self._check_features()
        if not (1 <= num_tokens <= MAX_PROBE_TOKENS and len(taps) <= MAX_PROBE_TAPS):
            raise InvalidRequest(
                f"a probe of {num_tokens} tokens and {len(taps)} taps, must be from 1 to {MAX_PROBE_TOKENS} tokens and "
                f"at most {MAX_PROBE_TAPS} taps"
            )
        check_taps(taps, self._shape[1])

    def _check_features(self) -> None:
        if self._refusal is not None:
            raise InvalidRequest(f"the target gives no features: {self._refusal}")

    def _check_memory(self, num_bytes: int, taps: Sequence[int] = (), upload: _Upload | None = None) -> None:
        """Raise InvalidRequest where there is no memory for a projection beside those that are here or uploaded.

        taps: its own, once they are known. Those of all heads are counted with the steps that they are tapped in.
        upload: its own.
        """
        tapped, num, num_held = set(taps), 0, 0
        for head in self._heads.values():
            tapped.update(head.taps)
            num += 1
            num_held += head.num_bytes
        for other in self._uploads.values():
            if other is not upload:
                num += 1
                num_held += other.num_bytes
        num_tapped = self._spare.tap_bytes * len(tapped)
        max_bytes = max(0, min(MAX_HEADS_BYTES, self._spare.num_bytes - num_tapped))
        if num >= MAX_HEADS or num_held + num_bytes > max_bytes:
            raise InvalidRequest(
                f"the target holds {num} heads of {num_held} bytes, this has {num_bytes}; at most {MAX_HEADS} of "
                f"{max_bytes} bytes are taken: {self._spare.num_bytes} are free beside KV cache and steps, "
                f"{num_tapped} of them for {len(tapped)} hidden states that are tapped; stop drafts with other heads, "
                "or start the target with a lower kv_cache_fraction or kv_cache_tokens"
            )

    def add_piece(self, stream: FeatureStream, piece: tpb.HeadWeights) -> None:
        """Take in a piece of the projection that the stream uploads. One that breaks a rule ends the upload."""
        upload = self._uploads.get(stream)
        if upload is None or upload.digest != piece.digest:
            why = "weights came that were not asked for; register the head first"
            stream.reply(piece.digest, tpb.HEAD_STATE_REFUSED, why)
            return
        upload.timer.cancel()
        num_received, num_new = len(upload.data), len(piece.data)
        max_bytes = min(MAX_PIECE_BYTES, upload.num_bytes - num_received)
        if piece.offset != num_received or not 1 <= num_new <= max_bytes:
            why = f"{num_new} bytes from byte {piece.offset} came, must be 1 to {max_bytes} from byte {num_received}"
            self._refuse(stream, why)
            return
        upload.data += piece.data
        if len(upload.data) < upload.num_bytes:
            upload.timer = self._await_piece(stream)
            return
        reading = asyncio.create_task(self._read(stream, upload))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)

    def _await_piece(self, stream: FeatureStream) -> asyncio.TimerHandle:
        why = f"no weights came for {PIECE_S:g} s; register again"
        return asyncio.get_running_loop().call_later(PIECE_S, self._refuse, stream, why)

    def _refuse(self, stream: FeatureStream, why: str) -> None:
        """End a stream's upload."""
        upload = self._end_upload(stream)
        if upload is not None:
            log.warning("refused a head of %d bytes: %s", upload.num_bytes, why)
            stream.reply(upload.digest, tpb.HEAD_STATE_REFUSED, why)

    def _end_upload(self, stream: FeatureStream) -> _Upload | None:
        upload = self._uploads.pop(stream, None)
        if upload is not None:
            upload.timer.cancel()
        return upload

    async def _read(self, stream: FeatureStream, upload: _Upload) -> None:
        """Check a projection that is complete, in another thread, and give it to the engine."""
        digest = upload.digest
        try:
            projection = await asyncio.to_thread(_projection_of, upload, *self._shape)
            if digest not in self._heads:
                self._check_memory(projection.num_bytes, projection.spec.taps, upload)
        except InvalidRequest as error:
            if self._uploads.get(stream) is upload:
                self._refuse(stream, error.message)
            return
        if self._uploads.get(stream) is upload:  # else the stream has ended, or begun anew
            self._end_upload(stream)
            if digest not in self._heads:
                self._add(digest, projection)
            self._join(stream, digest)

    def _add(self, digest: bytes, projection: OpeningMap) -> None:
        head = self._heads[digest] = _Head(projection.num_bytes, projection.spec.taps)

        def respond(why: str | None) -> None:
            if self._heads.get(digest) is not head:
                return  # all its streams have ended
            state = tpb.HEAD_STATE_READY
            if why is not None:
                state = tpb.HEAD_STATE_REFUSED
                del self._heads[digest]
                log.warning("refused a head of %d bytes: %s", head.num_bytes, why)
            head.is_ready = why is None
            for stream in head.streams:
                stream.reply(digest, state, why or "")
            self._count_bytes()

        self._engine.submit(FeatureJob(lambda features: features.add_head(digest, projection, respond)))
        log.info("a draft registered head %s, %d bytes", label_of(digest), head.num_bytes)

    def _join(self, stream: FeatureStream, digest: bytes) -> None:
        head = self._heads[digest]
        head.streams.add(stream)
        if head.is_ready:
            stream.reply(digest, tpb.HEAD_STATE_READY)

    def gone(self, stream: FeatureStream) -> None:
        """Forget a stream that has ended, and what it alone used."""
        self._end_upload(stream)
        for digest, head in list(self._heads.items()):
            head.streams.discard(stream)
            if not head.streams:
                del self._heads[digest]
                self._engine.submit(FeatureJob(lambda features, digest=digest: features.drop_head(digest)))
                log.info("head %s has no draft any more", label_of(digest))
        self._count_bytes()

    def _count_bytes(self) -> None:
        self._metrics.head_bytes.set(sum(head.num_bytes for head in self._heads.values()))


def _projection_of(upload: _Upload, hidden_size: int, num_layers: int) -> OpeningMap:
    data = bytes(upload.data)
    if digest_of(data) != upload.digest:
        raise InvalidRequest(f"the weights that came have digest {digest_of(data).hex()}, not {upload.digest.hex()}")
    return OpeningMap.from_bytes(data, hidden_size, num_layers)
