"""Plots of a ladder: in characters for a terminal, and as PNG where matplotlib is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from outrider.cli.benching.figures import RungFigures

_WIDTH, _HEIGHT = 56, 12
"""Characters of the plots: beside labels and figures they fit a terminal of 80."""
_MARKS = {"with": "●", "without": "○", "as it is": "●"}
_DPI = 120

Point = tuple[str, float, float]
"""Arm, tokens per second and user, tokens per second in all."""


def bars(rungs: Sequence[RungFigures]) -> Iterator[str]:
    """Yield lines: a bar of tokens per second for each rung and arm."""
    most = max((arm.tokens_per_s for rung in rungs for arm in rung.arms.values()), default=0.0) or 1.0
    for rung in rungs:
        for index, (name, arm) in enumerate(rung.arms.items()):
            eighths = round(8 * _WIDTH * arm.tokens_per_s / most)
            bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
            yield f"{rung.concurrency if index == 0 else '':>5} {name:<8} {bar} {arm.tokens_per_s:.1f}"


def trade(rungs: Sequence[RungFigures]) -> Iterator[str]:
    """Yield lines: tokens per second in all (upwards) by those of each user (to the right), a mark for each rung."""
    points = _points(rungs)
    if not points:
        return
    most_user, most = max(user for _, user, _ in points), max(total for _, _, total in points)
    grid = [[" "] * (_WIDTH + 1) for _ in range(_HEIGHT + 1)]
    for arm, user, total in points:
        row, column = _HEIGHT - round(_HEIGHT * total / most), round(_WIDTH * user / most_user)
        taken = grid[row][column]
        grid[row][column] = _MARKS[arm] if taken in (" ", _MARKS[arm]) else "◐"
    for index, row_ in enumerate(grid):
        scale = f"{most * (_HEIGHT - index) / _HEIGHT:.0f}" if index % (_HEIGHT // 3) == 0 else ""
        yield f"{scale:>9} │{''.join(row_).rstrip()}"
    yield f"{'':>9} └{'─' * (_WIDTH + 1)}"
    ends = f"{most_user:.1f}"
    yield f"{'':>10}0{'':>{_WIDTH + 1 - len(ends)}}{ends}"


def _points(rungs: Sequence[RungFigures]) -> list[Point]:
    return [
        (name, arm.tokens_per_s_per_user, arm.tokens_per_s)
        for rung in rungs
        for name, arm in rung.arms.items()
        if arm.tokens_per_s_per_user is not None
    ]


def draw(rungs: Sequence[RungFigures], title: str, path: Path) -> None:
    """Write both plots as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=_DPI, layout="constrained")
    figure.suptitle(title)
    by_concurrency, by_user = figure.subplots(1, 2)
    for name in rungs[0].arms:
        arms = [rung.arms[name] for rung in rungs]
        by_concurrency.plot([rung.concurrency for rung in rungs], [arm.tokens_per_s for arm in arms], "o-", label=name)
        points = [(user, total) for arm, user, total in _points(rungs) if arm == name]
        by_user.plot([user for user, _ in points], [total for _, total in points], "o-", label=name)
    by_concurrency.set(xlabel="requests at once", ylabel="tokens/s")
    by_concurrency.set_xscale("log", base=2)
    by_concurrency.set_xticks([rung.concurrency for rung in rungs], [str(rung.concurrency) for rung in rungs])
    by_user.set(xlabel="tokens/s of each user", ylabel="tokens/s in all")
    for panel in (by_concurrency, by_user):
        panel.set_ylim(bottom=0)
        panel.legend(title="speculation")
    by_user.set_xlim(left=0)
    figure.savefig(path)
