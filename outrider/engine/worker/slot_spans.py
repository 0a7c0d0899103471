"""Add a worker's part of a trace: one span for each step of a traced slot, with one child span for each phase.

Spans are made from the timings of a verdict when it is sent, so the engine has no tracing code. The gateway makes the
span of a round. Its id follows from the lease's ticket and the length at which the round began, so tracing adds nothing
to the messages. Called by `worker_service`, on the gRPC loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from outrider.engine.worker.jobs import SlotKey
from outrider.v1 import common_pb2 as pb
from outrider.wire.telemetry.trace import Spans, TraceParent, round_span_id

_PHASES = (("wait", "wait_us"), ("queue", "queue_us"), ("forward", "forward_us"), ("accept", "accept_us"))
"""(name of the span of a phase, field of the verdict with its duration in microseconds)."""
_FACTS = ("num_drafted", "num_accepted", "batch_size", "num_cached_tokens")
"""Fields of a verdict that become attributes of its span: counts, never token ids."""


class SlotSpans:
    """Open slots of one worker whose requests are traced. It makes the trace spans of these slots' steps."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._traced: dict[SlotKey, TraceParent] = {}

    def begin_item(self, owner: int, item: Any) -> Callable[[Any], None] | None:
        """Record an item, i.e. one message of a Control stream. If it is a verify with tickets for a traced slot,
        return a function to be called with each reply, which adds the spans of the step that it answers; else None.

        `owner`: number of the stream.
        """
        kind = item.WhichOneof("item")
        if kind == "open":
            self._trace_slot((owner, item.open.slot), TraceParent.parse(item.open.traceparent))
        elif kind == "close":
            self._traced.pop((owner, item.close.slot), None)
        elif kind == "verify":
            request = self._traced.get((owner, item.verify.slot))
            if request is not None and item.verify.tickets:
                return self._trace_verify(item.verify, request)
        return None

    def close_stream(self, owner: int) -> None:
        """Remove the slots of the Control stream with the number `owner`, which ended."""
        for key in list(self._traced):
            if key[0] == owner:
                del self._traced[key]

    def _trace_slot(self, key: SlotKey, request: TraceParent | None) -> None:
        if request is not None and request.sampled:
            self._traced[key] = request
        else:
            self._traced.pop(key, None)

    def _trace_verify(self, message: Any, request: TraceParent) -> Callable[[Any], None]:
        ticket = message.tickets[0].ticket
        facts = {"outrider.slot": message.slot}

        def add_spans(reply: Any) -> None:
            now_ns = time.time_ns()
            if reply.WhichOneof("item") != "verdict":
                code = pb.WorkerErrorCode.Name(reply.error.code).removeprefix("WORKER_ERROR_CODE_")
                self._spans.add("verify", request, now_ns, now_ns, facts, error=code, server=True)
                return
            verdict = reply.verdict
            parent = TraceParent(request.trace_id, round_span_id(ticket, verdict.committed_len), True)
            durations_us = {phase: getattr(verdict, field) for phase, field in _PHASES}
            start_ns = now_ns - 1000 * sum(durations_us.values())
            attributes = facts | {f"outrider.{field}": getattr(verdict, field) for field in _FACTS}
            span = self._spans.add("verify", parent, start_ns, now_ns, attributes, server=True)
            if span is not None:
                self._add_phases(span, start_ns, durations_us)

        return add_spans

    def _add_phases(self, parent: TraceParent, start_ns: int, durations_us: dict[str, int]) -> None:
        for name, duration_us in durations_us.items():
            end_ns = start_ns + 1000 * duration_us
            if duration_us:
                self._spans.add(name, parent, start_ns, end_ns, {})
            start_ns = end_ns
