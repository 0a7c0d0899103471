"""docs/images/overview.png: the main panels, drawn from their own queries. No Grafana can be had where this runs."""

import io
import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from tests.watching.dashboards import FILES, all_panels, marks, read, with_all_chosen
from tests.watching.panels import RATE_INTERVAL
from tests.watching.prometheus import STEP_S, Line, Prometheus

TITLES = (
    "Time to first token",
    "Time between tokens",
    "Tokens by kind",
    "Acceptance by pair",
    "Acceptance by position",
    "Tokens a target pass",
    "Where a round's time goes",
    "Bytes on the wire",
    "Plain steps",
    "Replicas by state",
    "Busy share",
    "Running and waiting",
)
UNITS = {"s": "s", "percentunit": "share", "Bps": "bytes/s", "ops": "1/s", "none": ""}


def draw(prometheus: Prometheus, start_s: float, end_s: float, path: Path) -> None:
    """The panels of TITLES over that time (Unix seconds); red where an alert fires."""
    (overview,) = (read(file) for file in FILES if file.stem == "overview")
    (alerts,) = marks(overview)
    firing = sorted({at for line in prometheus.course(alerts["expr"], start_s, end_s) for at in line.times_s})
    panels = {panel["title"]: panel for panel in all_panels(overview)}
    with mpl.rc_context({"font.size": 7, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12, 9.6), layout="constrained")
        axes = figure.subplots(4, 3)
        for place, title in zip(axes.flat, TITLES, strict=True):
            _panel(place, panels[title], prometheus, start_s, end_s)
            for at in _minutes(firing, start_s):
                place.axvspan(at, at + STEP_S / 60, color="red", alpha=0.07, linewidth=0)
        for place in axes[-1]:
            place.set_xlabel("minutes")
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=90)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).quantize(64).save(path, optimize=True)


def _panel(place: Axes, panel: dict, prometheus: Prometheus, start_s: float, end_s: float) -> None:
    named = [
        (_legend(target["legendFormat"], line), line)
        for target in panel["targets"]
        for line in prometheus.course(with_all_chosen(target["expr"], RATE_INTERVAL), start_s, end_s)
    ]
    named = [(name, line) for name, line in named if any(line.values)]
    stacked = panel["fieldConfig"]["defaults"]["custom"].get("stacking", {}).get("mode") == "normal"
    if stacked:
        _stack(place, named, start_s)
    else:
        for name, line in named:
            place.plot(_minutes(line.times_s, start_s), line.values, linewidth=0.9, label=name)
    unit = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
    place.set_title(f"{panel['title']} [{unit}]" if unit else panel["title"], loc="left", fontweight="bold")
    place.set_ylim(bottom=0)
    place.grid(alpha=0.25)
    place.set_xlim(0, (end_s - start_s) / 60)
    place.legend(fontsize=5.5, loc="upper left", framealpha=0.6, edgecolor="none", ncols=2).set_in_layout(False)


def _stack(place: Axes, named: list[tuple[str, Line]], start_s: float) -> None:
    times_s = sorted({at for _, line in named for at in line.times_s})
    courses = [dict(zip(line.times_s, line.values, strict=True)) for _, line in named]
    rows = [[course.get(at, 0.0) for at in times_s] for course in courses]
    place.stackplot(_minutes(times_s, start_s), rows, labels=[name for name, _ in named], alpha=0.8, linewidth=0)


def _minutes(times_s: list[float], start_s: float) -> list[float]:
    return [(at - start_s) / 60 for at in times_s]


def _legend(text: str, line: Line) -> str:
    """Models by the last part of their path."""
    return re.sub(r"\{\{(\w+)\}\}", lambda label: Path(line.labels.get(label[1], "")).name, text).strip(" /")
