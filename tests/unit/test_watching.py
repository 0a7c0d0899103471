"""Dashboards, rules and runbook against each other and the series that there are. Real data: dashboards-check."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.prometheus.binaries import NotFound, find
from outrider.wire.telemetry.metrics import PLAIN_REASONS
from tests.forked import REPO
from tests.watching.dashboards import FILES, faults, panel_queries, with_all_chosen
from tests.watching.series import OF_PROMETHEUS, existing, recorded, rules, series_in

DASHBOARDS = REPO / "deploy/grafana/dashboards"
PROMETHEUS = REPO / "deploy/prometheus"
HISTOGRAM = re.compile(r"_(bucket|sum|count)$")
SERIES = re.compile(r"\b(?:vllm:|spec_|outrider_|process_|pair:|target:|member:|outrider:)[\w:]+")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_is_as_grafana_and_the_product_have_it(path: Path) -> None:
    assert faults(path) == []


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ('"title": "Up"', '"titel": "Up"', ".titel is unknown to Grafana's model"),
        ('"id": 2,', '"id": 3,', "2 panels have the id 3"),
        ('"uid": "outrider-worker"', '"uid": "other"', "uid is other, must be outrider-worker"),
        ('"uid": "${datasource}"', '"uid": "mine"', ".datasource is {'type': 'prometheus', 'uid': 'mine'}, must be"),
        ('member=~\\"$member\\"', 'member=~\\"$who\\"', "there is no variable who"),
        ("outrider_worker_slots_in_use{", "outrider_slots{", "Slots in use: there is no series outrider_slots"),
        ("\n    ", "\n   ", "its keys are not in order"),
    ],
)
def test_a_slip_in_a_dashboard_is_found(before: str, after: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    text = (DASHBOARDS / "worker.json").read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    assert any(fault in each for each in faults(path)), faults(path)


def test_what_rules_and_alerts_ask_for_exists() -> None:
    named = {name for rule in rules() for name in series_in(rule["expr"])}
    assert len(named) > 10
    unknown = named - existing() - recorded() - OF_PROMETHEUS
    assert not unknown


def test_the_documentation_lists_every_series_and_every_alert() -> None:
    text = (REPO / "docs/monitoring.md").read_text()
    listed = set(re.findall(r"`([\w:]+)`", text))
    assert not {name for name in existing() if name not in listed and HISTOGRAM.sub("", name) not in listed}
    known = {form for name in existing() for form in (name, HISTOGRAM.sub("", name))} | recorded()
    for page in (*sorted((REPO / "docs").rglob("*.md")), REPO / "README.md", REPO / "SECURITY.md"):
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
