"""Tokens per target pass under each acceptance rule, on the demo pair and held-out text.

    make bench-rules                                  # or: python -m benchmarks.rules --help

Counts, not times: they depend on the pair, the text and K, and on no machine. All rules get the same prompts, and other
seeds in each repetition. The exit code is 1 where the rule by block keeps no more than the rule by token, for K = 4 and
more, by more than the interval of the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from benchmarks.alpha import less, shown
from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, RESULTS, Report, dev_prompts
from benchmarks.passes import run_pass
from benchmarks.running import running
from outrider.client import AcceptanceRule, AsyncClient, Speculation
from outrider.engine.alpha import Estimate

BY_TOKEN, BY_BLOCK = "rejection by token", "rejection by block"
RULES: Mapping[str, Speculation] = {
    BY_TOKEN: Speculation(),
    BY_BLOCK: Speculation(),
    "coupled": Speculation(acceptance=AcceptanceRule.COUPLED),
    "lenience 0.8": Speculation(lenience=0.8),
    "lenience 0.5": Speculation(lenience=0.5),
}


GAINS_FROM = 4
"""K from which the gain by block is larger than the noise of this many rounds."""
Key = tuple[float, int, str]
"""Temperature, K and rule."""
Counts = list[list[float]]
"""Of each answer, and of each of its rounds that had all K drafts: how many were kept."""


async def accepted(address: str, rule: str, k: int, temperature: float, options: argparse.Namespace) -> Counts:
    wish = RULES[rule]
    found = defaultdict[str, list[float]](list)
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
            for each in sample.rounds:
                if each.num_drafted == k:
                    found[each.request_id].append(each.num_accepted)
    return list(found.values())


def measured(options: argparse.Namespace) -> dict[Key, Counts]:
    found: dict[Key, Counts] = {}
    for verification in ("token", "block"):
        rules = [rule for rule in RULES if (rule == BY_TOKEN) == (verification == "token")]
        target = {"model": DEMO_TARGET, "verification": verification}
        with running(target, {"model": DEMO_DRAFT}, {"wait_budget_min_ms": 1000.0}) as endpoints:
            for temperature in options.temperatures:
                for k in options.k:
                    for rule in rules:
                        counts = asyncio.run(accepted(endpoints.grpc, rule, k, temperature, options))
                        found[temperature, k, rule] = counts
                        print(f"T = {temperature:g}, K = {k}, {rule}: {shown(per_pass(counts))}", flush=True)
    return found


def per_pass(counts: Counts) -> Estimate:
    """Tokens, 1 + kept. Rounds of an answer are alike, so that answers are what is independent."""
    return Estimate.of([[1.0 + each for each in answer] for answer in counts])


def violations(found: Mapping[Key, Counts]) -> list[str]:
    wrong = []
    for (temperature, k, rule), counts in found.items():
        if rule != BY_BLOCK or k < GAINS_FROM:
            continue
        gain = less(per_pass(counts), per_pass(found[temperature, k, BY_TOKEN]))
        if gain.mean is None or gain.error is None or not gain.mean > gain.error:
            wrong.append(f"T = {temperature:g}, K = {k}: by block keeps {shown(gain)} more than by token")
    return wrong


def cells(found: Mapping[Key, Counts], key: Key) -> list[str]:
    temperature, k, rule = key
    tokens, base = per_pass(found[key]), per_pass(found[temperature, k, BY_TOKEN])
    gain = less(tokens, base)
    more = "" if gain.mean is None or base.mean is None else f"{shown(gain)} ({100 * gain.mean / base.mean:+.1f} %)"
    num_rounds = sum(map(len, found[key]))
    return [f"{temperature:g}", str(k), rule, str(num_rounds), shown(tokens), "" if rule == BY_TOKEN else more]


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
        "after ± the interval of 95 %, for which answers are what is independent. The gain is over rejection by token."
    )
    found = measured(options)
    keys = sorted(found, key=lambda key: (*key[:2], list(RULES).index(key[2])))
    columns = ("T", "K", "rule", "rounds", "tokens a pass", "gain")
    report.table("Tokens per target pass", columns, [cells(found, key) for key in keys])
    report.data["kept"] = [
        {"temperature": t, "k": k, "rule": rule, "by_answer": found[t, k, rule]} for t, k, rule in keys
    ]
    wrong = violations(found)
    report.verdict(wrong, "No violation: by block keeps more than by token, by more than the interval.")
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
