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
from prometheus_client import generate_latest
from prometheus_client.core import Metric

from outrider.wire.metrics import WINDOW_S, AcceptanceWindow, GatewayMetrics, WorkerMetrics


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


def test_series_of_the_gateway() -> None:
    """Name and labels, as dashboards read them."""
    gateway = GatewayMetrics()
    assert {name for name in families(gateway.registry) if name.startswith("spec_")} == {
        "spec_acceptance_rate",
        "spec_draft_tokens",
        "spec_accepted_tokens",
        "spec_rounds",
        "spec_wasted_tokens",
        "spec_truncate",
        "spec_emitted_tokens",
        "spec_plain_steps",
        "spec_drafted_per_position",
        "spec_accepted_per_position",
        "spec_wire_bytes",
        "spec_round_seconds",
        "spec_accepted_length",
        "spec_proposals_refused",
        "spec_planned_draft_tokens",
        "spec_proposals_late",
    }
    gateway.truncates.labels(worker="draft", reason="rejected").inc()
    pair = gateway.pair("t", "d")
    pair.rounds.inc()
    pair.emitted_tokens.labels(kind="bonus").inc(2)
    pair.drafted_per_position.labels(position="0").inc()
    pair.accepted_per_position.labels(position="0").inc()
    gateway.wire_bytes.labels(link="gateway_target", encoding="control").inc(10)
    pair.round_seconds.labels(phase="verify").observe(0.01)
    text = generate_latest(gateway.registry).decode()
    for sample in (
        'spec_truncate_total{reason="rejected",worker="draft"} 1.0',
        'spec_rounds_total{draft="d",target="t"} 1.0',
        'spec_emitted_tokens_total{draft="d",kind="bonus",target="t"} 2.0',
        'spec_drafted_per_position_total{draft="d",position="0",target="t"} 1.0',
        'spec_accepted_per_position_total{draft="d",position="0",target="t"} 1.0',
        'spec_wire_bytes_total{encoding="control",link="gateway_target"} 10.0',
        'spec_round_seconds_count{draft="d",phase="verify",target="t"} 1.0',
    ):
        assert sample in text


@pytest.mark.parametrize("worker", ["draft", "target"])
def test_series_of_a_worker_carry_its_name(worker: str) -> None:
    made = WorkerMetrics(worker)
    made.truncates.labels(reason="stop").inc()
    made.steps.labels(kind="plain").inc(3)
    made.dropped_tokens.labels(why="late").inc(5)
    made.wire_bytes.labels(encoding="full").inc(7)
    made.kv_blocks_in_use.set(4)
    made.batch_size.observe(2)
    samples = [s for family in made.registry.collect() for s in family.samples]
    own = [s for s in samples if not s.name.startswith("process_")]
    assert own and all(s.labels["worker"] == worker for s in own)
    assert {"process_resident_memory_bytes", "process_start_time_seconds"} <= {s.name for s in samples}
    values = {(s.name, *sorted(v for k, v in s.labels.items() if k != "worker")): s.value for s in own}
    assert values["outrider_worker_truncates_total", "stop"] == 1
    assert values["outrider_worker_steps_total", "plain"] == 3
    assert values["outrider_worker_dropped_draft_tokens_total", "late"] == 5
    assert values["outrider_worker_delivered_bytes_total", "full"] == 7
    assert values["outrider_worker_kv_blocks_in_use",] == 4


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
