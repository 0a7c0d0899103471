"""Tokens per target pass under each acceptance rule, on the demo pair and held-out text.

    make bench-rules                                  # or: python -m benchmarks.rules --help

Counts, not times: they depend on the pair, the text and K, and on no machine. All rules get the same prompts, and other
seeds in each repetition.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, RESULTS, Report, dev_prompts
from benchmarks.passes import run_pass
from benchmarks.running import running
from outrider.client import AcceptanceRule, AsyncClient, Speculation

BY_TOKEN, BY_BLOCK = "rejection by token", "rejection by block"
RULES: Mapping[str, Speculation] = {
    BY_TOKEN: Speculation(),
    BY_BLOCK: Speculation(),
    "coupled": Speculation(acceptance=AcceptanceRule.COUPLED),
    "lenience 0.8": Speculation(lenience=0.8),
    "lenience 0.5": Speculation(lenience=0.5),
}


async def accepted(address: str, rule: str, k: int, temperature: float, options: argparse.Namespace) -> list[int]:
    """Of every round that had all K drafts: how many were kept."""
    wish = RULES[rule]
    found: list[int] = []
    async with AsyncClient(address) as client:
        for repetition in range(options.repetitions):
            sample = await run_pass(
                client,
                dev_prompts(options.prompts),
                concurrency=options.concurrency,
                temperature=temperature,
                max_tokens=options.max_tokens,
                speculation=Speculation(num_draft_tokens=k, acceptance=wish.acceptance, lenience=wish.lenience),
                seed=1_000_000 * repetition,
            )
            found += [each.num_accepted for each in sample.rounds if each.num_drafted == k]
    return found


def measured(options: argparse.Namespace) -> dict[tuple[float, int, str], list[int]]:
    """By temperature, K and rule."""
    found: dict[tuple[float, int, str], list[int]] = {}
    for verification in ("token", "block"):
        rules = [rule for rule in RULES if (rule == BY_TOKEN) == (verification == "token")]
        target = {"model": DEMO_TARGET, "verification": verification}
        with running(target, {"model": DEMO_DRAFT}, {"wait_budget_min_ms": 1000.0}) as endpoints:
            for temperature in options.temperatures:
                for k in options.k:
                    for rule in rules:
                        counts = asyncio.run(accepted(endpoints.grpc, rule, k, temperature, options))
                        found[temperature, k, rule] = counts
                        print(f"T = {temperature:g}, K = {k}, {rule}: {mean_and_error(counts)}", flush=True)
    return found


def mean_and_error(counts: Sequence[int]) -> str:
    """Tokens a pass, 1 + kept, with twice the standard error."""
    error = 2 * statistics.stdev(counts) / math.sqrt(len(counts))
    return f"{1 + statistics.fmean(counts):.3f} ± {error:.3f}"


def gain(counts: Sequence[int], base: Sequence[int]) -> str:
    """In tokens a pass, with twice the standard error of the difference."""
    difference = statistics.fmean(counts) - statistics.fmean(base)
    error = 2 * math.sqrt(sum(statistics.variance(each) / len(each) for each in (counts, base)))
    return f"{difference:+.3f} ± {error:.3f} ({100 * difference / (1 + statistics.fmean(base)):+.1f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per target pass under each acceptance rule.")
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
        "after ± twice the standard error. The gain is over rejection by token."
    )
    found = measured(options)
    rows = [
        [
            f"{temperature:g}",
            str(k),
            rule,
            str(len(counts)),
            mean_and_error(counts),
            "" if rule == BY_TOKEN else gain(counts, found[temperature, k, BY_TOKEN]),
        ]
        for (temperature, k, rule), counts in sorted(
            found.items(), key=lambda item: (*item[0][:2], list(RULES).index(item[0][2]))
        )
    ]
    report.table("Tokens per target pass", ("T", "K", "rule", "rounds", "tokens a pass", "gain"), rows)
    report.data["mean_kept"] = [
        {"temperature": t, "k": k, "rule": rule, "rounds": len(counts), "mean": statistics.fmean(counts)}
        for (t, k, rule), counts in found.items()
    ]
    report.write(options.results)


if __name__ == "__main__":
    main()
