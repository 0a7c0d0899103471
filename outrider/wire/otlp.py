"""Spans as OpenTelemetry's protocol has them, sent over gRPC. The only file that imports opentelemetry, and late.

Its messages are filled in here: the SDK takes several times as long for the same, and while it does, threads that wait
for the interpreter, the engine's among them, wait with it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import grpc

from outrider.wire.address import join_host_port
from outrider.wire.errors import ConfigError

DEFAULT_PORT = 4317
SAMPLED = 1
Attributes = Mapping[str, str | int]


class Span(NamedTuple):
    """One that has ended. Times are nanoseconds of the wall clock since 1970."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start_ns: int
    end_ns: int
    attributes: Attributes
    error: str | None
    """What went wrong; None for nothing."""
    server: bool
    """Its parent is in another process."""


class Exporter:
    """A connection to one collector."""

    def __init__(self, endpoint: str, service: str) -> None:
        """endpoint: of OTLP over gRPC, such as http://collector:4317. Raises ConfigError.

        From the environment, as OpenTelemetry defines them: OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE
        (for https), OTEL_RESOURCE_ATTRIBUTES.
        """
        try:
            from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
            from opentelemetry.proto.trace.v1 import trace_pb2
        except ImportError:
            raise ConfigError(
                f"trace_endpoint is {endpoint!r} and OpenTelemetry is not installed; pip install 'outrider[trace]', "
                "or leave trace_endpoint out",
                param="trace_endpoint",
            ) from None
        self._pb: Any = trace_pb2
        self._request: Any = trace_service_pb2.ExportTraceServiceRequest
        self._channel = _dial(endpoint)
        stub: Any = trace_service_pb2_grpc.TraceServiceStub
        self._export = stub(self._channel).Export
        self._headers = tuple((name.lower(), value) for name, value in _pairs("OTEL_EXPORTER_OTLP_HEADERS").items())
        about = {"service.name": service, "service.instance.id": f"{socket.gethostname()}-{os.getpid()}"}
        self._resource = {"attributes": _attributes(about | _pairs("OTEL_RESOURCE_ATTRIBUTES"))}

    def message(self, spans: Sequence[Span]) -> Any:
        """An ExportTraceServiceRequest."""
        scope = {"scope": {"name": "outrider"}, "spans": [self._span(span) for span in spans]}
        return self._request(resource_spans=[{"resource": self._resource, "scope_spans": [scope]}])

    def send(self, spans: Sequence[Span], timeout_s: float) -> int:
        """Returns how many the collector rejected. Raises grpc.RpcError, or ValueError once closed."""
        reply = self._export(self.message(spans), timeout=timeout_s, metadata=self._headers)
        return int(reply.partial_success.rejected_spans)

    def close(self) -> None:
        """From any thread; a call that is under way ends."""
        self._channel.close()

    def _span(self, span: Span) -> Any:
        pb = self._pb
        return pb.Span(
            trace_id=span.trace_id.to_bytes(16, "big"),
            span_id=span.span_id.to_bytes(8, "big"),
            parent_span_id=b"" if span.parent_id is None else span.parent_id.to_bytes(8, "big"),
            flags=SAMPLED,
            name=span.name,
            kind=pb.Span.SPAN_KIND_SERVER if span.server else pb.Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=span.start_ns,
            end_time_unix_nano=max(span.start_ns, span.end_ns),
            attributes=_attributes(span.attributes),
            status=None if span.error is None else {"code": pb.Status.STATUS_CODE_ERROR, "message": span.error},
        )


def _dial(endpoint: str) -> grpc.Channel:
    parts = urlsplit(endpoint)
    try:
        address = join_host_port(parts.hostname or "", parts.port or DEFAULT_PORT)
    except ValueError:
        address = ""
    if parts.scheme not in ("http", "https") or not parts.hostname or not address:
        raise ConfigError(
            f"trace_endpoint is {endpoint!r}, must look like http://collector:4317", param="trace_endpoint"
        )
    if parts.scheme == "http":
        return grpc.insecure_channel(address)
    path = os.environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE")
    try:
        roots = None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_CERTIFICATE: cannot read {path}: {error.strerror}") from None
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(roots))


def _pairs(variable: str) -> dict[str, str]:
    """Of an environment variable of OpenTelemetry's: name=value, with commas between, percent-encoded."""
    pairs = (part.partition("=") for part in os.environ.get(variable, "").split(",") if "=" in part)
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs}


def _attributes(values: Attributes) -> list[dict[str, Any]]:
    return [
        {"key": name, "value": {"string_value" if isinstance(value, str) else "int_value": value}}
        for name, value in values.items()
    ]
