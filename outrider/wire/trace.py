"""Spans for OpenTelemetry, where `trace_endpoint` asks for them: W3C context, sampling, and a queue to a collector.

A span is made when its end is known, from times that were noted on the way: a round pays for nothing else. Sending is
a thread's business, which drops and counts what a collector does not take.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import deque
from dataclasses import dataclass

import grpc
from prometheus_client import CollectorRegistry, Counter

from outrider.wire.log import get_logger
from outrider.wire.otlp import Attributes, Exporter, Span

log = get_logger(__name__)

MAX_QUEUED = 8192
"""Spans that wait to be sent; what is over is dropped."""
MAX_BATCH = 512
DELAY_S = 1.0
"""Longest time that a span waits for others."""
SEND_TIMEOUT_S = 5.0
CLOSE_S = 1.0
"""How long the last spans may take at the end of a process."""
COMPLAIN_S = 60.0
"""Between two lines in the log about a collector that is away."""

_HEADER = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceParent:
    """W3C `traceparent`: the span that others are children of."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    @property
    def trace_hex(self) -> str:
        """As logs and users write it."""
        return f"{self.trace_id:032x}"

    @classmethod
    def parse(cls, text: str | None) -> TraceParent | None:
        """None for what is absent or not valid: as if there were no caller."""
        found = _HEADER.fullmatch(text or "")
        if found is None or (found[1] == "00" and found[5]):
            return None
        return cls(int(found[2], 16), int(found[3], 16), bool(int(found[4], 16) & 1))


class Spans:
    """Takes finished spans and sends them in batches. `add` never blocks; any thread may call it."""

    def __init__(
        self, endpoint: str, service: str, registry: CollectorRegistry | None = None, sample_ratio: float = 1.0
    ) -> None:
        """endpoint: as of `Exporter`; service: "gateway", "draft" or "target". Raises ConfigError."""
        self._endpoint = endpoint
        self._exporter = Exporter(endpoint, f"outrider-{service}")
        self._sample_ratio = sample_ratio
        self._queue: deque[Span] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._complained_s = -COMPLAIN_S
        counter = Counter("outrider_trace_spans", "Spans, by what became of them.", ["outcome"], registry=registry)
        self._sent, self._dropped = counter.labels(outcome="sent"), counter.labels(outcome="dropped")
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def begin(self, caller: TraceParent | None) -> TraceParent | None:
        """A new span's place in a trace: below the caller's, or at the root of a new one. None = not to be traced."""
        if caller is not None:
            return TraceParent(caller.trace_id, new_id(64), True) if caller.sampled else None
        return TraceParent(new_id(128), new_id(64), True) if random.random() < self._sample_ratio else None

    def add(
        self,
        name: str,
        trace_id: int,
        span_id: int,
        parent_id: int | None,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        *,
        error: str | None = None,
        server: bool = False,
    ) -> None:
        """A span that has ended. Times are of the wall clock; `error`: what went wrong, a class or code and no more."""
        if len(self._queue) >= MAX_QUEUED:
            self._dropped.inc()
            return
        self._queue.append(Span(name, trace_id, span_id, parent_id, start_ns, end_ns, attributes, error, server))
        if len(self._queue) >= MAX_BATCH and not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Send what is left, for at most a second. Idempotent."""
        self._closing = True
        self._wake.set()
        self._thread.join(0.8 * CLOSE_S)
        if self._thread.is_alive():
            self._exporter.close()  # ends a call that is under way
            self._thread.join(0.2 * CLOSE_S)

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(DELAY_S)
            self._wake.clear()
            while self._queue:
                self._send([self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))])
        self._exporter.close()

    def _send(self, batch: list[Span]) -> None:
        try:
            num_rejected = min(self._exporter.send(batch, SEND_TIMEOUT_S), len(batch))
        except (grpc.RpcError, ValueError) as error:
            self._lost(len(batch), error.code().name if isinstance(error, grpc.Call) else "closed")
            return
        self._sent.inc(len(batch) - num_rejected)
        if num_rejected:
            self._lost(num_rejected, "rejected")

    def _lost(self, num_spans: int, why: str) -> None:
        self._dropped.inc(num_spans)
        now = time.monotonic()
        if now >= self._complained_s + COMPLAIN_S:
            self._complained_s = now
            log.warning("%d spans are lost: the collector at %s does not take them: %s", num_spans, self._endpoint, why)


def open_spans(
    endpoint: str | None, service: str, registry: CollectorRegistry, sample_ratio: float = 1.0
) -> Spans | None:
    """None without an endpoint. Raises ConfigError."""
    return None if endpoint is None else Spans(endpoint, service, registry, sample_ratio)


def new_id(bits: int) -> int:
    """Random, never 0."""
    return random.getrandbits(bits) or 1
