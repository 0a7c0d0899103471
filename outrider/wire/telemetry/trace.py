"""OpenTelemetry spans, made if `trace_endpoint` is set. Only this file and `otel_metrics` import OpenTelemetry's SDK,
and only when `Spans` or `ServerMetrics` is created.

Most spans are made when they have ended, from recorded times. Only the span of a request begins at its start, because
other spans are its children. A thread of the SDK encodes and sends spans.
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
"""Default of OTEL_BSP_MAX_QUEUE_SIZE: maximum number of spans that wait to be sent. Spans beyond it are dropped."""
CLOSE_S = 1.0
"""Maximum seconds that a process waits at its end until its last spans are sent."""
COMPLAIN_S = 60.0
"""Minimum seconds between two log lines about a trace or metrics collector that does not reply."""
Attributes = Mapping[str, str | int]

_HEADER = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def round_span_id(ticket: int, committed_len: int) -> int:
    """Return the span id of a round. Gateway and workers compute the same id, so that none has to send it.

    ticket: number of the lease. committed_len: number of committed tokens before the round.
    """
    return (ticket ^ (committed_len * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF or 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    """Ids of a span that is the parent of others, as in the W3C header `traceparent`."""

    trace_id: int
    span_id: int
    sampled: bool
    """Whether the trace is sampled. The spans of a trace that is not sampled are not sent."""

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    @property
    def trace_hex(self) -> str:
        """Trace id as 32 hexadecimal digits."""
        return f"{self.trace_id:032x}"

    @classmethod
    def parse(cls, text: str | None) -> TraceParent | None:
        """Parse the value of a header `traceparent`. Returns None if it is absent (None) or invalid."""
        found = _HEADER.fullmatch(text or "")
        if found is None or (found[1] == "00" and found[5]):
            return None
        return cls(int(found[2], 16), int(found[3], 16), bool(int(found[4], 16) & 1))


class Spans:
    """Makes the spans of one process and sends them in batches. Only `close` blocks; any thread may call any method."""

    def __init__(self, endpoint: str, service: str, registry: CollectorRegistry | None = None) -> None:
        """Start OpenTelemetry's SDK, which is further configured by environment variables (OTEL_*).

        endpoint: URL of the OTLP endpoint (gRPC), such as http://collector:4317. service: name of this process:
        "gateway", "draft" or "target". registry: where to register the series outrider_trace_spans_total; None = not.
        Raises ConfigError if the endpoint cannot be used or OpenTelemetry is not installed.
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
        sent = counter.labels(outcome="sent")
        self._dropped = counter.labels(outcome="dropped")
        self._lock = threading.Lock()
        self._num_ended = 0
        try:
            self._max_queued = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", MAX_QUEUED))
            self._exporter = _Counted(OTLPSpanExporter(endpoint=endpoint), sent, self._dropped)
            processor = export.BatchSpanProcessor(self._exporter, self._max_queued)  # type: ignore[arg-type]
            self._provider: Any = sdk.TracerProvider(
                resource=resources.Resource.create(resource_attributes(service)).merge(
                    resources.OTELResourceDetector().detect()
                ),
                shutdown_on_exit=False,
                id_generator=self._ids,  # type: ignore[arg-type]
            )
        except Exception as error:  # the SDK raises many types
            raise ConfigError(f"OpenTelemetry refuses what the environment (OTEL_*) says: {error}") from None
        self._provider.add_span_processor(processor)
        self._tracer: Any = self._provider.get_tracer("outrider")
        limit_exporter_log()

    def begin(
        self,
        name: str,
        parent: TraceParent | None,
        start_ns: int,
        *,
        span_id: int | None = None,
        server: bool = False,
    ) -> OpenSpan | None:
        """Begin a span and return it. None = it is not sampled. The parent decides whether it is sampled, or
        OTEL_TRACES_SAMPLER if there is no parent.

        start_ns: wall-clock time in nanoseconds. span_id: id of the span, for spans whose id another process computes
        too; None = a random id. server: whether the parent is a span of another process.
        """
        api = self._api
        context = self._nowhere
        if parent is not None:
            flags = api.TraceFlags(int(parent.sampled))
            parent_context = api.SpanContext(parent.trace_id, parent.span_id, server, flags)
            context = api.set_span_in_context(api.NonRecordingSpan(parent_context), context)
        self._ids.next_id = span_id
        kind = api.SpanKind.SERVER if server else api.SpanKind.INTERNAL
        span = self._tracer.start_span(name, context, kind, start_time=start_ns)
        if not span.is_recording():
            return None
        return OpenSpan(self, span, start_ns)

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
        """Add a span that has already ended. Return its ids, so that it can be the parent of other spans. None = it was
        not sampled, or was dropped.

        start_ns, end_ns: wall-clock times in nanoseconds. error: class or code of the error that ended it; None = no
        error. span_id: id of the span; None = a random id. server: whether the parent is a span of another process.
        """
        if self._is_full():
            return None
        span = self.begin(name, parent, start_ns, span_id=span_id, server=server)
        if span is None:
            return None
        span.end(end_ns, attributes, error)
        return span.context

    def close(self) -> None:
        """Send the spans that are not sent yet, waiting at most CLOSE_S seconds. Idempotent."""
        shut_down(self._provider, self._exporter)

    def _is_full(self) -> bool:
        # Counts a span that must be dropped: the SDK would drop an older one without counting it.
        if self._num_ended - self._exporter.num_exported < self._max_queued:
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
    """A span that has begun and has not ended yet."""

    __slots__ = ("_span", "_spans", "_start_ns", "context")

    def __init__(self, spans: Spans, span: Any, start_ns: int) -> None:
        self._spans = spans
        self._span = span
        self._start_ns = start_ns
        own = span.get_span_context()
        self.context = TraceParent(own.trace_id, own.span_id, True)
        """Ids of this span, to be given to its children as their parent."""

    def end(self, end_ns: int, attributes: Attributes, error: str | None = None, name: str | None = None) -> None:
        """End the span. Call it once. end_ns: wall-clock time in nanoseconds. error: class or code of the error that
        ended it, never the error's message; None = no error. name: new name of the span; None = it keeps its name.
        """
        if name is not None:
            self._span.update_name(name)
        self._spans._end(self._span, max(self._start_ns, end_ns), attributes, error)


