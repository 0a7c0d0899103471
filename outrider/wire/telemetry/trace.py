"""Spans by OpenTelemetry's SDK, where `trace_endpoint` asks for them. This file and `otel_metrics` alone import it, and
late.

A span is made when its end is known, from times that were noted on the way; a request's own is begun before, since what
is done for it is below it. A thread of the SDK encodes and sends the spans.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter

from outrider.wire.errors import ConfigError

MAX_QUEUED = 2048
"""Spans that wait to be sent, unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise; any more are dropped."""
CLOSE_S = 1.0
"""Seconds that the last spans may take at the end of a process."""
COMPLAIN_S = 60.0
"""Seconds between two lines in the log about a collector that is away."""
Attributes = Mapping[str, str | int]

_HEADER = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def round_span_id(ticket: int, committed_len: int) -> int:
    """Return the id of the span of the round that began at committed_len under a lease."""
    return (ticket ^ (committed_len * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF or 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    """W3C `traceparent`: names the span that others are children of."""

    trace_id: int
    span_id: int
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    @property
    def trace_hex(self) -> str:
        """The trace id as logs and users write it."""
        return f"{self.trace_id:032x}"

    @classmethod
    def parse(cls, text: str | None) -> TraceParent | None:
        """Parse a header. Returns None for an absent or invalid one, as if there were no caller."""
        found = _HEADER.fullmatch(text or "")
        if found is None or (found[1] == "00" and found[5]):
            return None
        return cls(int(found[2], 16), int(found[3], 16), bool(int(found[4], 16) & 1))


class Spans:
    """Makes spans and sends them in batches. Nothing blocks but `close`; any thread may call."""

    def __init__(self, endpoint: str, service: str, registry: CollectorRegistry | None = None) -> None:
        """Prepare to send; OpenTelemetry's environment variables (OTEL_*) configure the rest. Raises ConfigError.

        endpoint: of OTLP over gRPC, such as http://collector:4317. service: "gateway", "draft" or "target".
        """
        check_endpoint(endpoint)
        try:
            from opentelemetry import context, trace
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk import resources
            from opentelemetry.sdk import trace as sdk
            from opentelemetry.sdk.trace import export, id_generator
        except ImportError:
            raise not_installed(endpoint) from None
        self._api: Any = trace
        self._nowhere = context.Context()
        self._ids = _Ids(id_generator.RandomIdGenerator())
        counter = Counter("outrider_trace_spans", "Spans, by what became of them.", ["outcome"], registry=registry)
        sent, self._dropped = counter.labels(outcome="sent"), counter.labels(outcome="dropped")
        self._lock = threading.Lock()
        self._num_ended = 0
        try:
            self._max_queued = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", MAX_QUEUED))
            self._exporter = _Counted(OTLPSpanExporter(endpoint=endpoint), sent, self._dropped)
            processor = export.BatchSpanProcessor(self._exporter, self._max_queued)  # type: ignore[arg-type]
            self._provider: Any = sdk.TracerProvider(
                resource=resources.Resource.create(about(service)).merge(resources.OTELResourceDetector().detect()),
                shutdown_on_exit=False,
                id_generator=self._ids,  # type: ignore[arg-type]
            )
        except Exception as error:  # of many types
            raise ConfigError(f"OpenTelemetry refuses what the environment (OTEL_*) says: {error}") from None
        self._provider.add_span_processor(processor)
        self._tracer: Any = self._provider.get_tracer("outrider")
        complain_seldom()

    def begin(
        self,
        name: str,
        parent: TraceParent | None,
        start_ns: int,
        *,
        span_id: int | None = None,
        server: bool = False,
    ) -> OpenSpan | None:
        """Begin a span, or return None when it is not traced: as its parent, or by OTEL_TRACES_SAMPLER at a root.

        start_ns: of the wall clock. span_id: set where others know it already. server: the parent is another process's.
        """
        api = self._api
        above = self._nowhere
        if parent is not None:
            flags = api.TraceFlags(int(parent.sampled))
            place = api.SpanContext(parent.trace_id, parent.span_id, server, flags)
            above = api.set_span_in_context(api.NonRecordingSpan(place), above)
        self._ids.known = span_id
        kind = api.SpanKind.SERVER if server else api.SpanKind.INTERNAL
        span = self._tracer.start_span(name, above, kind, start_time=start_ns)
        return OpenSpan(self, span, start_ns) if span.is_recording() else None

    def add(
        self,
        name: str,
        parent: TraceParent,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        *,
        error: str | None = None,
        span_id: int | None = None,
        server: bool = False,
    ) -> TraceParent | None:
        """Add a span that has ended, as `begin` and `OpenSpan.end` do. Returns its place; None when not made."""
        if self._is_full():
            return None
        span = self.begin(name, parent, start_ns, span_id=span_id, server=server)
        if span is None:
            return None
        span.end(end_ns, attributes, error)
        return span.place

    def close(self) -> None:
        """Send the remaining spans, for at most CLOSE_S. Idempotent."""
        shut_down(self._provider, self._exporter)

    def _is_full(self) -> bool:
        """Return whether another span must be dropped, and count it then: the SDK drops older ones and counts none."""
        if self._num_ended - self._exporter.num_taken < self._max_queued:
            return False
        self._dropped.inc()
        return True

    def _end(self, span: Any, end_ns: int, attributes: Attributes, error: str | None) -> None:
        if self._is_full():
            return
        with self._lock:
            self._num_ended += 1
        span.set_attributes(attributes)
        if error is not None:
            span.set_status(self._api.StatusCode.ERROR, error)
        span.end(end_ns)


class OpenSpan:
    """A span that has begun."""

    __slots__ = ("_span", "_spans", "_start_ns", "place")

    def __init__(self, spans: Spans, span: Any, start_ns: int) -> None:
        self._spans = spans
        self._span = span
        self._start_ns = start_ns
        own = span.get_span_context()
        self.place = TraceParent(own.trace_id, own.span_id, True)
        """Parent of the spans of what is done for this one."""

    def end(self, end_ns: int, attributes: Attributes, error: str | None = None, name: str | None = None) -> None:
        """End the span, once. end_ns: of the wall clock. error: what went wrong, a class or code and no more.

        name: what the span is called, where that was not known when it began.
        """
        if name is not None:
            self._span.update_name(name)
        self._spans._end(self._span, max(self._start_ns, end_ns), attributes, error)


def open_spans(endpoint: str | None, service: str, registry: CollectorRegistry) -> Spans | None:
    """Return the process's spans, or None without an endpoint. Raises ConfigError."""
    return None if endpoint is None else Spans(endpoint, service, registry)


