"""Check that adaptive K is never slower than plain decoding, from 1 to 64 answers at once, with four drafts.

    make bench-never-slower                           # or: python -m benchmarks.never_slower --help

The target, the demo target widened, has one core, each draft the other: the demo draft (good), one like it with random
weights (poor), the demo draft behind a network that delays every byte by 50 ms (slow), and none (absent). Each has a
gateway of its own before the same target, so that no gateway learns from another's drafts. In each repetition plain
decoding and `auto` take turns, in another order each time; a ratio is that of two such passes, and a cell whose
interval has the wanted ratio in it is measured more often. Plain decoding on all cores is another target.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, Report, dev_prompts, parser, random_draft, spread, widened
from benchmarks.passes import Ratio, Sample, run_pass, take_turns
from outrider.client import AsyncClient, Speculation
from tests.stack import Process, stop_all
from tests.tcp_relay import TcpRelay

GOOD, POOR, SLOW, ABSENT = DRAFTS = "good", "poor", "slow", "absent"
OFF, AUTO = "off", "auto"
ARMS: Mapping[str, Speculation] = {OFF: Speculation(enabled=False), AUTO: Speculation(num_draft_tokens="auto")}
DELAY_S = 0.05
"""Seconds by which the slow draft's network delays every byte."""
LEAST_RATIO = 0.97
"""Least median speed of `auto` over plain decoding, in every cell."""
LEAST_GAIN = 1.1
"""Least median speed of `auto` over plain decoding with a good draft and one answer at once: a server that never
drafts is never slower either."""
FEW_PROMPTS = 4
TWO_WAVES = 4
"""Answers at once up to which a pass has two for each."""
WARM_TOKENS = 32


def num_prompts(concurrency: int) -> int:
    """Return the prompts of a pass.

    A pass of few answers at once has two for each, so that one late answer is not all that is seen; one of many has one
    for each, so that the arms take turns often.
    """
    return max(FEW_PROMPTS, 2 * concurrency if concurrency <= TWO_WAVES else concurrency)


@dataclass(frozen=True)
class Cell:
    """Passes of one draft at one concurrency, one a repetition."""

    least: float
    """Least median ratio that is wanted."""
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {name: [] for name in ARMS})

    @property
    def ratio(self) -> Ratio:
        pairs = zip(self.samples[AUTO], self.samples[OFF], strict=True)
        return Ratio.of([[auto.tokens_per_s / off.tokens_per_s] for auto, off in pairs])

    @property
    def is_settled(self) -> bool:
        """Whether the interval lies wholly above or wholly below the wanted ratio."""
        ratio = self.ratio
        return ratio.low >= self.least or ratio.high < self.least

    @property
    def drafted_per_round(self) -> float:
        """Mean K of `auto`, rounds without drafts included."""
        rounds = [item for sample in self.samples[AUTO] for item in sample.rounds]
        return sum(item.num_drafted for item in rounds) / len(rounds)


@contextlib.asynccontextmanager
async def started(arguments: Sequence[tuple[str, Sequence[str]]]) -> AsyncIterator[list[Process]]:
    """Run processes side by side, (module, arguments) of each."""
    processes: list[Process] = []
    try:
        for module, args in arguments:
            processes.append(Process(module, list(args), wait=False))
        for process in processes:
            await asyncio.to_thread(lambda process=process: process.ready)
        yield processes
    finally:
        await asyncio.to_thread(stop_all, processes)


def worker(model: Path, cores: str, options: argparse.Namespace) -> list[str]:
    kv_cache_tokens = 64 * (options.prompt_tokens + options.max_tokens + 32)
    return [
        *("--model", str(model), "--cpu-cores", cores, "--dtype", options.dtype),
        *("--kv-cache-tokens", str(kv_cache_tokens), "--no-prefix-caching"),
    ]


def gateway(*args: str) -> tuple[str, list[str]]:
    return "gateway", ["--port", "0", "--grpc-port", "0", *args]


async def measure(
    address: str, prompts: Sequence[list[int]], draft: str, options: argparse.Namespace
) -> dict[int, Cell]:
    """Return the cells by concurrency."""
    cells = {
        concurrency: Cell(LEAST_GAIN if (draft, concurrency) == (GOOD, 1) else LEAST_RATIO)
        for concurrency in options.concurrency
    }
    async with AsyncClient(address) as client:
        await run_pass(
            client, prompts[:2], concurrency=2, temperature=0.0, max_tokens=WARM_TOKENS, speculation=ARMS[OFF]
        )
        for concurrency, cell in cells.items():
            stop_s = time.monotonic() + options.most_seconds

            def goes_on(repetition: int, cell: Cell = cell, stop_s: float = stop_s) -> bool:
                return repetition < options.repetitions or not (cell.is_settled or time.monotonic() > stop_s)

            print(f"{draft} draft:")
            await take_turns(
                client,
                prompts[: num_prompts(concurrency)],
                ARMS,
                cell.samples,
                itertools.takewhile(goes_on, itertools.count()),
                concurrency=concurrency,
                temperature=options.temperature,
                max_tokens=options.max_tokens,
            )
    return cells


