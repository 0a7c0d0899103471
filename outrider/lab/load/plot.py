"""Plots of a ladder: in characters for a terminal, and as PNG where matplotlib is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.lab.load.figures import ArmFigures, RungFigures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 56, 12
"""Characters of the plots: beside labels and figures they fit a terminal of 80."""
_MARKS = {"with": "●", "without": "○", "as it is": "●"}
_DPI = 120

Arms = Mapping[str, Sequence[ArmFigures]]
"""By name: an arm's figures at each concurrency."""
Point = tuple[str, float, float]
"""Arm, tokens per second and user, tokens per second in all."""


def arms_of(rungs: Sequence[RungFigures]) -> Arms:
    return {name: [rung.arms[name] for rung in rungs] for name in rungs[0].arms}


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
    points = _points(arms_of(rungs))
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


def _points(arms: Arms) -> list[Point]:
    return [
        (name, arm.tokens_per_s_per_user, arm.tokens_per_s)
        for name, own in arms.items()
        for arm in own
        if arm.tokens_per_s_per_user is not None
    ]


def draw(rungs: Sequence[RungFigures], title: str, path: Path) -> None:
    """Write both plots as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=_DPI, layout="constrained")
    figure.suptitle(title)
    draw_loads(figure.subplots(1, 2), [rung.concurrency for rung in rungs], arms_of(rungs), "speculation")
    figure.savefig(path)


def draw_loads(panels: Sequence[Axes], concurrencies: Sequence[int], arms: Arms, title: str | None = None) -> None:
    """Draw into two panels: tokens per second by concurrency, and in all by those of each user. title: of the arms."""
    by_concurrency, by_user = panels
    for name, own in arms.items():
        by_concurrency.plot(concurrencies, [arm.tokens_per_s for arm in own], "o-", label=name)
    by_concurrency.set(xlabel="requests at once", ylabel="tokens/s")
    by_concurrency.set_xscale("log", base=2)
    by_concurrency.set_xticks(concurrencies, list(map(str, concurrencies)))
    by_concurrency.set_ylim(bottom=0)
    _draw_trade(by_user, arms)
    for panel in panels:
        panel.legend(title=title)


def _draw_trade(panel: Axes, arms: Arms) -> None:
    """Draw tokens per second in all by those of each user: a line for each arm, a point for each concurrency, filled
    where nothing else gives both a user and all as much.
    """
    points = _points(arms)
    for name in arms:
        own = [(user, total) for arm, user, total in points if arm == name]
        (line,) = panel.plot([user for user, _ in own], [total for _, total in own], "o-", label=name, mfc="white")
        best = [each for each in own if not any(_is_behind(each, other) for _, *other in points)]
        panel.plot([user for user, _ in best], [total for _, total in best], "o", color=line.get_color())
    panel.set(xlabel="tokens/s of each user", ylabel="tokens/s in all")
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)


def _is_behind(point: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether the other is better in one, and no worse in both."""
    return point != tuple(other) and all(own <= their for own, their in zip(point, other, strict=True))
