"""Every series of gateway and workers: names, labels, help, and the acceptance rate over its window."""

from __future__ import annotations

import ast
import inspect
import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from gateway.telemetry.vllm_names import EndedAnswers, VllmNames
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.metrics import WINDOW_S, AcceptanceWindow, GatewayMetrics, WorkerMetrics


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 8), st.integers(0, 8)), max_size=60))
def test_rate_equals_a_count_from_the_start(rounds: list[tuple[float, int, int]]) -> None:
    clock = Clock()
    window, seen = AcceptanceWindow(clock), []
    for pause_s, drafted, accepted in rounds:
        clock.now += pause_s
        window.add(drafted, min(accepted, drafted))
        seen.append((int(clock.now), drafted, min(accepted, drafted)))
        recent = [(d, a) for at, d, a in seen if at >= int(clock.now) - WINDOW_S]
        drafted_sum = sum(d for d, _ in recent)
        if drafted_sum:
            assert window.rate() == sum(a for _, a in recent) / drafted_sum
        else:
            assert math.isnan(window.rate())


def families(registry: object) -> dict[str, Metric]:
    return {family.name: family for family in registry.collect()}  # type: ignore[attr-defined]


def test_the_rate_as_it_is_scraped() -> None:
    gateway = GatewayMetrics()
    pair = gateway.pair("big", "small")
    assert b'spec_acceptance_rate{draft="small",target="big"} NaN' in generate_latest(gateway.registry)
    pair.window.add(4, 3)
    gateway.pair("big", "other").window.add(2, 1)
    text = generate_latest(gateway.registry)
    assert b'spec_acceptance_rate{draft="small",target="big"} 0.75' in text
    assert b'spec_acceptance_rate{draft="other",target="big"} 0.5' in text
    assert "last 60 s" in families(gateway.registry)["spec_acceptance_rate"].documentation


def test_histograms_of_times_reach_the_longest_request() -> None:
    """A time to the first token includes the queue, and a lost target is waited for between two tokens."""
    gateway, registry = GatewayMetrics(), CollectorRegistry()
    gateway.pair("big", "small").round_seconds.labels(phase="total")
    gateway.answers("big")
    EndedAnswers(registry).begin("big")
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


def docstrings(cls: type) -> dict[str, str]:
    """Attribute that the constructor sets to the string below it."""
    (init,) = (n for n in ast.walk(ast.parse(inspect.getsource(cls))) if getattr(n, "name", None) == "__init__")
    found = {}
    for node, after in pairwise(init.body):  # type: ignore[attr-defined]
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Attribute) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[target.attr] = after.value.value
    return found


@pytest.mark.parametrize("made", [GatewayMetrics(), WorkerMetrics("draft")])
def test_docstrings_name_only_series_that_exist(made: GatewayMetrics | WorkerMetrics) -> None:
    """The PromQL in them reads what is scraped."""
    cls = type(made)
    exists = {s for family in families(made.registry).values() for s in series_of(family)}  # type: ignore[attr-defined]
    texts = docstrings(cls)
    fields = {name for name in vars(made) if not name.startswith("_")} - {"registry"}
    assert len(fields) > 10 and fields == texts.keys()
    named = {name for text in texts.values() for name in re.findall(r"\b(?:spec|outrider)_\w+", text)}
    assert named and named <= exists, named - exists


def series_of(family: Metric) -> set[str]:
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}[family.type]
    return {family.name + ending for ending in endings}


@pytest.mark.parametrize("made", [GatewayMetrics(), WorkerMetrics("target")])
def test_every_series_says_what_it_is(made: object) -> None:
    for family in families(made.registry).values():  # type: ignore[attr-defined]
        assert family.documentation and family.documentation != family.name
