"""Compare tokens per second with and without speculation, side by side in one run, and show where a round's time goes.

    make bench                                        # or: python -m benchmarks.bench --help

The target is the demo target *widened* (outrider/lab/models/widening.py): the same logits, hence the same
acceptance, at the cost of a model of about 94M parameters. Target and draft are separate processes, each on its own
core. Both arms are measured in turn on the same running system, prompt set by prompt set, so that a drift of the
machine hits both alike; the ratio is the median over these pairs. Prefix caches are off: every pass feeds its prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common import dev_prompts, widened
from benchmarks.passes import PHASES, Sample, phase_shares, run_pass, take_turns
from benchmarks.running import running
from outrider.client import AsyncClient, Speculation
from outrider.wire.settings.system import demo_model

SIZE = "94M"


@dataclass(frozen=True)
class Result:
    """One line of the table. Shares are of the speculative rounds' time."""

    dtype: str
    temperature: float
    concurrency: int
    num_draft_tokens: int
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: float
    speedup_low: float
    speedup_high: float
    tokens_per_round: float
    acceptance_rate: float
    round_ms: float
    plain_step_ms: float
    shares: dict[str, float]


async def measure(address: str, dtype: str, options: argparse.Namespace) -> list[Result]:
    results, drafted = [], Speculation(num_draft_tokens=options.num_draft_tokens)
    async with AsyncClient(address) as client:
        for arm in (drafted, False):  # warm-up
            await run_pass(client, dev_prompts(2), concurrency=1, temperature=0.0, max_tokens=32, speculation=arm)
        for temperature in options.temperature:
            for concurrency in options.concurrency:
                texts = dev_prompts(max(options.prompts, concurrency))
                found: dict[str, list[Sample]] = {}
                await take_turns(
                    client,
                    texts,
                    {"plain": False, "drafted": drafted},
                    found,
                    range(options.repetitions),
                    concurrency=concurrency,
                    temperature=temperature,
                    max_tokens=options.max_tokens,
                )
                setting = (dtype, temperature, concurrency, options.num_draft_tokens)
                results.append(summarise(*setting, found["plain"], found["drafted"]))
    return results


def summarise(
    dtype: str, temperature: float, concurrency: int, k: int, plain: list[Sample], speculative: list[Sample]
) -> Result:
    ratios = [s.tokens_per_s / p.tokens_per_s for s, p in zip(speculative, plain, strict=True)]
    rounds = [item for sample in speculative for item in sample.rounds if item.num_drafted]
    steps = [item for sample in plain for item in sample.rounds]
    total = sum(item.timings.total_s for item in rounds)
    return Result(
        dtype=dtype,
        temperature=temperature,
        concurrency=concurrency,
        num_draft_tokens=k,
        plain_tokens_per_s=statistics.median(p.tokens_per_s for p in plain),
        speculative_tokens_per_s=statistics.median(s.tokens_per_s for s in speculative),
        speedup=statistics.median(ratios),
        speedup_low=min(ratios),
        speedup_high=max(ratios),
        tokens_per_round=sum(len(item.tokens) for item in rounds) / len(rounds),
        acceptance_rate=sum(item.num_accepted for item in rounds) / sum(item.num_drafted for item in rounds),
        round_ms=1e3 * total / len(rounds),
        plain_step_ms=1e3 * sum(item.timings.total_s for item in steps) / len(steps),
        shares=phase_shares(rounds),
    )


def show(console: Console, results: list[Result]) -> None:
    table = Table(title=f"demo draft for the demo target WIDENED to {SIZE}, one core each")
    columns = ("dtype", "T", "conc.", "K", "plain tok/s", "spec tok/s", "speedup (range)", "tok/round", "accepted")
    for name in (*columns, "round ms", "step ms", "held", "verify", "overhead"):
        table.add_column(name, justify="right")
    for r in results:
        shares = [f"{100 * r.shares[name]:.1f} %" for name in PHASES]
        table.add_row(
            r.dtype,
            f"{r.temperature:g}",
            str(r.concurrency),
            str(r.num_draft_tokens),
            f"{r.plain_tokens_per_s:.1f}",
            f"{r.speculative_tokens_per_s:.1f}",
            f"{r.speedup:.2f} ({r.speedup_low:.2f}-{r.speedup_high:.2f})",
            f"{r.tokens_per_round:.2f}",
            f"{100 * r.acceptance_rate:.1f} %",
            f"{r.round_ms:.2f}",
            f"{r.plain_step_ms:.2f}",
            *shares,
        )
    console.print(table)
    console.print("held: waiting for drafts; verify: queue, forward and")
    console.print("acceptance in the target; overhead: the rest (gateway, control streams). Shares of a round's time.")


def run_dtype(dtype: str, options: argparse.Namespace) -> list[Result]:
    cores = sorted(os.sched_getaffinity(0))
    target = {"model": str(widened(SIZE)), "dtype": dtype, "cpu_cores": str(cores[-1]), "prefix_caching": False}
    draft = {"model": demo_model("draft"), "cpu_cores": str(cores[0]), "prefix_caching": False}
    with running(target, draft) as endpoints:
        return asyncio.run(measure(endpoints.grpc, dtype, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="of the target")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("-K", "--num-draft-tokens", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="prompts in a pass; at least the concurrency")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=5, help="pairs of passes")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    options = parser.parse_args()
    results = [result for dtype in options.dtype for result in run_dtype(dtype, options)]
    show(Console(width=max(Console().width, 180)), results)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
