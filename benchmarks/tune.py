"""Check that `outrider tune` recommends the fastest setting that it measured, on the demo pair widened.

    make bench-tune                                   # or: python -m benchmarks.tune --help

Runs the command itself and reads its JSON. The exit code is 1 where the recommendation is not within NEAR of the
fastest setting measured.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import DEMO_DRAFT, Report, parser, widened
from outrider.lab.load.figures import Gain
from outrider.lab.tuning.money import Bought, Price, tables, verdict

NEAR = 0.95
"""Least speed of the recommendation, as a share of the fastest."""
PRICE = "target=2.5,draft=0.4"
"""An example: the draft's device at a sixth of the target's."""
Study = Mapping[str, Any]
"""Results of one temperature in `outrider tune --json`."""


def tuned(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Return what the command prints. Ends this process where it fails: its message is on stderr."""
    command = [str(Path(sys.executable).with_name("outrider")), "tune", "--json", *arguments]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode:
        sys.exit(f"{shlex.join(command)} ended with exit code {made.returncode}")
    found: Mapping[str, Any] = json.loads(made.stdout)
    return found


def speedups(study: Study) -> dict[str, float]:
    """Return the speeds over plain decoding in the same repeat, of every setting that was measured."""
    chains = {f"K = {point['k']}, every K": point["speedup"]["median"] for point in study["speeds"]}
    return chains | {drafter["name"]: drafter["speedup"]["median"] for drafter in study["drafters"]}


def violations(study: Study) -> list[str]:
    """Return a sentence where the recommendation is too far behind the fastest setting."""
    chosen = study["recommendation"]
    fastest, speedup = max(speedups(study).items(), key=lambda item: item[1])
    if chosen["speedup"]["median"] >= NEAR * speedup:
        return []
    return [
        f"T = {study['temperature']:g}: {chosen['name']} is recommended, {chosen['speedup']['median']:.2f} times plain "
        f"decoding, and {fastest} is {speedup:.2f} times"
    ]


def add_study(report: Report, study: Study) -> None:
    where, chosen = f"T = {study['temperature']:g}", study["recommendation"]
    rows = [
        [str(point["k"]), f"{point['paper_speedup']:.2f}", shown(point["speedup"]), f"{point['tokens_per_s']:.1f}"]
        for point in study["speeds"]
    ]
    report.table(f"Every K, {where}", ("K", "paper", "measured over plain", "tok/s"), rows)
    drafters = sorted(study["drafters"], key=lambda drafter: -float(drafter["speedup"]["median"]))
    rows = [[drafter["name"], shown(drafter["speedup"])] for drafter in drafters]
    report.table(f"Drafters, {where}", ("setting", "over plain"), rows)
    report.text(f"Alpha {study['alpha']:.3f}, c {study['c']:.3f}. Recommended: {chosen['name']}. {chosen['reason']}")
    report.data[where] = study


def add_money(report: Report, money: Mapping[str, Any]) -> None:
    price = Price(**money["price"])
    rows = [
        Bought(
            load["concurrency"],
            load["plain_tokens_per_s"],
            {name: None if gain is None else Gain(**gain) for name, gain in load["gains"].items()},
            price,
        )
        for load in money["loads"]
    ]
    for title, columns, lines in tables(rows):
        report.table(title, columns, lines)
    report.text(f"An hour of a target's device costs {price.target:g}, of a draft's {price.draft:g}.")
    for row in rows:
        report.text(verdict(row))
    report.data["money"] = money


def shown(speedup: Mapping[str, float]) -> str:
    """Return the median, and the range over repeats."""
    return f"{speedup['median']:.2f} ({speedup['low']:.2f}-{speedup['high']:.2f})"


def main() -> int:
    options = parser(
        __doc__,
        size="94M",
        temperatures=[0.0, 1.0],
        prompts=6,
        max_tokens=128,
        repeats=2,
        price=PRICE,
        max_k=12,
        concurrency=[1, 2, 4, 8, 16],
        seconds=30.0,
    ).parse_args()
    report = Report("tune", "What `outrider tune` measures and recommends")
    report.text(
        f"The demo pair, its target WIDENED to {options.size}; {options.prompts} prompts, one answer of "
        f"{options.max_tokens} tokens at a time, {options.repeats} repeats. Speeds are over plain decoding in the same "
        "repeat, in brackets the range."
    )
    arguments = [
        "--target",
        str(widened(options.size)),
        "--draft",
        str(DEMO_DRAFT),
        "--png",
        str(options.results / "tune.png"),
    ]
    arguments += ["--num-prompts", str(options.prompts), "--max-tokens", str(options.max_tokens)]
    arguments += ["--repeats", str(options.repeats), "--price", options.price]
    arguments += ["--max-k", str(options.max_k), "--seconds", str(options.seconds)]
    for concurrency in options.concurrency:
        arguments += ["--concurrency", str(concurrency)]
    options.results.mkdir(parents=True, exist_ok=True)
    for temperature in options.temperatures:
        arguments += ["--temperature", str(temperature)]
    wrong = []
    made = tuned(arguments)
    for study in made["studies"]:
        add_study(report, study)
        wrong += violations(study)
    add_money(report, made["money"])
    report.verdict(
        wrong,
        f"No violation: what is recommended is within {100 * (1 - NEAR):.0f} % of the fastest setting measured.",
    )
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