async def measure_all(prompts: Sequence[list[int]], options: argparse.Namespace) -> dict[str, dict[int, Cell]]:
    """Return the cells by draft and concurrency."""
    first, last = (str(sorted(os.sched_getaffinity(0))[at]) for at in (0, -1))
    target = worker(widened(options.size, options.dtype), last, options)
    found: dict[str, dict[int, Cell]] = {}
    async with started([("target_service", target)]) as (target_process,):
        for draft in options.only:
            model = random_draft() if draft == POOR else DEMO_DRAFT
            parts = ["--target", target_process.address]
            async with contextlib.AsyncExitStack() as stack:
                if draft != ABSENT:
                    (process,) = await stack.enter_async_context(
                        started([("draft_service", worker(model, first, options))])
                    )
                    parts += ["--draft", process.address]
                if draft == SLOW:
                    relay = await stack.enter_async_context(TcpRelay(parts[-1]))
                    relay.delay_s, parts[-1] = DELAY_S, relay.address
                (front,) = await stack.enter_async_context(started([gateway(*parts)]))
                found[draft] = await measure(str(front.ready["grpc"]), prompts, draft, options)
    return found


async def measure_all_cores(prompts: Sequence[list[int]], options: argparse.Namespace) -> dict[int, float]:
    """Return the tokens per second of plain decoding by concurrency."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    target = worker(widened(options.size, options.dtype), cores, options)
    found: dict[int, float] = {}
    async with (
        started([("target_service", target)]) as (process,),
        started([gateway("--target", process.address)]) as (front,),
        AsyncClient(str(front.ready["grpc"])) as client,
    ):
        for concurrency in (2, *options.concurrency):  # the first warms
            samples: dict[str, list[Sample]] = {}
            some, how = prompts[: num_prompts(concurrency)], {"concurrency": concurrency}
            how |= {"temperature": options.temperature, "max_tokens": options.max_tokens}
            await take_turns(client, some, {"plain on all cores": False}, samples, range(1), **how)
            found[concurrency] = samples["plain on all cores"][0].tokens_per_s
    return found


def add_cells(report: Report, found: Mapping[str, Mapping[int, Cell]], all_cores: Mapping[int, float]) -> list[str]:
    """Add the tables and return the violations."""
    wrong = []
    for draft, cells in found.items():
        rows = []
        for concurrency, cell in cells.items():
            rates = {arm: [sample.tokens_per_s for sample in cell.samples[arm]] for arm in ARMS}
            ratio = cell.ratio
            row = [str(concurrency), str(len(rates[OFF])), spread(rates[OFF]), spread(rates[AUTO]), str(ratio)]
            beside = all_cores.get(concurrency)
            plain = "" if beside is None else f"{beside:.1f}"
            over = "" if beside is None else f"{statistics.median(rates[AUTO]) / beside:.2f}"
            rows.append([*row, f"{cell.drafted_per_round:.2f}", plain, over])
            if ratio.middle < cell.least:
                wrong.append(f"{draft} draft, {concurrency} at once: {ratio} of plain, at least {cell.least:g} wanted")
        columns = ["at once", "pairs", "plain, tok/s", "auto, tok/s", "auto / plain", "mean K"]
        columns += ["plain on all cores, tok/s", "auto / plain on all cores"]
        report.table(f"{draft.capitalize()} draft", columns, rows)
        report.data[draft] = {
            str(concurrency): {arm: [sample.tokens_per_s for sample in cell.samples[arm]] for arm in ARMS}
            for concurrency, cell in cells.items()
        }
    report.data["all cores"] = {str(concurrency): rate for concurrency, rate in all_cores.items()}
    return wrong


def main() -> int:
    made = parser(
        __doc__,
        size="111M",
        dtype="float32",
        concurrency=[1, 2, 4, 8, 16, 32, 64],
        temperature=0.0,
        prompt_tokens=32,
        max_tokens=48,
        repetitions=6,
    )
    made.add_argument("--only", nargs="+", default=list(DRAFTS), choices=DRAFTS, help="drafts")
    made.add_argument("--most-seconds", type=float, default=120.0, help="of a cell that is not settled")
    made.add_argument("--no-all-cores", action="store_true", help="leave plain decoding on all cores out")
    options = made.parse_args()
    report = Report("never-slower", "K that adapts, and plain decoding")
    report.text(
        f"The demo pair, its target WIDENED to {options.size}, {options.dtype}, a core each; prompts of "
        f"{options.prompt_tokens} tokens or less, {options.max_tokens} tokens an answer, T = {options.temperature:g}, "
        f"prefix caches off, {options.repetitions} repetitions, and more for up to {options.most_seconds:g} s while "
        f"the interval has {LEAST_RATIO:g} in it ({LEAST_GAIN:g} for a good draft and one answer). auto / plain: "
        "median over pairs, in brackets the interval of 95 % from a bootstrap over them, with few all that there were."
    )
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    texts = dev_prompts(max(map(num_prompts, options.concurrency)))
    prompts = [tokenizer.encode(text).ids[-options.prompt_tokens :] for text in texts]
    found = asyncio.run(measure_all(prompts, options))
    all_cores = {} if options.no_all_cores else asyncio.run(measure_all_cores(prompts, options))
    wrong = add_cells(report, found, all_cores)
    middle = statistics.median(cell.ratio.middle for cells in found.values() for cell in cells.values())
    report.text(f"The median cell is {middle:.3f} times as fast with auto as plain.")
    report.verdict(wrong)
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
