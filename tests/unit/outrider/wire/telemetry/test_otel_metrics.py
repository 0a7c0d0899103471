"""What a collector of OpenTelemetry gets of requests' times."""

import pytest

from outrider.wire.errors import ConfigError
from outrider.wire.telemetry.otel_metrics import open_metrics
from tests.otlp_collector import collecting


def test_the_last_values_are_sent_when_it_is_closed() -> None:
    with collecting() as (collector, endpoint, _):
        metrics = open_metrics(endpoint, "gateway")
        assert metrics is not None
        metrics.note_request("chat", "m", 0.5, None)
        metrics.note_request("chat", "m", 1.5, None)
        metrics.note_request("chat", None, 0.25, "Overloaded")
        metrics.note_answer("chat", "m", 0.125, None)
        metrics.close()
        metrics.close()
        good, bad = sorted(collector.metrics.named("gen_ai.server.request.duration"), key=lambda one: -one.count)
        (first,) = collector.metrics.named("gen_ai.server.time_to_first_token")
        assert not collector.metrics.named("gen_ai.server.time_per_output_token"), "there was one token"
    assert (good.unit, good.count, good.sum) == ("s", 2, 2.0)
    assert (good.bounds[0], good.bounds[-1]) == (0.01, 81.92)
    assert good.attributes["gen_ai.request.model"] == "m" and "error.type" not in good.attributes
    assert (bad.attributes["error.type"], bad.sum) == ("Overloaded", 0.25)
    assert "gen_ai.request.model" not in bad.attributes
    assert (first.count, first.sum) == (1, 0.125)


def test_no_metrics_are_made_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_metrics(None, "gateway") is None
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    assert open_metrics("http://127.0.0.1:1", "gateway") is None


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="'nowhere'"):
        open_metrics("nowhere", "gateway")
