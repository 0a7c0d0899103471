"""What `outrider tune` prints: tables in the form of Leviathan et al. (2023), Table 4, or JSON."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.lab.tuning.choice import Ratio, fastest_of
from outrider.lab.tuning.latency import break_even
from outrider.lab.tuning.settings import PLAIN, gateway_settings
from outrider.lab.tuning.study import Study

_AGAIN = "measure again on machines that do nothing else"
UNSTEADY = 1.25
"""Plain decoding, measured three times, differs by no more than so many times, and no setting is by more than that
faster than its tokens a pass allow.
"""


def show(study: Study, console: Console) -> None:
    """Print the tables of a study, what it recommends, and why that might not be relied on."""
    _show_acceptance(study, console)
    _show_costs(study, console)
    _show_speeds(study, console)
    _show_alternatives(study, console)
    _show_latencies(study, console)
    console.print(f"[bold]temperature {study.temperature:g}:[/] {reason(study)}", markup=True)
    doubt = unsteady(study)
    if doubt is not None:
        console.print(f"[bold]not to be relied on:[/] {doubt}", markup=True)


def unsteady(study: Study) -> str | None:
    """Return what says that the machine had other things to do, so that nothing follows; None when nothing does."""
    plain = study.points[0]
    first, middle, last = plain.expected_tokens_per_s, plain.tokens_per_s, statistics.median(study.speeds[PLAIN])
    if max(first, middle, last) > UNSTEADY * min(first, middle, last):
        return (
            f"plain decoding made {first:.1f} tok/s when costs were measured, {middle:.1f} among the K and {last:.1f} "
            f"among the alternatives; {_AGAIN}"
        )
    for name, speeds in study.speeds.items():
        speedup, per_pass = Ratio.of(speeds, study.speeds[PLAIN]).median, study.tokens_per_pass[name]
        if speedup > UNSTEADY * per_pass:  # of passes that are no faster than a plain step
            return f"{name} made {per_pass:.2f} tokens a pass and seemed {speedup:.2f} times as fast as plain; {_AGAIN}"
    return None


def reason(study: Study) -> str:
    """Return the recommendation and the numbers that it rests on."""
    choice = study.choice
    because = f"the draft's alpha {study.acceptance.alpha:.2f}, c {study.costs.c:.2f}"
    if choice.name == PLAIN:
        return (
            f"do not speculate: the fastest setting with drafts, {_fastest_drafted(study)} the speed of plain decoding "
            f"({because})"
        )
    text = f"{choice.name}, {choice.speedup} the speed of plain decoding ({because})"
    if choice.fastest == choice.name:
        return f"{text}, the fastest measured"
    return f"{text}; {choice.fastest} with {choice.fastest_speedup} is not faster beyond noise, and less simple"


def _fastest_drafted(study: Study) -> str:
    name = fastest_of(study.speeds)
    return f"{name}, has {Ratio.of(study.speeds[name], study.speeds[PLAIN])}"


def _show_acceptance(study: Study, console: Console) -> None:
    rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in study.acceptance.by_position)
    num_seen = sum(study.acceptance.reached)
    console.print(f"\n[bold]temperature {study.temperature:g}[/]", markup=True)
    console.print(f"alpha {study.acceptance.alpha:.3f} over {num_seen} drafts; by position in the proposal: {rates}")
    console.print(
        f"c {study.costs.c:.3f}: a draft token is waited for {1e3 * study.costs.draft_token_s:.2f} ms, "
        f"a step of the target takes {1e3 * study.costs.step_s:.2f} ms"
    )


def _show_costs(study: Study, console: Console) -> None:
    table = table_of("What a round costs, ms", "K", "round", "wait", "verify", "rest", "first round", "plain")
    for k, cost in study.costs.by_k.items():
        parts = (cost.round_s, cost.wait_s, cost.verify_s, cost.rest_s, cost.first_s)
        table.add_row(str(k), *(f"{1e3 * part:.2f}" for part in parts), f"{100 * cost.plain_share:.1f} %" if k else "")
    console.print(table)
    console.print(
        "wait: of the target for drafts; verify: queue, forward and acceptance in the target; "
        "rest: gateway and streams; plain: rounds whose drafts came too late.",
        style="dim",
    )


def _show_speeds(study: Study, console: Console) -> None:
    columns = ("K", "tok/round", "paper", "expected", "measured", "range", "tok/s", "met")
    table = table_of("Speed over plain decoding, expected and measured", *columns)
    for point in study.points:
        table.add_row(
            str(point.k),
            "" if point.tokens_per_round is None else f"{point.tokens_per_round:.2f}",
            f"{point.paper_speedup:.2f}x",
            f"{point.expected_speedup:.2f}x",
            f"{point.speedup.median:.2f}x",
            f"{point.speedup.low:.2f}-{point.speedup.high:.2f}",
            f"{point.tokens_per_s:.1f}",
            f"{point.met:.2f}",
        )
    console.print(table)
    console.print(
        "paper: Theorem 3.8 with alpha and c; expected: with the costs above and the drafts that were kept at the "
        "larger K; range: over repeats; met: measured over expected, both over plain.",
        style="dim",
    )


def _show_alternatives(study: Study, console: Console) -> None:
    table = table_of("Alternatives", "setting", "tok/pass", "tok/s", "speed over plain (range)")
    for name, speeds in study.speeds.items():
        ratio, per_pass = Ratio.of(speeds, study.speeds[PLAIN]), study.tokens_per_pass[name]
        table.add_row(name, f"{per_pass:.2f}", f"{statistics.median(speeds):.1f}", str(ratio))
    console.print(table)
    for name, message in study.refused.items():
        console.print(f"{name} is not offered: {message}", style="dim", markup=False)


def _show_latencies(study: Study, console: Console) -> None:
    plain = study.latencies[PLAIN]
    table = table_of("What an answer takes, ms", "setting", "first token", "further token", "pays from")
    for name, own in study.latencies.items():
        pays_from = "" if name == PLAIN else _tokens(break_even(plain, own))
        table.add_row(name, f"{1e3 * own.first_s:.1f}", f"{1e3 * own.token_s:.2f}", pays_from)
    console.print(table)
    console.print("pays from: the shortest answer that is there no later than without drafts.", style="dim")


def _tokens(count: int | None) -> str:
    return "never" if count is None else "1 token" if count == 1 else f"{count} tokens"


def table_of(title: str, *columns: str) -> Table:
    """Return an empty table of figures."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "setting" else "right", no_wrap=True)
    return table


