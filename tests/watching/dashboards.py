"""What a dashboard's JSON asks Prometheus for, and `python -m tests.watching.dashboards`, which checks it without a
Prometheus: it prints each fault and exits 1 if there is one.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.forked import REPO
from tests.watching.series import OF_PROMETHEUS, existing, recorded, series_in

FILES = sorted((REPO / "deploy/grafana/dashboards").glob("*.json"))
LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")
SOURCE = "${datasource}"
"""Variable of each dashboard, so that it fits any Grafana that has a Prometheus."""
BUILT_IN = {"__rate_interval"}
"""Variables of Grafana's own that queries may use."""
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


@dataclass(frozen=True, slots=True)
class Asked:
    """One query of a dashboard, with its variables still in it."""

    dashboard: str
    title: str
    """Of the panel, the variable or the mark."""
    expr: str
    instant: bool = False


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def all_panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield rows and panels, those too that lie within a row that is folded."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def panel_queries(path: Path) -> Iterator[Asked]:
    for panel in all_panels(read(path)):
        for target in panel.get("targets", ()):
            yield Asked(
                path.stem, panel.get("title", "a panel without a title"), target["expr"], bool(target.get("instant"))
            )


def other_queries(path: Path) -> Iterator[Asked]:
    """Of the variables and the marks in time."""
    dashboard = read(path)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            query = variable["query"]
            text = query if isinstance(query, str) else query["query"]  # Grafana saves an object
            yield Asked(path.stem, f"variable {variable['name']}", text)
    for mark in marks(dashboard):
        yield Asked(path.stem, f"annotation {mark['name']}", mark["expr"])


def marks(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what marks times of its own by a query; Grafana adds one of its own when it saves."""
    return [mark for mark in dashboard["annotations"]["list"] if "expr" in mark]


def with_all_chosen(expr: str, rate_interval: str) -> str:
    """As Grafana sends it while every variable is at All. Raises KeyError for a variable that there is not."""
    names: Mapping[str, str] = {"__rate_interval": rate_interval} | dict.fromkeys(
        ("target", "draft", "role", "member", "job", "model_name", "instance", "engine"), ".*"
    )
    return _VARIABLE.sub(lambda found: names[found[1]], expr)


def faults(path: Path) -> list[str]:
    """Return what is wrong with a dashboard, as far as its JSON tells it."""
    text = path.read_text()
    dashboard = json.loads(text)
    found = [f"{key} is unknown to Grafana's model" for key in _unknown(dashboard)]
    if text != json.dumps(dashboard, indent=2, sort_keys=True) + "\n":
        found.append(
            "its keys are not in order, so that nobody can read what changes: run python -m json.tool "
            f"--sort-keys --indent 2 {path.name} {path.name}"
        )
    if dashboard["uid"] != f"outrider-{path.stem}":
        found.append(f"uid is {dashboard['uid']}, must be outrider-{path.stem}: links name it")
    if dashboard.get("id") is not None:
        found.append(f"id is {dashboard['id']}, which is of one Grafana's database: remove it")
    panel_ids = Counter(panel.get("id") for panel in all_panels(dashboard))
    found += [f"{count} panels have the id {number}" for number, count in panel_ids.items() if count > 1]
    sources = [f"{place} is {source}, must be the variable {SOURCE}" for place, source in _fixed_sources(dashboard)]
    return found + sources + list(_query_faults(path, dashboard))


def _query_faults(path: Path, dashboard: Mapping[str, Any]) -> Iterator[str]:
    variables = BUILT_IN | {variable["name"] for variable in dashboard["templating"]["list"]}
    known = existing() | recorded() | OF_PROMETHEUS
    for asked in (*panel_queries(path), *other_queries(path)):
        for name in sorted(set(_VARIABLE.findall(asked.expr)) - variables):
            yield f"{asked.title}: there is no variable {name}"
        label_values = LABEL_VALUES.fullmatch(asked.expr)
        read_names = series_in(asked.expr if label_values is None else label_values[1])
        for name in sorted(read_names - known):
            yield f"{asked.title}: there is no series {name}"


def _fixed_sources(part: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the data sources that are of one Grafana, and where they stand."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key != "datasource":
                yield from _fixed_sources(value, f"{at}.{key}")
            elif not isinstance(value, dict) or (value.get("type") == "prometheus" and value.get("uid") != SOURCE):
                yield f"{at}.datasource", value
    elif isinstance(part, list):
        for index, each in enumerate(part):
            yield from _fixed_sources(each, f"{at}[{index}]")


def _unknown(dashboard: Mapping[str, Any]) -> list[str]:
    """Return the keys that the model of grafana-foundation-sdk loses: misspelt, or of another version."""
    register_default_plugins()
    return list(_lost(dashboard, json.loads(JSONEncoder().encode(Dashboard.from_json(dict(dashboard))))))


def _lost(given: Any, known: Any, at: str = "") -> Iterator[str]:
    if isinstance(given, dict):
        for key, value in given.items():
            if value is not None and key not in known:
                yield f"{at}.{key}"
            elif value is not None:
                yield from _lost(value, known[key], f"{at}.{key}")
    elif isinstance(given, list):
        for index, (one, other) in enumerate(zip(given, known, strict=True)):
            yield from _lost(one, other, f"{at}[{index}]")


def main() -> int:
    found = [f"{path.name}: {fault}" for path in FILES for fault in faults(path)]
    for fault in found:
        sys.stderr.write(f"{fault}\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
