"""Spans: W3C context, sampling, and what a collector gets."""

import builtins
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from outrider.wire.errors import ConfigError
from outrider.wire.telemetry.trace import Spans, TraceParent, open_spans
from tests.otlp_collector import collecting

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


@pytest.mark.parametrize(
    "text",
    [
        None,
        "00",
        HEADER.upper(),
        HEADER + "-more",
        "ff" + HEADER[2:],
        "00-" + "0" * 32 + HEADER[35:],
        HEADER[:36] + "0" * 16 + "-01",
    ],
)
def test_what_is_no_header_is_as_none(text: str | None) -> None:
    assert TraceParent.parse(text) is None


def test_sampling_follows_the_caller_and_else_the_environment(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = TraceParent.parse(HEADER)
    assert caller is not None
    begun = spans.begin("request", caller, 1)
    assert begun is not None
    assert begun.context.trace_id == caller.trace_id
    assert begun.context.span_id != caller.span_id
    assert spans.begin("request", TraceParent(1, 2, False), 1) is None
    assert spans.begin("request", None, 1) is not None
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    never = Spans(NOWHERE, "gateway")
    assert never.begin("request", None, 1) is None
    assert never.begin("request", caller, 1) is not None
    never.close()


def test_a_span_arrives_as_it_was_recorded(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=a%20b,service.name=mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    parent = TraceParent.parse(HEADER)
    assert parent is not None
    with collecting() as (collector, endpoint, _):
        spans = Spans(endpoint, "target", registry)
        request = spans.begin("request", parent, 5, server=True)
        assert request is not None
        facts = {"k": 5, "encoding": "ids"}
        place = spans.add("verify", request.context, 20, 10, facts, error="BEHIND", span_id=77)
        assert place == TraceParent(parent.trace_id, 77, True)
        request.end(30, {})
        spans.close()
        spans.close()
        spans.add("late", parent, 1, 2, {})
        first, second = collector.spans
    assert (first.name, first.trace_id, first.span_id) == ("verify", parent.trace_hex, "0" * 14 + "4d")
    assert first.parent_id == second.span_id
    assert (first.start_ns, first.end_ns) == (20, 20)  # a clock that was set back
    assert (first.attributes, first.is_error) == (facts, True)
    assert (second.name, second.parent_id, second.is_error) == ("request", "b7ad6b7169203331", False)
    assert (second.start_ns, second.end_ns) == (5, 30)
    assert second.service == "mine"
    assert collector.metadata[0]["api-key"] == "secret"
    (message,) = collector.raw
    assert all(told in message for told in (b"deployment.environment", b"a b", b"service.instance.id", b"BEHIND"))
    assert registry.get_sample_value("outrider_trace_spans_total", {"outcome": "sent"}) == 2


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_BSP_MAX_QUEUE_SIZE"])
def test_an_environment_that_is_wrong_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "soon")
    with pytest.raises(ConfigError, match=r"OTEL_\*.*'soon'"):
        Spans(NOWHERE, "gateway")


def test_without_the_libraries_the_error_names_the_package(
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
