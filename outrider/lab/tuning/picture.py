"""Draws the picture of `outrider tune --png`: speed relative to plain decoding by K, with a colour per temperature."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.lab.tuning.study import Study
from outrider.wire.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 120


def check_can_draw(path: Path) -> None:
    """Raise ConfigError if matplotlib is not installed, or the picture cannot be written to `path`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib: pip install 'outrider[tune]'")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--png {path}: the file's name must end in .png")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--png {path}: there is no folder {path.absolute().parent}")


def draw(studies: Sequence[Study], title: str, path: Path) -> None:
    """Draw the studies into one picture and write it to `path` as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    for index, study in enumerate(studies):
        _draw_speeds(axes, study, color=f"C{index}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(title=title, xlabel="K, draft tokens a round", ylabel="speed over plain decoding")
    axes.set_xticks(range(len(studies[0].points)))  # K from 0
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def _draw_speeds(axes: Axes, study: Study, color: str) -> None:
    ks = list[int]()
    medians = list[float]()
    below = list[float]()
    above = list[float]()
    by_paper = list[float]()
    for point in study.points:
        ks.append(point.k)
        medians.append(point.speedup.median)
        below.append(point.speedup.median - point.speedup.low)
        above.append(point.speedup.high - point.speedup.median)
        by_paper.append(point.paper_speedup)
    measured = f"temperature {study.temperature:g}, range over repeats"
    axes.errorbar(ks, medians, yerr=[below, above], fmt="o-", capsize=3, color=color, label=measured)
    paper = f"Theorem 3.8, alpha {study.alpha:.2f}, c {study.costs.c:.2f}"
    axes.plot(ks, by_paper, "--", color=color, label=paper)
