"""The curves for a pair as PNG: speedup by K, and the best K by alpha (Leviathan et al. 2023, Figure 3)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.lab.load.plot import draw_loads
from outrider.lab.tuning.money import Money
from outrider.lab.tuning.study import Study
from outrider.lab.tuning.theory import best_k
from outrider.wire.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ALPHAS = [step / 100 for step in range(100)]
_OTHER_CS = {0.01: ":", 0.1: "--", 0.3: "-."}
"""Lines of other pairs, to compare with."""
_DPI = 120


def check_can_draw(path: Path) -> None:
    """Raises ConfigError before anything was measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib: pip install 'outrider[tune]'")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--png {path}: the file's name must end in .png")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--png {path}: there is no folder {path.absolute().parent}")


def draw(studies: Sequence[Study], money: Money | None, title: str, path: Path) -> None:
    """A row of two panels for each temperature, and one of what the deployments make over loads."""
    from matplotlib.figure import Figure

    num_rows = len(studies) + (money is not None)
    figure = Figure(figsize=(11, 4.2 * num_rows + 0.4), dpi=_DPI, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(num_rows, 2, squeeze=False)
    for (speed, length), study in zip(panels, studies, strict=False):
        _draw_speed(speed, study)
        _draw_best_k(length, study)
    if money is not None:
        draw_loads(panels[-1], money.concurrencies, money.arms)
    figure.savefig(path)


def _draw_speed(axes: Axes, study: Study) -> None:
    ks = [point.k for point in study.points]
    middle = [point.speedup.median for point in study.points]
    below = [point.speedup.median - point.speedup.low for point in study.points]
    above = [point.speedup.high - point.speedup.median for point in study.points]
    axes.errorbar(ks, middle, yerr=[below, above], fmt="o", capsize=3, color="tab:blue", label="measured, range")
    axes.plot(ks, [point.expected_speedup for point in study.points], color="tab:orange", label="expected")
    paper = f"Theorem 3.8, alpha {study.acceptance.alpha:.2f}, c {study.costs.c:.2f}"
    axes.plot(ks, [point.paper_speedup for point in study.points], "--", color="tab:gray", label=paper)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(title=f"temperature {study.temperature:g}", xlabel="K, tokens drafted a round", ylabel="speed over plain")
    axes.set_xticks(ks)
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_best_k(axes: Axes, study: Study) -> None:
    from matplotlib.ticker import MaxNLocator

    most = study.points[-1].k
    for c, line in _OTHER_CS.items():
        best = [best_k(alpha, c, most) for alpha in _ALPHAS]
        axes.plot(_ALPHAS, best, line, color="darkgray", linewidth=1, label=f"c {c:g}")
    own = [best_k(alpha, study.costs.c, most) for alpha in _ALPHAS]
    axes.plot(_ALPHAS, own, color="tab:orange", label=f"this pair, c {study.costs.c:.2f}")
    fastest = max(study.points, key=lambda point: point.tokens_per_s).k
    axes.plot([study.acceptance.alpha], [fastest], "o", color="tab:blue", label="fastest measured K")
    axes.set(title="best K by Theorem 3.8", xlabel="alpha", ylabel="K")
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.legend(loc="upper left")
