"""`python -m benchmarks.trace_cost`: what tracing costs a round, in microseconds of processor time.

Measures the gateway and both workers together; where tracing is off, workers call nothing. A thread of OpenTelemetry's
encodes and sends spans; its time to encode the workers' spans of a round is listed, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from gateway.telemetry.request_record import RequestRecords, RoundRecord, current_record
from outrider.engine.worker.slot_spans import SlotSpans
from outrider.engine.worker.worker_service import Respond
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.telemetry.trace import Spans, TraceParent

NOWHERE = "http://127.0.0.1:1"
NUM_ROUNDS = 100
REPEATS = 15
LATER = {
    "OTEL_BSP_SCHEDULE_DELAY": "3600000",
    "OTEL_BSP_MAX_QUEUE_SIZE": "1000000",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1000000",
}
"""Settings under which nothing is dropped, and nothing encoded or sent while the making of spans is timed."""
SAMPLED = TraceParent(1, 2, True)
NOT_SAMPLED = TraceParent(1, 2, False)
VERDICT = tpb.Verdict(
    token_ids=[1, 2, 3],
    num_drafted=5,
    num_accepted=2,
    wait_us=900,
    queue_us=20,
    forward_us=9000,
    accept_us=300,
    batch_size=4,
)
VERIFY = tpb.TargetRequest(
    verify=tpb.Verify(slot=1, committed_ids=[1, 2], tickets=[tpb.DraftTicket(ticket=9)], until_len=3)
)
VERDICT_REPLY = tpb.TargetReply(verdict=VERDICT)


def best_us(work: Callable[[], object]) -> float:
    """Return the microseconds of a call in the fastest of several runs."""
    times = []
    for _ in range(REPEATS):
        started = time.thread_time()
        for _ in range(NUM_ROUNDS):
            work()
        times.append((time.thread_time() - started) / NUM_ROUNDS)
    return 1e6 * min(times)


def gateway_round() -> None:
    record = RoundRecord(9, 2, time.monotonic(), "target", "draft")
    record.verdict = VERDICT
    current_record().add_round(record)


def target_round(answer: Respond | None) -> None:
    """Make the spans of a step."""
    if answer is not None:
        answer(VERDICT_REPLY)


def lease_of(spans: Spans, traceparent: str) -> Respond | None:
    """Return what takes the verdicts of a slot's lease."""
    slots = SlotSpans(spans)
    slots.asked(1, tpb.TargetRequest(open=pb.OpenSlot(slot=1, traceparent=traceparent)))
    return slots.asked(1, VERIFY)


def main() -> None:
    os.environ |= LATER
    spans = Spans(NOWHERE, "benchmark", CollectorRegistry())
    rows: list[tuple[str, float]] = []
    for name, records, header in (
        ("off", RequestRecords(), None),
        ("on, not sampled", RequestRecords(spans), str(NOT_SAMPLED)),
        ("on, sampled", RequestRecords(spans), str(SAMPLED)),
    ):
        with records.record("r", "chat", header):
            rows.append((f"gateway, {name}", best_us(gateway_round)))
    for name, place in (("not sampled", NOT_SAMPLED), ("sampled", SAMPLED)):
        lease = lease_of(spans, str(place))
        rows.append((f"target, on, {name}", best_us(lambda lease=lease: target_round(lease))))
    kept = InMemorySpanExporter()
    spans._provider.add_span_processor(SimpleSpanProcessor(kept))
    target_round(lease)
    batch = kept.get_finished_spans()
    encoding_us = best_us(lambda: encode_spans(batch).SerializeToString())
    rows.append((f"encoding these {len(batch)} spans, on OpenTelemetry's thread", encoding_us))
    for what, cost_us in rows:
        print(f"{cost_us:7.2f} us  {what}")


if __name__ == "__main__":
    main()
