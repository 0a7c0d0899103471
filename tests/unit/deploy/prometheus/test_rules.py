"""Dashboards, rules and runbook against each other and the series that there are. Real data: dashboards-check."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.prometheus.binaries import NotFound, find
from outrider.wire.telemetry.metrics import PLAIN_REASONS
from tests.forked import REPO
from tests.watching.dashboards import FILES, panel_queries, with_all_chosen
from tests.watching.series import OF_PROMETHEUS, existing, recorded, rules, series_in

PROMETHEUS = REPO / "deploy/prometheus"
HISTOGRAM = re.compile(r"_(bucket|sum|count)$")
SERIES = re.compile(r"\b(?:vllm:|spec_|outrider_|process_|pair:|target:|member:|outrider:)[\w:]+")


def test_series_of_rules_and_alerts_exist() -> None:
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


def test_the_reasons_of_plain_steps_exist_wherever_they_are_named() -> None:
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


def test_queries_of_a_dashboard_are_promql(promtool: str, tmp_path: Path) -> None:
    asked = [with_all_chosen(each.expr, "1m") for path in FILES for each in panel_queries(path)]
    rules = [{"record": f"query_{index}", "expr": expr} for index, expr in enumerate(asked)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    ran = subprocess.run([promtool, "check", "rules", str(tmp_path / "queries.yml")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_is_raised_by_a_test_of_the_rules() -> None:
    files = (PROMETHEUS / "tests").glob("*.yml")
    tested = {name for path in files for name in re.findall(r"alertname: (\w+)\n", path.read_text())}
    assert tested == {rule["alert"] for rule in rules() if "alert" in rule}
