"""Names of the series that the product has, and of those that a PromQL query reads."""

import re
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from gateway.admission.key_limits import AccessMetrics
from gateway.telemetry.vllm_names import ChoiceSeries, VllmNames
from gateway.workers.member_series import MemberSeries
from gateway.workers.membership import Membership
from outrider.wire.telemetry.metrics import GatewayMetrics, WorkerMetrics
from outrider.wire.telemetry.trace import Spans
from tests.forked import REPO

RULES = sorted((REPO / "deploy/prometheus/rules").glob("*.yml"))
OF_PROMETHEUS = {"ALERTS", "up"}
_ENDINGS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
_NO_SERIES = (
    re.compile(r'"[^"]*"'),
    re.compile(r"\{[^{}]*\}"),
    re.compile(r"\[[^\]]*\]"),
    re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)"),
    re.compile(r"\b(?:and|or|unless|bool)\b"),
    re.compile(r"\boffset\s+\w+"),
    re.compile(r"\b[a-z_]+\s*(?=\()"),
    re.compile(r"\b\d[\w.]*"),
)
"""Parts of a query that name no series, which are cut out in this order: strings, matchers, spans, labels, operators,
functions and numbers."""


def existing() -> set[str]:
    """Return the series of gateways and workers."""
    registry = CollectorRegistry()
    registry.register(MemberSeries(lambda: (), lambda: Membership((), ())))
    AccessMetrics(registry)
    Spans("http://127.0.0.1:1", "gateway", registry).close()
    ChoiceSeries(registry)
    registry.register(VllmNames(GatewayMetrics(), lambda: ()))
    registries = (GatewayMetrics().registry, WorkerMetrics("draft").registry, registry)
    families = [family for each in registries for family in each.collect()]
    return {family.name + ending for family in families for ending in _ENDINGS[family.type]}


def rules() -> list[dict[str, Any]]:
    """Return the recording rules and the alerts."""
    files = [yaml.safe_load(path.read_text()) for path in RULES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def recorded() -> set[str]:
    """Return the series that recording rules make."""
    return {rule["record"] for rule in rules() if "record" in rule}


def series_in(expr: str) -> set[str]:
    """Return the series that a PromQL query reads."""
    for pattern in _NO_SERIES:
        expr = pattern.sub(" ", expr)
    return set(re.findall(r"[A-Za-z_:][\w:]*", expr))
