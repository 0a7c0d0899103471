"""The two files of a kit: JSON with everything, Markdown to read. Written anew whenever there is something new."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import Outcome
from benchmarks.tables import markdown_table

MAX_ROWS = 80
"""Rows of a table in the Markdown file; JSON has them all."""
_OUTSIDE_TABLES = ("finding", "summary", "crash", "folder")


@dataclass
class Document:
    """A kit's outcomes, and where they are written."""

    folder: Path
    name: str
    """right, fast or a section's."""
    head: str
    """What ran where, in a sentence."""
    outcomes: Sequence[Outcome]
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    def write(self) -> None:
        """Write both files. Each takes its name when it is whole, so that one that is there can be read."""
        for suffix, text in (("json", self.json()), ("md", self.markdown())):
            unfinished = self.folder / f".gpu-{self.name}.{suffix}"
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, self.folder / f"gpu-{self.name}.{suffix}")

    def json(self) -> str:
        found = {
            "command": self._command,
            "date": self._date,
            "head": self.head,
            "sections": [outcome.to_json() for outcome in self.outcomes],
        }
        return json.dumps(found, indent=1, default=str) + "\n"

    def markdown(self) -> str:
        parts = [f"# Outrider on a GPU: {self.name}", self.head, f"- command: `{self._command}`\n- date: {self._date}"]
        rows = [
            [each.section.name, each.state, f"{each.seconds:.1f}", str(each.section.limit_s), _cell(each.summary)]
            for each in self.outcomes
        ]
        parts.append(markdown_table(("section", "outcome", "s", "limit", "in short"), rows))
        for outcome in self.outcomes:
            parts += _section(outcome)
        return "\n\n".join(parts) + "\n"

    @property
    def _command(self) -> str:
        return shlex.join(["python3", "-m", "benchmarks.gpu", *sys.argv[1:]])

    @property
    def _date(self) -> str:
        return f"{self.began:%Y-%m-%d %H:%M} UTC"


def _section(outcome: Outcome) -> list[str]:
    parts = [f"## {outcome.section.name}: {outcome.state}", f"{outcome.section.about}."]
    if outcome.findings:
        parts.append("\n".join(f"- **{text}**" for text in outcome.findings))
    for event in outcome.events:
        if event["kind"] == "crash":
            parts.append(f"**{event['text']}**")
            if event.get("traceback"):
                parts.append(f"```\n{event['traceback'].strip()}\n```")
    tables: dict[str, list[Mapping[str, Any]]] = {}
    for event in outcome.events:
        if event["kind"] not in _OUTSIDE_TABLES:
            tables.setdefault(event["kind"], []).append(event)
    for kind, events in tables.items():
        parts.append(f"### {kind}")
        parts.append(_facts(events[0]) if len(events) == 1 else _table(events))
    if outcome.log and not outcome.is_well:
        parts.append("The end of its log:\n\n```\n" + "\n".join(outcome.log) + "\n```")
    return parts


def _facts(event: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: {_text(value)}" for name, value in event.items() if name != "kind")


def _table(events: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for event in events for name in event if name != "kind"))
    rows = [[_cell(event.get(name)) for name in columns] for event in events[:MAX_ROWS]]
    table = markdown_table([name.replace("_", " ") for name in columns], rows)
    return table if len(events) <= MAX_ROWS else f"{table}\n\n{len(events) - MAX_ROWS} more rows are in the JSON file."


def _cell(value: Any) -> str:
    return _text(value).replace("|", "\\|").replace("\n", " ")[:200]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return str(value)