def to_json(study: Study) -> dict[str, Any]:
    """Return all that was measured, expected and recommended."""
    return {
        "temperature": study.temperature,
        "unsteady": unsteady(study),
        "alpha": study.acceptance.alpha,
        "alpha_by_position": study.acceptance.by_position,
        "num_drafts_seen": sum(study.acceptance.reached),
        "c": study.costs.c,
        "draft_token_s": study.costs.draft_token_s,
        "step_s": study.costs.step_s,
        "costs": [{"k": k, **asdict(cost)} for k, cost in study.costs.by_k.items()],
        "speeds": [
            {**asdict(point), "measured_over_expected": point.met, "in_tokens_per_s": point.met_in_tokens_per_s}
            for point in study.points
        ],
        "alternatives": [
            {
                "name": name,
                "gateway_settings": gateway_settings(study.tried[name]),
                "tokens_per_s": list(speeds),
                "tokens_per_pass": study.tokens_per_pass[name],
                "speedup": asdict(Ratio.of(speeds, study.speeds[PLAIN])),
                "first_s": study.latencies[name].first_s,
                "token_s": study.latencies[name].token_s,
                "break_even_tokens": break_even(study.latencies[PLAIN], study.latencies[name]),
            }
            for name, speeds in study.speeds.items()
        ],
        "not_offered": dict(study.refused),
        "recommendation": {
            **asdict(study.choice),
            "speculate": study.choice.name != PLAIN,
            "gateway_settings": gateway_settings(study.tried[study.choice.name]),
            "reason": reason(study),
        },
    }
