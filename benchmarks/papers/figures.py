"""Figures 2 to 4 of Leviathan, Kalman and Matias (2023), with points of our pairs where they were measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.papers.stored import Arm, Measured, PairSpeeds, Study
from outrider.lab.tuning.theory import best_k, expected_tokens, improvement, operations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {
    "papers-2.png": "Figure 2: tokens a round over alpha",
    "papers-3.png": "Figure 3: the best gamma over alpha",
    "papers-4.png": "Figure 4: speed and operations over alpha",
}
_ALPHAS = [step / 200 for step in range(200)]
_GAMMAS = {1: "lightgray", 3: "tab:blue", 5: "tab:orange", 7: "tab:green", 10: "gray"}
"""Colour of each line; the coloured ones are measured."""
_CS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
_MOST = 20
"""Largest gamma of Figure 3. Doubled, the lines of cheap drafts rise further at alpha near 1."""
_MARKERS = "osD^v<>P*XHdp"
"""One a pair and temperature, in turn."""
_DPI = 110


def draw(measured: Measured, folder: Path) -> None:
    """Write the pictures of TITLES into the folder."""
    from matplotlib.figure import Figure  # for who draws alone: it takes a second

    folder.mkdir(parents=True, exist_ok=True)
    for (name, title), panels in zip(TITLES.items(), (_tokens, _best_gamma, _speed_and_operations), strict=True):
        figure = Figure(figsize=(11, 4.6), dpi=_DPI, layout="constrained")
        figure.suptitle(title)
        panels(figure, measured)
        figure.savefig(folder / name)


def _points(measured: Measured) -> Iterator[tuple[PairSpeeds, Study, float, str]]:
    """Yield each pair at each temperature, its alpha, and its marker."""
    every = [(pair, study) for pair in measured.pairs for study in pair.studies]
    for index, (pair, study) in enumerate(every):
        yield pair, study, measured.alpha(pair, study.temperature), _MARKERS[index % len(_MARKERS)]


def _label(pair: PairSpeeds, study: Study) -> str:
    return f"{pair.target}, {pair.draft}, T = {study.temperature:g}"


def _tokens(figure: Figure, measured: Measured) -> None:
    axes = figure.subplots()
    for gamma, colour in _GAMMAS.items():
        axes.plot(_ALPHAS, [expected_tokens(alpha, gamma) for alpha in _ALPHAS], color=colour, label=f"gamma {gamma}")
    for pair, study, alpha, marker in _points(measured):
        for arm in study.exact():
            if arm.full_round is not None:
                _point(axes, alpha, arm.full_round, arm, marker)
        axes.plot([], [], marker, color="black", label=_label(pair, study))
    axes.set(xlabel="alpha", ylabel="tokens a round", xlim=(0, 1), ylim=(1, 8))
    _legend(axes)


def _best_gamma(figure: Figure, measured: Measured) -> None:
    axes = figure.subplots()
    for index, c in enumerate(_CS):
        shade, best = str(0.15 + 0.6 * index / (len(_CS) - 1)), [best_k(alpha, c, _MOST) for alpha in _ALPHAS]
        axes.step(_ALPHAS, best, where="post", color=shade, label=f"c {c:g}")
    for pair, study, alpha, marker in _points(measured):
        label = f"{_label(pair, study)}, c {study.c:.2f}: fastest measured"
        axes.plot([alpha], [study.fastest().gamma], marker, color="tab:blue", label=label)
    axes.set(xlabel="alpha", ylabel="gamma", xlim=(0, 1), ylim=(0, _MOST), yticks=range(0, _MOST + 1, 2))
    _legend(axes)


def _speed_and_operations(figure: Figure, measured: Measured) -> None:
    speed, work = figure.subplots(1, 2)
    for gamma, colour in _GAMMAS.items():
        label = f"gamma {gamma}"
        speed.plot(_ALPHAS, [improvement(alpha, gamma, 0.0) for alpha in _ALPHAS], color=colour, label=label)
        work.plot(_ALPHAS, [operations(alpha, gamma, 0.0) for alpha in _ALPHAS], color=colour, label=label)
    for pair, study, alpha, marker in _points(measured):
        for arm in study.exact():
            _point(speed, alpha, study.speed(arm).middle, arm, marker)
            _point(work, alpha, arm.operations(pair.operations_ratio), arm, marker)
        work.plot([], [], marker, color="black", label=_label(pair, study))
    speed.set(title="lines: drafts that cost nothing", xlabel="alpha", ylabel="speed over plain decoding")
    work.set(title="lines: drafts that cost nothing", xlabel="alpha", ylabel="operations over plain decoding")
    speed.set(xlim=(0, 1), ylim=(0, 8))
    work.set(xlim=(0, 1), ylim=(0, 8))
    _legend(work)


def _point(axes: Axes, x: float, y: float, arm: Arm, marker: str) -> None:
    axes.plot([x], [y], marker, color=_GAMMAS.get(arm.gamma, "black"), markeredgecolor="black", markeredgewidth=0.5)


def _legend(axes: Axes) -> None:
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
