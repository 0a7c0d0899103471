"""Spans: W3C context, sampling, and a collector that is away. What is sent is looked at end to end."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from outrider.wire import trace
from outrider.wire.errors import ConfigError
from outrider.wire.otlp import Exporter, Span
from outrider.wire.trace import Spans, TraceParent, open_spans

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def spans(registry: CollectorRegistry) -> Iterator[Spans]:
    made = Spans(NOWHERE, "gateway", registry)
    yield made
    made.close()


def test_a_header_is_read_and_written() -> None:
    parent = TraceParent.parse(HEADER)
    assert parent == TraceParent(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)
    assert str(parent) == HEADER
    assert parent is not None
    assert parent.trace_hex == "0af7651916cd43dd8448eb211c80319c"
    not_sampled = TraceParent.parse(HEADER[:-2] + "00")
    assert not_sampled is not None
    assert not not_sampled.sampled
    assert TraceParent.parse("cc" + HEADER[2:] + "-what-comes-later") == parent  # a later version says more


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "00",
        HEADER.upper(),
        HEADER + "-more",
        HEADER + "\n",
        "ff" + HEADER[2:],
        "00-" + "0" * 32 + HEADER[35:],
        HEADER[:36] + "0" * 16 + "-01",
        HEADER[:-1],
    ],
)
def test_what_is_no_header_is_as_none(text: str | None) -> None:
    assert TraceParent.parse(text) is None


def test_sampling_follows_the_caller_and_else_the_ratio(spans: Spans) -> None:
    caller = TraceParent.parse(HEADER)
    assert caller is not None
    place = spans.begin(caller)
    assert place is not None
    assert place.trace_id == caller.trace_id
    assert place.span_id != caller.span_id
    assert spans.begin(TraceParent(1, 2, False)) is None
    assert spans.begin(None) is not None
    never = Spans(NOWHERE, "gateway", sample_ratio=0.0)
    assert never.begin(None) is None
    assert never.begin(caller) is not None
    never.close()


def test_more_spans_than_the_queue_holds_are_dropped_and_counted(
    spans: Spans, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MAX_QUEUED", 3)
    place = spans.begin(None)
    assert place is not None
    for _ in range(5):
        spans.add("round", place.trace_id, place.span_id, None, 1, 2, {})
    assert registry.get_sample_value("outrider_trace_spans_total", {"outcome": "dropped"}) == 2


def test_without_a_collector_spans_are_dropped_and_the_end_takes_a_second_at_most(
    spans: Spans, registry: CollectorRegistry
) -> None:
    place = spans.begin(None)
    assert place is not None
    spans.add("round", place.trace_id, place.span_id, None, 1, 2, {"k": 5})
    started = time.monotonic()
    spans.close()
    assert time.monotonic() - started < trace.CLOSE_S + 1.0
    assert registry.get_sample_value("outrider_trace_spans_total", {"outcome": "dropped"}) == 1


@pytest.mark.parametrize(
    "endpoint", ["collector:4317", "grpc://collector:4317", "http://", "collector", "http://collector:x"]
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="must look like http://collector:4317"):
        Spans(endpoint, "gateway")


def test_headers_and_resource_are_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=a%20b, service.name = mine,broken")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Api-Key=secret,x=1")
    exporter = Exporter(NOWHERE, "outrider-gateway")
    span = Span("verify", 1, 2, 3, 20, 10, {"k": 5, "encoding": "ids"}, "BEHIND", True)
    (resource,) = exporter.message([span]).resource_spans
    attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert attributes["deployment.environment"] == "a b"
    assert attributes["service.name"] == "mine"
    assert attributes["service.instance.id"]
    (sent,) = resource.scope_spans[0].spans
    assert (sent.name, sent.trace_id.hex(), sent.span_id.hex()) == ("verify", "0" * 31 + "1", "0" * 15 + "2")
    assert sent.parent_span_id.hex() == "0" * 15 + "3"
    assert (sent.start_time_unix_nano, sent.end_time_unix_nano) == (20, 20)  # a clock that was set back
    assert {each.key: each.value.int_value or each.value.string_value for each in sent.attributes} == span.attributes
    assert (sent.status.code, sent.status.message) == (2, "BEHIND")
    assert exporter._headers == (("api-key", "secret"), ("x", "1"))
    exporter.close()


def test_an_encrypted_collector_needs_a_certificate_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_CERTIFICATE: cannot read"):
        Exporter("https://collector", "outrider-gateway")


def test_without_the_libraries_the_error_says_what_to_install(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without)
    assert open_spans(None, "gateway", registry) is None
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[trace\]'"):
        open_spans(NOWHERE, "gateway", registry)
