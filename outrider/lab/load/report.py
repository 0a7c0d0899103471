"""What `outrider bench` prints of a ladder, and all of it as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.cli.console import widen
from outrider.lab.load.figures import LEAST_TURNS, Percentiles, RungFigures, all_failed, faults_of
from outrider.lab.load.plot import bars, trade

_MOST_FAULTS = 5
"""Kinds of failure that are told; the JSON file has all."""


def show(rungs: Sequence[RungFigures], console: Console) -> None:
    """Print tables, plots and what follows from them. A console that is too narrow is made wide enough."""
    if not all_failed(rungs):
        _show_figures(rungs, console)
    for sentence in verdicts(rungs):
        console.print(sentence, markup=False, soft_wrap=not console.is_terminal)


def _show_figures(rungs: Sequence[RungFigures], console: Console) -> None:
    for table in (_throughput(rungs), _latency(rungs)):
        widen(console, table)
        console.print(table)
    console.print("\ntokens/s by requests at once", style="bold")
    for line in bars(rungs):
        console.print(line, markup=False)
    marks = "" if rungs[0].plain is None else " (● with, ○ without, ◐ both)"
    console.print(f"\ntokens/s in all, by tokens/s of each user{marks}", style="bold")
    for line in trade(rungs):
        console.print(line, markup=False)
    console.print()


def verdicts(rungs: Sequence[RungFigures]) -> Iterator[str]:
    """Yield what the figures say, in sentences."""
    for rung in rungs:
        if rung.gain is None:
            continue
        times = f"{rung.gain.ratio:.2f} times the tokens/s of plain decoding{rung.gain.bounds}"
        few = ""
        if rung.gain.interval is None:
            turns = "1 turn is" if rung.num_turns == 1 else f"{rung.num_turns} turns are"
            few = f"; {turns} too few for an interval, {LEAST_TURNS} are enough: give more --requests"
        yield f"{rung.concurrency} at once: {_verdict(rung)}{times}{few}"
    faults = faults_of(rungs)
    for fault, count in faults.most_common(_MOST_FAULTS):
        yield f"{count} failed: {fault}"
    if len(faults) > _MOST_FAULTS:
        yield f"{sum(faults.values())} failed in all, in {len(faults)} ways; --json FILE has them"


def _verdict(rung: RungFigures) -> str:
    if rung.speculative.acceptance_rate is None:
        return "nothing was drafted, "
    if rung.gain is None or rung.gain.interval is None:
        return ""
    return {None: "no difference beyond noise, ", True: "speculation pays, ", False: "speculation does not pay, "}[
        rung.pays
    ]


def _throughput(rungs: Sequence[RungFigures]) -> Table:
    both = rungs[0].plain is not None
    names = ("with", "without", "ratio (95 %)") if both else ("tok/s",)
    table = _table("Tokens/s", "at once", "requests", "failed", *names, "accepted", "tok/pass")
    for rung in rungs:
        arms, own = rung.arms.values(), rung.speculative
        ratio = [] if not both else ["" if rung.gain is None else str(rung.gain)]
        table.add_row(
            str(rung.concurrency),
            "+".join(str(arm.num_requests) for arm in arms),
            "+".join(str(arm.num_failed) for arm in arms),
            *(f"{arm.tokens_per_s:.1f}" for arm in arms),
            *ratio,
            "" if own.acceptance_rate is None else f"{100 * own.acceptance_rate:.0f} %",
            "" if own.tokens_per_target_pass is None else f"{own.tokens_per_target_pass:.2f}",
        )
    return table


def _latency(rungs: Sequence[RungFigures]) -> Table:
    columns = ("first token, ms", "further token, ms", "whole answer, s")
    table = _table("\nLatency: p50/p95/p99", "at once", "speculation", *columns)
    for rung in rungs:
        for index, (name, arm) in enumerate(rung.arms.items()):
            table.add_row(
                str(rung.concurrency) if index == 0 else "",
                name,
                _shown(arm.first_token_s, 1e3, 1),
                _shown(arm.token_s, 1e3, 1),
                _shown(arm.answer_s, 1, 2),
            )
    return table


def _shown(found: Percentiles, factor: float, digits: int) -> str:
    values = (found.p50, found.p95, found.p99)
    return "/".join("-" if value is None else f"{factor * value:.{digits}f}" for value in values)


def _table(title: str, *columns: str) -> Table:
    """A table of figures without lines between them, which fits 80 columns."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column == "speculation" else "right", no_wrap=True)
    return table


def to_json(rungs: Sequence[RungFigures]) -> list[dict[str, Any]]:
    """Return all figures, times in seconds."""
    return [
        {
            "concurrency": rung.concurrency,
            "num_turns": rung.num_turns,
            "arms": {name: asdict(arm) for name, arm in rung.arms.items()},
            "gain": None if rung.gain is None else {**asdict(rung.gain), "pays": rung.pays},
        }
        for rung in rungs
    ]
