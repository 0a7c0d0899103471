"""What a dashboard's JSON asks Prometheus for, and whether Grafana's own model reads all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.forked import REPO

FILES = sorted((REPO / "deploy/grafana/dashboards").glob("*.json"))
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


def panel_queries(path: Path) -> Iterator[Asked]:
    for panel in read(path)["panels"]:
        for target in panel.get("targets", ()):
            yield Asked(path.stem, panel["title"], target["expr"], bool(target.get("instant")))


def other_queries(path: Path) -> Iterator[Asked]:
    """Of the variables and the marks in time."""
    dashboard = read(path)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield Asked(path.stem, f"variable {variable['name']}", variable["query"])
    for mark in dashboard["annotations"]["list"]:
        yield Asked(path.stem, f"annotation {mark['name']}", mark["expr"])


def with_all_chosen(expr: str, rate_interval: str) -> str:
    """As Grafana sends it while every variable is at All. Raises KeyError for a variable that there is not."""
    names: Mapping[str, str] = {"__rate_interval": rate_interval} | dict.fromkeys(
        ("target", "draft", "role", "member", "job", "model_name", "instance", "engine"), ".*"
    )
    return _VARIABLE.sub(lambda found: names[found[1]], expr)


def unknown_to_grafana(path: Path) -> list[str]:
    """Keys that the model of grafana-foundation-sdk loses: misspelt, or of another version."""
    register_default_plugins()
    given = read(path)
    return list(_lost(given, json.loads(JSONEncoder().encode(Dashboard.from_json(given)))))


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
