"""A report as one Markdown file and one JSON file, written anew after each section."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.cli.benching.figures import Gain
from outrider.cli.reporting.sections import Section, State

Event = Mapping[str, Any]

P_WRONG = 1e-4
"""A right law gives a smaller p-value once in 10,000 tries; a wrong one that is worth a word gives 0."""
_MARKS = {State.WAITING: "not run", State.RAN: "ran", State.FAILED: "FAILED", State.INTERRUPTED: "INTERRUPTED"}


@dataclass
class Document:
    """All sections, and where they are written."""

    path: Path
    """Of the Markdown file; the JSON file lies beside it."""
    head: str
    """What the figures are of, in a sentence or two."""
    sections: Sequence[Section]
    command: str = field(default_factory=lambda: shlex.join(["outrider", *sys.argv[1:]]))
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def json_path(self) -> Path:
        return self.path.with_suffix(".json")

    def write(self) -> None:
        """Write both files. Raises OSError."""
        self.path.write_text(self.markdown(), encoding="utf-8")
        self.json_path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """Return all that was found, times in seconds."""
        return {
            "command": self.command,
            "date": self._date,
            "head": self.head,
            "sections": [section.to_json() for section in self.sections],
        }

    def markdown(self) -> str:
        parts = ["# Outrider report", self.head, f"- command: `{self.command}`\n- date: {self._date}"]
        outcome = [[each.title, _MARKS[each.state], _seconds(each.elapsed_s)] for each in self.sections]
        parts.append(markdown_table(("section", "outcome", "s"), outcome))
        for section in self.sections:
            parts += [f"## {section.title}", section.plan]
            parts += shown(section.events)
            if section.error is not None:
                parts.append(f"{_MARKS[section.state]}:\n\n```\n{section.error}\n```")
        return "\n\n".join(parts) + "\n"

    @property
    def _date(self) -> str:
        return f"{self.began:%Y-%m-%d %H:%M} UTC"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of GitHub's Markdown, numbers to the right of the first column."""
    lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    lines.insert(1, "|---" + "|---:" * (len(columns) - 1) + "|")
    return "\n".join(lines)


def shown(events: Sequence[Event]) -> Iterator[str]:
    """Yield what a section found as paragraphs and tables of Markdown."""
    for kind in dict.fromkeys(event["event"] for event in events):
        yield _SHOWN[kind]([event for event in events if event["event"] == kind])


def _facts(events: Sequence[Event]) -> str:
    """Lines of names and values; lines of a log below them."""
    lines = list[str]()
    for event in events:
        lines += [f"- {name}: {_fact(value)}" for name, value in event.items() if name not in ("event", "log")]
        if event.get("log"):
            lines += ["", "```", *event["log"], "```"]
    return "\n".join(lines)


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _devices(events: Sequence[Event]) -> str:
    (found,) = events
    gpus = [f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB" for gpu in found["gpus"]]
    return "\n".join(
        f"- {name}: {value or 'none'}"
        for name, value in (("GPUs", "; ".join(gpus)), ("CUDA of torch", found["cuda"]), ("driver", found["driver"]))
    )


def _findings(events: Sequence[Event]) -> str:
    return "\n".join(
        f"- {each['state']}: {each['check']}: {each['found']}" + (f" -> {each['remedy']}" if each["remedy"] else "")
        for each in events
    )


def _laws(events: Sequence[Event]) -> str:
    columns = ("rule", "sequences", "chi-square", "degrees", "p-value", "verdict")
    rows = [
        [
            each["rule"],
            str(each["num_sequences"]),
            f"{each['statistic']:.1f}",
            str(each["degrees"]),
            f"{each['p_value']:.3g}",
            "the target's law" if each["p_value"] >= P_WRONG else "WRONG",
        ]
        for each in events
    ]
    return markdown_table(columns, rows)


def _same_draws(events: Sequence[Event]) -> str:
    (found,) = events
    return f"The same draws as on the CPU: {found['same']} of {found['of']}."


def _bandwidth(events: Sequence[Event]) -> str:
    (found,) = events
    return (
        f"Memory is copied at {found['bytes_per_s'] / 1e9:.0f} GB/s. The floor of a step is its weights, and the "
        "cached tokens of its rows, at that rate."
    )


def _steps(events: Sequence[Event]) -> str:
    columns = ("rows x tokens", "context", "floor ms", "eager ms", "graph ms", "eager / graph", "over the floor")
    rows = []
    for each in events:
        eager_s, graph_s = each["eager_s"], each.get("graph_s")
        served_s, floor_s = eager_s if graph_s is None else graph_s, each["floor_s"]
        rows.append(
            [
                f"{each['rows']} x {each['tokens']}",
                str(each["context"]),
                _ms(floor_s),
                _ms(eager_s),
                _ms(graph_s),
                "-" if graph_s is None else f"{eager_s / graph_s:.2f}",
                "-" if floor_s is None else f"{served_s / floor_s:.2f}",
            ]
        )
    return markdown_table(columns, rows)


def _rungs(events: Sequence[Event]) -> str:
    columns = (
        "at once",
        "plain tok/s",
        "with drafts",
        "ratio (95 %)",
        "accepted",
        "tok/pass",
        "first ms",
        "further ms",
    )
    rows = []
    for each in events:
        with_drafts, plain, gain = each["arms"]["with"], each["arms"]["without"], each["gain"]
        rows.append(
            [
                str(each["concurrency"]),
                f"{plain['tokens_per_s']:.1f}",
                f"{with_drafts['tokens_per_s']:.1f}",
                "-" if gain is None else str(Gain(gain["ratio"], gain["interval"])),
                _number(with_drafts["acceptance_rate"]),
                _number(with_drafts["tokens_per_target_pass"]),
                _ms(with_drafts["first_token_s"]["p50"]),
                _ms(with_drafts["token_s"]["p50"]),
            ]
        )
    said = [f"- {sentence}" for each in events for sentence in each["said"]]
    return "\n".join([markdown_table(columns, rows), "", *said])


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{1e3 * value_s:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


_SHOWN = {
    "versions": _facts,
    "devices": _devices,
    "found": _findings,
    "widened": _facts,
    "law": _laws,
    "same draws": _same_draws,
    "loaded": _facts,
    "graphs": _facts,
    "bandwidth": _bandwidth,
    "step": _steps,
    "rung": _rungs,
}
"""How the events of a kind, all of one section, are shown."""
