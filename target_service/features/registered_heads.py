"""The heads of draft workers at the target: it receives their projections, and keeps those that some stream uses.

Several draft workers with the same head share one projection, which is kept until the last stream that registered it
ends. Called by the servicer and by `feature_stream`, on the gRPC loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.engine.heads.projection import Projection, check_taps, digest_of, label_of
from outrider.engine.heads.wiring import MAX_PROBE_TAPS
from outrider.engine.memory import SpareMemory
from outrider.engine.worker.engine_thread import EngineThread
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import InvalidRequest
from outrider.wire.telemetry.log import get_logger
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.features.features import FeatureJob

if TYPE_CHECKING:
    from target_service.features.feature_stream import FeatureStream

log = get_logger(__name__)

MAX_HEADS = 16
"""Maximum number of projections that are kept or being uploaded. It is bounded because each one is computed in every
step."""
MAX_HEADS_BYTES = 1 << 30
"""Maximum bytes of all projections together. Two projections fit that map three layers of hidden size 8192 to features
of 8192 elements."""
MAX_PIECE_BYTES = 16 << 20
"""Maximum bytes of one message of an upload. It is bounded because deliveries wait behind the message."""
MAX_PROBE_TOKENS = 128
"""Maximum number of tokens of the text on which an uploaded head is tested. Steps wait while the test runs."""
PIECE_S = 15.0
"""Maximum seconds until the next piece of an upload arrives. If none arrives in that time, the upload is refused."""


@dataclass(slots=True)
class _Head:
    """Projection that is kept."""

    projection: Projection
    streams: set[FeatureStream]
    """Streams that have registered the head."""
    is_ready: bool = False
    """Whether the engine makes features with the head's projection."""


@dataclass(slots=True)
class _Upload:
    """Projection that a stream is uploading."""

    spec: tpb.HeadSpec
    pieces: asyncio.Queue[tpb.HeadWeights]
    reading: asyncio.Task[None]
    num_missing: int
    """Bytes of the projection that have not arrived; once there are none, further pieces are refused."""


