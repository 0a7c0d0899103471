"""A collector of OpenTelemetry spans and metrics on a port of its own, for tests."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

Attributes = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class Span:
    service: str
    """outrider-gateway, outrider-draft or outrider-target."""
    name: str
    trace_id: str
    """Hex, as the ids below."""
    span_id: str
    parent_id: str
    """Empty for none."""
    start_ns: int
    end_ns: int
    attributes: Attributes
    is_error: bool


@dataclass(frozen=True)
class Point:
    """The newest of a histogram with these attributes."""

    service: str
    unit: str
    count: int
    sum: float
    bounds: tuple[float, ...]
    attributes: Attributes


class MetricsCollector(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self) -> None:
        self.points: dict[tuple[str, frozenset[tuple[str, Any]]], Point] = {}
        """By name and attributes."""
        self.raw: list[bytes] = []
        """The messages as they came."""

    def Export(self, request: Any, context: Any) -> Any:
        self.raw.append(request.SerializeToString())
        for of_resource in request.resource_metrics:
            service = str(_values(of_resource.resource.attributes)["service.name"])
            for metric in (metric for scope in of_resource.scope_metrics for metric in scope.metrics):
                for each in metric.histogram.data_points:
                    found = _values(each.attributes)
                    point = Point(service, metric.unit, each.count, each.sum, tuple(each.explicit_bounds), found)
                    self.points[metric.name, frozenset(found.items())] = point
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def named(self, name: str) -> list[Point]:
        return [point for (each, _), point in list(self.points.items()) if each == name]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw: list[bytes] = []
        """The messages as they came."""
        self.metadata: list[dict[str, str | bytes]] = []
        """That came with them."""
        self.metrics = MetricsCollector()
        self.num_asked = 0
        self.held = threading.Lock()
        """Whoever holds it keeps the collector from answering."""
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        self.num_asked += 1
        with self.held, self._lock:
            self.metadata.append(dict(context.invocation_metadata()))
            self.raw.append(request.SerializeToString())
            for of_resource in request.resource_spans:
                service = str(_values(of_resource.resource.attributes)["service.name"])
                self.spans += [_span(service, each) for scope in of_resource.scope_spans for each in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, enough: Callable[[list[Span]], bool], timeout_s: float = 30.0) -> list[Span]:
        """The spans, once there are enough."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with self._lock:
                found = list(self.spans)
            if enough(found):
                return found
            time.sleep(0.05)
        raise AssertionError(f"{len(found)} spans in {timeout_s} s: {sorted({(s.service, s.name) for s in found})}")


@contextmanager
def collecting() -> Iterator[tuple[Collector, str, grpc.Server]]:
    """A running collector, its address as of `--trace-endpoint`, and its server, which may be stopped."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector.metrics, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}", server
    finally:
        server.stop(None).wait()


def _span(service: str, span: Any) -> Span:
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        span.status.code == 2,
    )


def _values(attributes: Any) -> Attributes:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
