"""Dashboards, rules and runbook against each other and the series that there are. Real data: dashboards-check."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from deploy.grafana.__main__ import generated, main
from deploy.prometheus.binaries import NotFound, find
from gateway.admission.keys import AccessMetrics
from gateway.telemetry.vllm_names import EndedAnswers, VllmNames
from gateway.workers.member_series import MemberSeries
from gateway.workers.membership import Membership
from outrider.wire.metrics import PLAIN_REASONS, GatewayMetrics, WorkerMetrics
from outrider.wire.trace import Spans
from tests.forked import REPO
from tests.watching.dashboards import FILES, other_queries, panel_queries, with_all_chosen

PROMETHEUS = REPO / "deploy/prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
ENDINGS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
HISTOGRAM = re.compile(r"_(bucket|sum|count)$")
SERIES = re.compile(r"\b(?:vllm:|spec_|outrider_|process_|pair:|target:|member:|outrider:)[\w:]+")


def existing() -> set[str]:
    """Series of gateway and workers."""
    registry = CollectorRegistry()
    registry.register(MemberSeries(lambda: (), lambda: Membership((), ())))
    AccessMetrics(registry)
    Spans("http://127.0.0.1:1", "gateway", registry).close()
    EndedAnswers(registry)
    registry.register(VllmNames(GatewayMetrics(), lambda: ()))
    registries = (GatewayMetrics().registry, WorkerMetrics("draft").registry, registry)
    return {family.name + ending for each in registries for family in each.collect() for ending in ENDINGS[family.type]}


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def rules() -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text()) for path in RULES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def test_the_dashboards_are_those_of_the_code() -> None:
    assert [path for path, _ in generated()] == FILES
    assert main(["--check"]) == 0, "run make dashboards"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_dashboard_asks_for_exists(path: Path) -> None:
    known = existing() | recorded()
    asked = [*panel_queries(path), *other_queries(path)]
    named = {(each.title, name) for each in asked for name in SERIES.findall(each.expr)}
    assert len(named) > 20
    assert not {(where, name) for where, name in named if name not in known}


def test_what_rules_and_alerts_ask_for_exists() -> None:
    known = existing() | recorded()
    named = {name for rule in rules() for name in SERIES.findall(rule["expr"])}
    assert len(named) > 10
    assert named <= known, named - known


def test_the_documentation_lists_every_series_and_every_alert() -> None:
    text = (REPO / "docs/monitoring.md").read_text()
    listed = set(re.findall(r"`([\w:]+)`", text))
    assert not {name for name in existing() if name not in listed and HISTOGRAM.sub("", name) not in listed}
    known = {form for name in existing() for form in (name, HISTOGRAM.sub("", name))} | recorded()
    for page in (*sorted((REPO / "docs").glob("*.md")), REPO / "README.md", REPO / "SECURITY.md"):
        documented = {name for name in re.findall(r"`([\w:]+)`", page.read_text()) if SERIES.fullmatch(name)}
        assert documented <= known, (page.name, documented - known)
    assert re.findall(r"^\| (Outrider\w+) \|", text, re.MULTILINE) == [r["alert"] for r in rules() if "alert" in r]


def test_every_alert_has_its_entry_in_the_runbook() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    entries = re.findall(r"^## (\w+)$", (REPO / "docs/runbook.md").read_text(), re.MULTILINE)
    assert [rule["alert"] for rule in alerts if rule["alert"] not in entries] == []
    assert set(entries) == {rule["alert"] for rule in alerts}
    for rule in alerts:
        notes = rule["annotations"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["for"] and notes["summary"] and notes["description"]
        assert notes["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_the_reasons_of_plain_steps_are_known_wherever_they_are_named() -> None:
    """A rule that leaves out a reason that there is not leaves out nothing, and nobody notices."""
    (rule,) = (rule for rule in rules() if rule.get("record") == "target:spec_unwanted_plain_steps:ratio_rate5m")
    left_out = [set(reasons.split("|")) for reasons in re.findall(r'reason!~"([\w|]+)"', rule["expr"])]
    assert left_out and all(reasons < set(PLAIN_REASONS) for reasons in left_out)
    (table,) = re.findall(r"^### Plain steps$(.*?)^## ", _doc("monitoring"), re.MULTILINE | re.DOTALL)
    assert tuple(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)[1:]) == PLAIN_REASONS
    (entry,) = re.findall(r"^## OutriderPlainStepsHigh$(.*?)^## ", _doc("runbook"), re.MULTILINE | re.DOTALL)
    assert set(PLAIN_REASONS) <= set(re.findall(r"`(\w+)`", entry))


def _doc(page: str) -> str:
    return (REPO / f"docs/{page}.md").read_text()


@pytest.fixture
def promtool() -> str:
    try:
        return str(find("promtool", fetch=False))
    except NotFound as missing:
        pytest.skip(str(missing))


def test_what_a_dashboard_asks_is_promql(promtool: str, tmp_path: Path) -> None:
    asked = [with_all_chosen(each.expr, "1m") for path in FILES for each in panel_queries(path)]
    rules = [{"record": f"query_{index}", "expr": expr} for index, expr in enumerate(asked)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    ran = subprocess.run([promtool, "check", "rules", str(tmp_path / "queries.yml")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_is_raised_by_a_test_of_the_rules() -> None:
    files = (PROMETHEUS / "tests").glob("*.yml")
    tested = {name for path in files for name in re.findall(r"alertname: (\w+)\n", path.read_text())}
    assert tested == {rule["alert"] for rule in rules() if "alert" in rule}


@pytest.mark.slow
def test_the_rules_pass_their_own_tests(promtool: str) -> None:
    """As `make check-alerts` sees to as well."""
    tests = [str(path) for path in sorted((PROMETHEUS / "tests").glob("*.yml"))]
    for command in (["check", "config", str(PROMETHEUS / "prometheus.yml")], ["test", "rules", *tests]):
        ran = subprocess.run([promtool, *command], capture_output=True, text=True, timeout=100)
        assert ran.returncode == 0, ran.stdout + ran.stderr
