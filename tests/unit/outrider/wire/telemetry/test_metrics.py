"""Every series of gateway and workers: names, labels, help, and the acceptance rate over its window."""

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from gateway.telemetry.vllm_names import ChoiceSeries, VllmNames
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.metrics import WINDOW_S, GatewayMetrics, RecentAcceptance
from tests.unit.clock import Clock


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 8), st.integers(0, 8)), max_size=60))
def test_rate_equals_a_count_from_the_start(rounds: list[tuple[float, int, int]]) -> None:
    clock = Clock()
    acceptance, seen = RecentAcceptance(clock), []
    for pause_s, drafted, accepted in rounds:
        clock.now += pause_s
        acceptance.add(drafted, min(accepted, drafted))
        seen.append((int(clock.now), drafted, min(accepted, drafted)))
        recent = [(d, a) for at, d, a in seen if at >= int(clock.now) - WINDOW_S]
        drafted_sum = sum(d for d, _ in recent)
        if drafted_sum:
            assert acceptance.rate() == sum(a for _, a in recent) / drafted_sum
        else:
            assert math.isnan(acceptance.rate())


def families(registry: object) -> dict[str, Metric]:
    return {family.name: family for family in registry.collect()}  # type: ignore[attr-defined]


def test_histograms_of_times_reach_the_longest_request() -> None:
    """A time to the first token includes the queue, and a lost target is waited for between two tokens."""
    gateway, registry = GatewayMetrics(), CollectorRegistry()
    gateway.pair("big", "small").round_seconds.labels(phase="total")
    gateway.answers("big")
    ChoiceSeries(registry).begin("big")
    registry.register(VllmNames(gateway, lambda: ()))
    times = [
        family
        for each in (gateway.registry, registry)
        for family in families(each).values()
        if family.type == "histogram" and family.name.endswith("_seconds")
    ]
    assert len(times) == 12
    for family in times:
        bounds = [float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels]
        assert sorted(bounds)[-2] >= GatewayConfig(target="127.0.0.1:9").request_timeout_s, family.name
