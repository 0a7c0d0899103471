"""Check that `outrider tune` foresees its own measurements and recommends the fastest, on the demo pair widened.

    make bench-tune                                   # or: python -m benchmarks.tune --help

Runs the command itself and reads its JSON. The exit code is 1 where a K is more than FAR_OFF from the speed over plain
decoding that was expected of it, or where the recommendation is not within NEAR of the fastest setting measured.
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
from outrider.lab.tuning.money import Bought, Price, tables, verdicts

FAR_OFF = 0.15
"""Most that a measured speed may differ, as a share of the expected speed over plain decoding."""
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
    return chains | {each["name"]: each["speedup"]["median"] for each in study["alternatives"]}


def violations(study: Study) -> list[str]:
    found = []
    where = f"T = {study['temperature']:g}"
    if study["unsteady"] is not None:
        found.append(f"{where}: {study['unsteady']}")
    for point in study["speeds"][1:]:  # both are over plain decoding
        met = point["measured_over_expected"]
        if not abs(met - 1.0) <= FAR_OFF:
            found.append(f"{where}: K = {point['k']} is {met:.2f} times as fast as expected")
    said, fastest = study["recommendation"], max(speedups(study).items(), key=lambda item: item[1])
    if not said["speedup"]["median"] >= NEAR * fastest[1]:
        found.append(
            f"{where}: {said['name']} is recommended, {said['speedup']['median']:.2f} times plain decoding, "
            f"and {fastest[0]} is {fastest[1]:.2f} times"
        )
    return found


def add_study(report: Report, study: Study) -> None:
    where, said = f"T = {study['temperature']:g}", study["recommendation"]
    rows = [
        [
            str(point["k"]),
            f"{point['paper_speedup']:.2f}",
            f"{point['expected_speedup']:.2f}",
            shown(point["speedup"]),
            f"{point['tokens_per_s']:.1f}",
            f"{point['measured_over_expected']:.2f}",
            f"{point['in_tokens_per_s']:.2f}",
        ]
        for point in study["speeds"]
    ]
    columns = ("K", "paper", "expected", "measured over plain", "tok/s", "measured / expected", "in tok/s")
    report.table(f"Every K, {where}", columns, rows)
    others = [
        [each["name"], f"{each['tokens_per_pass']:.2f}", shown(each["speedup"])]
        for each in sorted(study["alternatives"], key=lambda each: -float(each["speedup"]["median"]))
    ]
    report.table(f"Alternatives, {where}", ("setting", "tokens a target pass", "over plain"), others)
    met = [point["measured_over_expected"] for point in study["speeds"][1:]]
    bare = [point["in_tokens_per_s"] for point in study["speeds"]]
    report.text(
        f"Alpha {study['alpha']:.3f}, c {study['c']:.3f}. Measured over expected is {min(met):.2f} to {max(met):.2f}; "
        f"in tokens per second instead of speeds over plain decoding {min(bare):.2f} to {max(bare):.2f}. "
        f"Recommended: {said['name']}. {said['reason']}"
    )
    report.data[where] = study


def add_latencies(report: Report, study: Study) -> None:
    rows = [
        [
            each["name"],
            f"{1e3 * each['first_s']:.1f}",
            f"{1e3 * each['token_s']:.2f}",
            ""
            if each["name"] == "plain"
            else "never"
            if each["break_even_tokens"] is None
            else str(each["break_even_tokens"]),
        ]
        for each in study["alternatives"]
    ]
    columns = ("setting", "first token, ms", "further token, ms", "no later than plain from, tokens")
    report.table(f"What an answer takes, T = {study['temperature']:g}", columns, rows)


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
    for sentence in verdicts(rows):
        report.text(sentence)
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
    report = Report("tune", "What `outrider tune` expects, measures and recommends")
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
        add_latencies(report, study)
        wrong += violations(study)
    add_money(report, made["money"])
    report.verdict(
        wrong,
        f"No violation: every K is within {100 * FAR_OFF:.0f} % of what was expected of it, and what is recommended "
        f"within {100 * (1 - NEAR):.0f} % of the fastest setting measured.",
    )
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
