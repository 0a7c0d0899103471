"""What goes back to one draft on its Deliver stream, and what it asks for there beside deliveries.

On the gRPC loop's thread, but for what the engine thread calls as a `RowsLink`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import JobError
from outrider.v1 import target_pb2 as tpb
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.transport.streams import MAX_UNREAD, Outbox
from target_service.feature_jobs import LinkGone, Probed, ProbeJob, WantRows
from target_service.heads import Heads

MAX_BACKLOG_BYTES = 64 << 20
"""Bytes of rows that may wait for one draft; what is beyond is sent later, as far as the slot keeps it. Doubling it
doubles what a slow draft holds."""
PART_BYTES = 4 << 20
"""Bytes of rows in one message, about. Doubling it halves the messages of a prompt; each holds up what is behind it."""


class FeatureStream:
    """One draft's stream. Implements `RowsLink`."""

    def __init__(
        self,
        number: int,
        peer: str,
        epoch: int,
        heads: Heads,
        engine: EngineThread,
        metrics: WorkerMetrics,
        write: Callable[[tpb.FeatureBatch], Awaitable[None]],
        end_stream: Callable[[], object],
    ) -> None:
        """number: unlike that of any other stream. peer: the draft's address, for metrics. epoch: the target's.
        end_stream: called when `write` fails.
        """
        self._number = number
        self._peer = peer
        self._epoch = epoch
        self._heads = heads
        self._engine = engine
        self._metrics = metrics
        self._write_batch = write
        self._num_posted_bytes = 0
        """Of rows. The engine thread alone counts them."""
        self._num_written_bytes = 0
        """Of these. The gRPC loop's thread alone counts them."""
        self._is_probed = False
        """A probe is run, or what it found waits."""
        self._is_over = False
        self._outbox: Outbox[Any] = Outbox(self._write, end_stream, PART_BYTES, lambda item: item.ByteSize())

    # what it asks for

    async def wait_read(self) -> None:
        """Wait until the draft has read what it was sent, but for so much as may wait: nothing more is taken of one
        that does not read.
        """
        await self._outbox.wait_below(MAX_UNREAD)

    def ask(self, ask: tpb.FeatureAsk) -> None:
        """Take in what the draft asks for."""
        kind = ask.WhichOneof("item")
        if kind == "head":
            self._register(ask.head)
        elif kind == "weights":
            self._heads.add_piece(self._number, ask.weights, self._reply(ask.weights.digest, self._epoch))
        elif kind == "rows":
            self._want_rows(ask.rows)
        elif kind == "probe":
            self._probe(ask.probe)

    def _reply(self, digest: bytes, epoch: int) -> Callable[[tpb.HeadState, str], None]:
        def reply(state: tpb.HeadState, why: str) -> None:
            self._put(tpb.HeadReply(digest=digest, state=state, why=why, target_epoch=epoch))

        return reply

    def _register(self, spec: tpb.HeadSpec) -> None:
        reply, why = self._reply(spec.digest, spec.target_epoch), self._stale(spec.target_epoch)
        if why is not None:
            reply(tpb.HEAD_STATE_REFUSED, why)
        else:
            self._heads.register(self._number, spec, reply)

    def _stale(self, epoch: int) -> str | None:
        return None if epoch == self._epoch else f"it is for target epoch {epoch}, this is {self._epoch}"

    def _want_rows(self, request: tpb.FeatureRequest) -> None:
        why = self._stale(request.target_epoch)
        if why is None and not self._heads.is_ready(self._number, request.digest):
            why = "rows were asked for of a head that is not ready; register it first"
        if why is not None:
            self._reply(request.digest, request.target_epoch)(tpb.HEAD_STATE_REFUSED, why)
            return
        self._engine.submit(WantRows(self, request.digest, request.ticket, request.start, request.id))

    def _probe(self, probe: tpb.ProbeRequest) -> None:
        why = self._stale(probe.target_epoch)
        if why is None and self._is_probed:
            why = "another probe of this stream is not answered yet; send one at a time"
        if why is None:
            why = self._heads.refuses_probe(len(probe.token_ids), probe.taps)
        if why is not None:
            self._put(tpb.ProbeReply(id=probe.id, why=why))
            return
        self._is_probed = True

        def respond(result: Probed | JobError) -> None:
            if isinstance(result, JobError):
                self._is_probed = False
                self._put(tpb.ProbeReply(id=probe.id, why=result.message))
            else:
                self._put(tpb.ProbeReply(id=probe.id, taps=result.taps, best_ids=result.best_ids))

        self._engine.submit(ProbeJob(tuple(probe.token_ids), tuple(probe.taps), respond))

    # what goes back

    @property
    def has_room(self) -> bool:
        return self._num_posted_bytes - self._num_written_bytes < MAX_BACKLOG_BYTES

    def send_rows(self, job: WantRows, start: int, num_rows: int, data: bytes) -> None:
        self._num_posted_bytes += len(data)
        self._engine.answer(lambda: self._put_rows(job, start, num_rows, data))
        self._note("sent", num_rows, len(data))

    def note_dropped(self, num_rows: int, num_bytes: int) -> None:
        self._note("dropped", num_rows, num_bytes)

    def _note(self, fate: str, num_rows: int, num_bytes: int) -> None:
        self._metrics.feature_rows.labels(peer=self._peer, fate=fate).inc(num_rows)
        self._metrics.feature_bytes.labels(peer=self._peer, fate=fate).inc(num_bytes)

    def _put_rows(self, job: WantRows, start: int, num_rows: int, data: bytes) -> None:
        row_bytes = len(data) // num_rows
        most = max(1, PART_BYTES // row_bytes)
        for first in range(0, num_rows, most):
            part = data[first * row_bytes : (first + most) * row_bytes]
            num = len(part) // row_bytes
            rows = tpb.FeatureRows(
                ticket=job.ticket,
                target_epoch=self._epoch,
                start=start + first,
                num_rows=num,
                data=part,
                request_id=job.request_id,
            )
            self._put(rows)

    def _put(self, item: Any) -> None:
        """Queue an item, unless the draft has ended its side."""
        if not self._is_over:
            self._outbox.put(item)

    async def _write(self, items: list[Any]) -> None:
        batch = tpb.FeatureBatch()
        num_bytes = 0
        for item in items:
            if isinstance(item, tpb.FeatureRows):
                batch.rows.append(item)
                num_bytes += len(item.data)
            elif isinstance(item, tpb.HeadReply):
                batch.heads.append(item)
            elif isinstance(item, tpb.ProbeReply):
                batch.probes.append(item)
                self._is_probed = self._is_probed and not item.taps
            else:
                batch.summary.CopyFrom(item)
        await self._write_batch(batch)
        self._num_written_bytes += num_bytes

    async def finish(self, summary: tpb.DeliverSummary) -> None:
        """Write what waits, and the summary last."""
        self._outbox.put(summary)
        self._is_over = True
        await self._outbox.wait_below(0)

    async def close(self) -> None:
        """Forget what the stream registered and asked for."""
        self._engine.submit(LinkGone(self, partial(self._metrics.forget_link, self._peer)))
        self._heads.gone(self._number)
        await self._outbox.close()