def open_spans(endpoint: str | None, service: str, registry: CollectorRegistry) -> Spans | None:
    """Return a new `Spans`. None = tracing is off, because `endpoint` is None.

    service: name of this process. registry: where the counter of spans is registered. Raises ConfigError if the
    endpoint cannot be used or OpenTelemetry is not installed.
    """
    if endpoint is None:
        return None
    return Spans(endpoint, service, registry)


def resource_attributes(service: str) -> dict[str, str]:
    """Return the attributes of this process's OpenTelemetry resource: service.name and service.instance.id (host name
    and pid). service: "gateway", "draft" or "target".
    """
    return {"service.name": f"outrider-{service}", "service.instance.id": f"{socket.gethostname()}-{os.getpid()}"}


def not_installed(endpoint: str) -> ConfigError:
    """Return the error to raise if `trace_endpoint` is set but OpenTelemetry is not installed."""
    return ConfigError(
        f"trace_endpoint is {endpoint!r} and OpenTelemetry is not installed; pip install 'outrider[trace]', "
        "or leave trace_endpoint out",
        param="trace_endpoint",
    )


def shut_down(provider: Any, exporter: Any) -> None:
    """Send what is queued at an OpenTelemetry provider (of traces or metrics), waiting at most CLOSE_S seconds, and end
    the provider.
    """
    timer = threading.Timer(0.8 * CLOSE_S, exporter.shutdown)  # ends a call that is in progress
    timer.daemon = True
    timer.start()
    provider.shutdown()
    timer.cancel()


def limit_exporter_log() -> None:
    """Limit the log lines of OpenTelemetry's SDK about a collector that does not reply: one in COMPLAIN_S seconds."""
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").addFilter(_seldom)


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError unless the endpoint is an http or https URL with a host."""
    parts = urlsplit(endpoint)
    try:
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"trace_endpoint is {endpoint!r}, must look like http://collector:4317", param="trace_endpoint"
        )


class _Ids(threading.local):
    # OpenTelemetry's IdGenerator: random ids, or the one that `begin` was given.

    def __init__(self, random_ids: Any) -> None:
        self._random = random_ids
        self.next_id: int | None = None
        """Id for the next span that this thread makes; None = a random id."""

    def generate_span_id(self) -> int:
        span_id = self.next_id
        self.next_id = None
        if span_id is None:
            return int(self._random.generate_span_id())
        return span_id

    def generate_trace_id(self) -> int:
        return int(self._random.generate_trace_id())

    def is_trace_id_random(self) -> bool:
        return True


class _Counted:
    # A SpanExporter of OpenTelemetry that counts the spans that were sent and dropped.

    def __init__(self, exporter: Any, sent: Counter, dropped: Counter) -> None:
        self._exporter = exporter
        self._sent = sent
        self._dropped = dropped
        self.num_exported = 0
        """Number of spans that were taken from the SDK's queue so far."""

    def export(self, spans: Sequence[Any]) -> Any:
        self.num_exported += len(spans)
        outcome = self._dropped
        try:
            result = self._exporter.export(spans)
            if result.name == "SUCCESS":
                outcome = self._sent
        finally:
            outcome.inc(len(spans))
        return result

    def shutdown(self) -> None:
        # Ends the call in progress and makes later ones fail at once. Any thread may call.
        self._exporter.shutdown()


class _Seldom(logging.Filter):
    # Passes a warning or error once in COMPLAIN_S.

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
"""Filter on the logger of OpenTelemetry's exporter, which would otherwise log a line for every attempt."""