class Heads:
    """Registry of the heads of draft workers. Each draft worker's stream may register one head. Draft workers with
    equal heads share one projection.
    """

    def __init__(
        self,
        engine: EngineThread,
        metrics: WorkerMetrics,
        hidden_size: int,
        num_layers: int,
        refusal: str | None,
        spare: SpareMemory,
    ) -> None:
        """Create the registry. hidden_size, num_layers: the target's. refusal: reason why the target makes no features;
        None if it makes them. spare: free memory of the target's device.
        """
        self._engine = engine
        self._shape = (hidden_size, num_layers)
        self._refusal = refusal
        self._spare = spare
        self._heads: dict[bytes, _Head] = {}
        self._uploads: dict[FeatureStream, _Upload] = {}
        metrics.head_bytes.set_function(lambda: self._num_bytes)

    @property
    def _num_bytes(self) -> int:
        # any thread may read it
        return sum(head.projection.num_bytes for head in list(self._heads.values()))

    def is_ready(self, stream: FeatureStream, digest: bytes) -> bool:
        """Return whether a stream may subscribe to a head's features: it has registered the head with this digest, and
        the engine makes the features.
        """
        head = self._heads.get(digest)
        return head is not None and head.is_ready and stream in head.streams

    def register(self, stream: FeatureStream, spec: tpb.HeadSpec) -> None:
        """Register a stream's head. If the target does not have the head's projection yet, ask the draft worker to
        upload it. An unfinished upload of the same stream is discarded.

        Raises InvalidRequest if the target gives no features or has no room for the projection, if the projection is
        empty, or if the stream has another head.
        """
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
        pieces = asyncio.Queue[tpb.HeadWeights]()
        reading = asyncio.create_task(self._read(stream, spec, pieces))
        self._uploads[stream] = _Upload(spec, pieces, reading, spec.num_bytes)
        stream.reply(spec.digest, tpb.HEAD_STATE_NEEDS_WEIGHTS)

    def check_probe(self, num_tokens: int, taps: Sequence[int]) -> None:
        """Raise InvalidRequest if a probe of this size cannot be run. num_tokens: number of tokens of the probe's text.
        taps: layers whose hidden states the draft worker asks for.
        """
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

    def _check_memory(self, num_bytes: int, taps: Sequence[int] = ()) -> None:
        # taps: of the projection, once they are known; a step needs memory for the hidden states of all tapped layers
        tapped = set(taps)
        num_held = self._num_bytes
        for head in self._heads.values():
            tapped.update(head.projection.spec.taps)
        for upload in self._uploads.values():
            num_held += upload.spec.num_bytes
        num = len(self._heads) + len(self._uploads)
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
        """Queue a piece of the projection that the stream uploads. A piece that is not expected is answered with a
        refusal.
        """
        upload = self._uploads.get(stream)
        if upload is None or upload.spec.digest != piece.digest or upload.num_missing <= 0:
            why = "weights came that were not asked for; register the head first"
            stream.reply(piece.digest, tpb.HEAD_STATE_REFUSED, why)
        else:
            upload.num_missing -= len(piece.data)
            upload.pieces.put_nowait(piece)

    def _end_upload(self, stream: FeatureStream) -> None:
        upload = self._uploads.pop(stream, None)
        if upload is not None:
            upload.reading.cancel()

    async def _read(self, stream: FeatureStream, spec: tpb.HeadSpec, pieces: asyncio.Queue[tpb.HeadWeights]) -> None:
        digest = spec.digest
        streams = {stream}  # all that have registered it by the end get an answer
        try:
            data = await _joined(spec.num_bytes, pieces)
            projection = await asyncio.to_thread(_projection_of, data, digest, *self._shape)
            del self._uploads[stream]
            if digest in self._heads:
                self._join(stream, digest)
                return
            self._check_memory(projection.num_bytes, projection.spec.taps)
            head = self._heads[digest] = _Head(projection, streams)
            log.info("a draft registered head %s, %d bytes", label_of(digest), projection.num_bytes)
            await self._engine.call(FeatureJob, lambda features: features.add_head(digest, projection))
        except Exception as error:  # whatever fails: the draft waits for an answer
            why = f"the target failed to take the head: {type(error).__name__}: {error}"
            if isinstance(error, InvalidRequest):
                why = error.message
            log.warning("refused a head of %d bytes: %s", spec.num_bytes, why)
            self._uploads.pop(stream, None)
            if digest in self._heads and self._heads[digest].streams is streams:
                del self._heads[digest]
            for registered in streams:
                registered.reply(digest, tpb.HEAD_STATE_REFUSED, why)
            return
        head.is_ready = True
        for registered in streams:
            registered.reply(digest, tpb.HEAD_STATE_READY)

    def _join(self, stream: FeatureStream, digest: bytes) -> None:
        head = self._heads[digest]
        head.streams.add(stream)
        if head.is_ready:
            stream.reply(digest, tpb.HEAD_STATE_READY)

    def remove_stream(self, stream: FeatureStream) -> None:
        """Remove a stream that has ended, and each head that no other stream has registered."""
        self._end_upload(stream)
        for digest, head in list(self._heads.items()):
            head.streams.discard(stream)
            if not head.streams:
                del self._heads[digest]
                self._engine.submit(FeatureJob(lambda features, digest=digest: features.drop_head(digest)))
                log.info("head %s has no draft any more", label_of(digest))


async def _joined(num_bytes: int, pieces: asyncio.Queue[tpb.HeadWeights]) -> bytearray:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            async with asyncio.timeout(PIECE_S):
                piece = await pieces.get()
        except TimeoutError:
            raise InvalidRequest(f"no weights came for {PIECE_S:g} s; register again") from None
        start = len(data)
        num_new = len(piece.data)
        max_bytes = min(MAX_PIECE_BYTES, num_bytes - start)
        if piece.offset != start or not 1 <= num_new <= max_bytes:
            raise InvalidRequest(
                f"{num_new} bytes from byte {piece.offset} came, must be 1 to {max_bytes} from byte {start}"
            )
        data += piece.data
    return data


def _projection_of(joined: bytearray, digest: bytes, hidden_size: int, num_layers: int) -> Projection:
    data = bytes(joined)  # a copy of up to 1 GiB, which the event loop has no time for
    if digest_of(data) != digest:
        raise InvalidRequest(f"the weights that came have digest {digest_of(data).hex()}, not {digest.hex()}")
    return Projection.from_bytes(data, hidden_size, num_layers)
