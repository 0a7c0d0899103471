"""Tokens per target pass under each acceptance rule, on the demo pair and held-out text.

    make bench-rules                                  # or: python -m benchmarks.rules --help

The results are counts, not times: they depend on the pair, the text and K, and on no machine. All rules get the same
prompts, and other seeds in each repetition. The exit code is 1 where lenience keeps fewer than the exact rule, by the
interval of the difference, or, for K = 4 and more at temperature 1, no more.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.alpha import shown
from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, RESULTS, Report, dev_prompts
from benchmarks.passes import run_pass
from benchmarks.running import running
from outrider.client import AcceptanceRule, AsyncClient, Round, Speculation
from outrider.engine.alpha import Estimate, half_width, moves

EXACT, LENIENT = "rejection", "lenience 0.5"
RULES: Mapping[str, Speculation] = {
    EXACT: Speculation(),
    "coupled": Speculation(acceptance=AcceptanceRule.COUPLED),
    "lenience 0.8": Speculation(lenience=0.8),
    LENIENT: Speculation(lenience=0.5),
}


GAINS_FROM = (1.0, 4)
"""Temperature, and K, from which the gain must show."""
Key = tuple[float, int, str]
"""Temperature, K and rule."""
Counts = list[list[float]]
"""By prompt: tokens, 1 + kept, of each round that had all K drafts."""


async def accepted(address: str, rule: str, k: int, temperature: float, options: argparse.Namespace) -> Counts:
    chosen = RULES[rule]
    found: Counts = [[] for _ in range(options.prompts)]

    def seen(index: int, item: Round) -> None:
        if item.num_drafted == k:
            found[index].append(1.0 + item.num_accepted)

    async with AsyncClient(address) as client:
        for repetition in range(options.repetitions):
            await run_pass(
                client,
                dev_prompts(options.prompts),
                concurrency=options.concurrency,
                temperature=temperature,
                max_tokens=options.max_tokens,
                speculation=Speculation(num_draft_tokens=k, acceptance=chosen.acceptance, lenience=chosen.lenience),
                seed=1_000_000 * repetition,
                on_round=seen,
            )
    return found


def measured(options: argparse.Namespace) -> dict[Key, Counts]:
    found: dict[Key, Counts] = {}
    with running({"model": DEMO_TARGET}, {"model": DEMO_DRAFT}) as endpoints:
        for temperature in options.temperatures:
            for k in options.k:
                for rule in RULES:
                    counts = asyncio.run(accepted(endpoints.grpc, rule, k, temperature, options))
                    found[temperature, k, rule] = counts
                    print(f"T = {temperature:g}, K = {k}, {rule}: {shown(Estimate.of(counts))}", flush=True)
    return found


def gain(counts: Counts, base: Counts) -> Estimate:
    """Return the tokens a pass more than `base`, on the same prompts, with half the width of the 95 % interval.

    Prompts are the independent samples, and each is its own control.
    """
    one, other = (Estimate.of(each).mean for each in (counts, base))
    if one is None or other is None:
        return Estimate(None, None)
    by_prompt = [mine - its for mine, its in zip(moves(counts, one), moves(base, other), strict=True)]
    return Estimate(one - other, half_width(by_prompt) if len(by_prompt) > 1 else None)


def violations(found: Mapping[Key, Counts]) -> list[str]:
    wrong = []
    for (temperature, k, rule), counts in found.items():
        if rule != LENIENT:
            continue
        more = gain(counts, found[temperature, k, EXACT])
        where = f"T = {temperature:g}, K = {k}: lenience keeps {shown(more)} more"
        if more.mean is None or more.error is None:
            wrong.append(f"{where}: too few rounds to tell")
        elif more.mean + more.error < 0 or ((temperature, k) >= GAINS_FROM and more.mean <= more.error):
            wrong.append(where)
    return wrong


def cells(found: Mapping[Key, Counts], key: Key) -> list[str]:
    temperature, k, rule = key
    tokens, base = (Estimate.of(found[each]) for each in (key, (temperature, k, EXACT)))
    more = gain(found[key], found[temperature, k, EXACT])
    gained = "" if more.mean is None or base.mean is None else f"{shown(more)} ({100 * more.mean / base.mean:+.1f} %)"
    return [
        *(f"{temperature:g}", str(k), rule, str(sum(map(len, found[key])))),
        *(shown(tokens), "" if rule == EXACT else gained),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--k", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    report = Report("rules", "What the acceptance rules keep")
    report.text(
        f"The demo pair; {options.prompts} prompts of held-out text, {options.max_tokens} tokens an answer, "
        f"{options.repetitions} seeds each. Tokens per target pass are 1 + kept drafts, over rounds that had all K; "
        "after ± the interval of 95 %, for which prompts are what is independent. The gain is over exact rejection, "
        "on the same prompts."
    )
    found = measured(options)
    keys = sorted(found, key=lambda key: (*key[:2], list(RULES).index(key[2])))
    columns = ("T", "K", "rule", "rounds", "tokens a pass", "gain")
    report.table("Tokens per target pass", columns, [cells(found, key) for key in keys])
    report.data["rounds"] = [
        {"temperature": t, "k": k, "rule": rule, "tokens_by_prompt": found[t, k, rule]} for t, k, rule in keys
    ]
    wrong = violations(found)
    report.verdict(wrong, "No violation: lenience keeps more.")
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
