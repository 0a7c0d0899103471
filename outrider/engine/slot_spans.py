"""The worker's part of a trace: a span for each propose and verify of a slot that is traced, one below it for each of
its phases. Made from the reply's own timings when it leaves, on the gRPC loop's thread: the engine knows nothing of it.

A round is a span of the gateway's whose id is the round's ticket, so that nothing more has to travel with a round than
does without traces.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from outrider.engine.scheduler import SlotKey
from outrider.v1 import common_pb2 as pb
from outrider.wire.trace import Spans, TraceParent

_PHASES = {
    "propose": (("queue", "queue_us"), ("compute", "compute_us")),
    "verdict": (("wait", "wait_us"), ("queue", "queue_us"), ("forward", "forward_us"), ("accept", "accept_us")),
}
"""By reply: spans, and the fields with their times."""
_FACTS = {
    "propose": ("payload_bytes", "encoding", "num_fed_tokens", "num_cached_tokens"),
    "verdict": ("num_drafted", "num_accepted", "batch_size", "num_cached_tokens"),
}
"""Fields that a span tells, too: counts, never ids of tokens."""

Told = Callable[[Any], None]
"""Takes the reply to the item."""


class SlotSpans:
    """Remembers which slots are traced."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._traced: dict[SlotKey, TraceParent] = {}

    def asked(self, owner: int, item: Any) -> Told | None:
        """An item of a Control stream has arrived; returns what its reply is to be told to, if anybody."""
        kind = item.WhichOneof("item")
        if kind == "open":
            self._opened((owner, item.open.slot), TraceParent.parse(item.open.traceparent))
        elif kind == "close":
            self._traced.pop((owner, item.close.slot), None)
        elif kind in ("propose", "verify"):
            message = getattr(item, kind)
            place = self._traced.get((owner, message.slot))
            if place is not None:
                return self._asked(kind, message, place, time.time_ns())
        return None

    def gone(self, owner: int) -> None:
        for key in [key for key in self._traced if key[0] == owner]:
            del self._traced[key]

    def _opened(self, key: SlotKey, place: TraceParent | None) -> None:
        if place is not None and place.sampled:
            self._traced[key] = place
        else:
            self._traced.pop(key, None)

    def _asked(self, name: str, message: Any, request: TraceParent, arrived_ns: int) -> Told:
        above = TraceParent(request.trace_id, message.ticket or request.span_id, True)
        facts: dict[str, Any] = {"outrider.slot": message.slot, "outrider.num_draft_tokens": message.num_draft_tokens}

        def told(reply: Any) -> None:
            kind = reply.WhichOneof("item")
            if kind not in _PHASES:
                code = pb.WorkerErrorCode.Name(reply.error.code).removeprefix("WORKER_ERROR_CODE_")
                self._spans.add(name, above, arrived_ns, time.time_ns(), facts, error=code, server=True)
                return
            answer = getattr(reply, kind)
            for field in _FACTS[kind]:
                facts[f"outrider.{field}"] = getattr(answer, field)
            took_us = {phase: getattr(answer, field) for phase, field in _PHASES[kind]}
            end_ns = arrived_ns + 1000 * sum(took_us.values())
            own = self._spans.add(name, above, arrived_ns, end_ns, facts, server=True)
            if own is not None:
                self._add_phases(own, arrived_ns, took_us)

        return told

    def _add_phases(self, whole: TraceParent, start_ns: int, took_us: dict[str, int]) -> None:
        """One after the other."""
        for name, us in took_us.items():
            end_ns = start_ns + 1000 * us
            if us:
                self._spans.add(name, whole, start_ns, end_ns, {})
            start_ns = end_ns