def about(service: str) -> dict[str, str]:
    """Return what OpenTelemetry calls the resource: who says all this."""
    return {"service.name": f"outrider-{service}", "service.instance.id": f"{socket.gethostname()}-{os.getpid()}"}


def not_installed(endpoint: str) -> ConfigError:
    return ConfigError(
        f"trace_endpoint is {endpoint!r} and OpenTelemetry is not installed; pip install 'outrider[trace]', "
        "or leave trace_endpoint out",
        param="trace_endpoint",
    )


def shut_down(provider: Any, exporter: Any) -> None:
    """Send what a provider has left, for at most CLOSE_S."""
    give_up = threading.Timer(0.8 * CLOSE_S, exporter.shutdown)  # ends a call that is under way
    give_up.daemon = True
    give_up.start()
    provider.shutdown()
    give_up.cancel()


def complain_seldom() -> None:
    """Let what the SDK has to say of a collector that is away be in the log once a minute."""
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").addFilter(_seldom)


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError."""
    parts = urlsplit(endpoint)
    try:
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        is_one = False
    if not is_one:
        raise ConfigError(
            f"trace_endpoint is {endpoint!r}, must look like http://collector:4317", param="trace_endpoint"
        )


class _Ids(threading.local):
    """OpenTelemetry's IdGenerator: random, except for a span whose id is known before it is made."""

    def __init__(self, random_ids: Any) -> None:
        self._random = random_ids
        self.known: int | None = None
        """Id of this thread's next span."""

    def generate_span_id(self) -> int:
        known, self.known = self.known, None
        return int(self._random.generate_span_id()) if known is None else known

    def generate_trace_id(self) -> int:
        return int(self._random.generate_trace_id())

    def is_trace_id_random(self) -> bool:
        return True


class _Counted:
    """OpenTelemetry's SpanExporter, which counts the spans that were sent and dropped."""

    def __init__(self, exporter: Any, sent: Counter, dropped: Counter) -> None:
        self._exporter = exporter
        self._sent = sent
        self._dropped = dropped
        self.num_taken = 0
        """Spans taken from the queue so far."""

    def export(self, spans: Sequence[Any]) -> Any:
        self.num_taken += len(spans)
        outcome = self._dropped
        try:
            result = self._exporter.export(spans)
            if result.name == "SUCCESS":
                outcome = self._sent
        finally:
            outcome.inc(len(spans))
        return result

    def shutdown(self) -> None:
        """End the call that is under way and make later ones fail at once. Any thread may call."""
        self._exporter.shutdown()


class _Seldom(logging.Filter):
    """Lets a warning or error through once in `COMPLAIN_S`."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s = -COMPLAIN_S

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now = time.monotonic()
        if now < self._last_s + COMPLAIN_S:
            return False
        self._last_s = now
        return True


_seldom = _Seldom()
"""Filter of the exporter's logger, which would have a line for every attempt."""
