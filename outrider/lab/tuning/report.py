"""Prints what `outrider tune` measured, as tables or as JSON."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from outrider.lab.tuning.choice import Ratio, fastest_drafted
from outrider.lab.tuning.settings import PLAIN, gateway_settings
from outrider.lab.tuning.study import Study


def show(study: Study, console: Console) -> None:
    """Print a study's tables (speed at each K, and the compared drafters) and its recommendation."""
    console.print(f"\n[bold]temperature {study.temperature:g}[/]", markup=True)
    console.print(
        f"alpha {study.alpha:.3f}: share of accepted draft tokens; c {study.costs.c:.3f}: a draft token is waited for "
        f"{1e3 * study.costs.draft_token_s:.2f} ms, a step of the target takes {1e3 * study.costs.step_s:.2f} ms"
    )
    _show_every_k(study, console)
    _show_drafters(study, console)
    console.print(f"[bold]temperature {study.temperature:g}:[/] {reason(study)}", markup=True)


def reason(study: Study) -> str:
    """Return the study's recommendation as text, with the measured numbers behind it."""
    choice = study.choice
    because = f"the draft's alpha {study.alpha:.2f}, c {study.costs.c:.2f}"
    if choice.name == PLAIN:
        drafted = fastest_drafted(study.speeds)
        speedup = _speedup(study, drafted)
        return (
            f"do not speculate: the fastest setting with drafts, {drafted}, has {speedup} the speed of plain decoding "
            f"({because})"
        )
    text = f"{choice.name}, {choice.speedup} the speed of plain decoding ({because})"
    if choice.fastest == choice.name:
        return f"{text}, the fastest measured"
    return f"{text}; {choice.fastest} with {choice.fastest_speedup} is not faster beyond noise, and less simple"


def _speedup(study: Study, name: str) -> Ratio:
    return Ratio.of(study.speeds[name], study.speeds[PLAIN])


def _show_every_k(study: Study, console: Console) -> None:
    table = table_of("Speed over plain decoding", "K", "tok/round", "paper", "measured", "range", "tok/s")
    for point in study.points:
        tokens_per_round = ""
        if point.tokens_per_round is not None:
            tokens_per_round = f"{point.tokens_per_round:.2f}"
        table.add_row(
            str(point.k),
            tokens_per_round,
            f"{point.paper_speedup:.2f}x",
            f"{point.speedup.median:.2f}x",
            f"{point.speedup.low:.2f}-{point.speedup.high:.2f}",
            f"{point.tokens_per_s:.1f}",
        )
    console.print(table)
    console.print("paper: Theorem 3.8 with alpha and c; range: over repeats.", style="dim")


def _show_drafters(study: Study, console: Console) -> None:
    table = table_of("Drafters", "setting", "tok/s", "speed over plain (range)")
    for name, speeds in study.speeds.items():
        table.add_row(name, f"{statistics.median(speeds):.1f}", str(_speedup(study, name)))
    console.print(table)
    for name, message in study.refused.items():
        console.print(f"{name} is not offered: {message}", style="dim", markup=False)


def table_of(title: str, *columns: str) -> Table:
    """Return an empty table for numbers. columns: names of the columns."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        justify: Literal["left", "right"] = "right"
        if column == "setting":
            justify = "left"
        table.add_column(column, justify=justify, no_wrap=True)
    return table


def to_json(study: Study) -> dict[str, Any]:
    """Return the measurements and the recommendation of a study as a JSON object. Times are in seconds."""
    return {
        "temperature": study.temperature,
        "alpha": study.alpha,
        "c": study.costs.c,
        "draft_token_s": study.costs.draft_token_s,
        "step_s": study.costs.step_s,
        "speeds": list(map(asdict, study.points)),
        "drafters": [_drafter_to_json(study, name) for name in study.speeds],
        "not_offered": dict(study.refused),
        "recommendation": {
            **asdict(study.choice),
            "speculate": study.choice.name != PLAIN,
            "gateway_settings": gateway_settings(study.options[study.choice.name]),
            "reason": reason(study),
        },
    }


def _drafter_to_json(study: Study, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "gateway_settings": gateway_settings(study.options[name]),
        "tokens_per_s": list(study.speeds[name]),
        "speedup": asdict(_speedup(study, name)),
    }
