"""Measure what one caller's streams do to another's: its time between tokens, and the tokens of all.

    make bench-fairness                               # or: python -m benchmarks.fairness --help

One caller has many streams whose requests name 64 draft tokens, or with --plain none; another has one stream with K
left to the system, and a key of --weight, over the 1 of the other. In each repetition the one stream runs alone, then
both callers run beside each other, then the same streams do so with one key, all as one caller: so is every system that
does not share by caller. The last two change places from one repetition to the next. Answers go on without an end;
what is counted is what comes in a window, once all streams run. The target, the demo target widened, has one core, the
demo draft another.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import DEMO_DRAFT, Report, dev_prompts, parser, widened
from benchmarks.running import running
from outrider.client import AsyncClient, GenerateOptions, Speculation
from outrider.wire.settings.api_keys import ApiKey, digest_of, write_keys

ALONE, SHARED, UNSHARED = ARMS = "alone", "two callers", "as one caller"
MOST_TIMES_SLOWER = 2.0
"""Most that the one stream's time between tokens may be at a weight of 1, as a multiple of what it is alone."""
LEAST_THROUGHPUT = 0.95
"""Least tokens a second of all streams, over those without sharing. Not of plain ones, whom sharing costs some."""
ONE, MANY = "one", "many"
"""Keys, and their names."""
NUM_DRAFT_TOKENS = 64
CONTEXT = 1024
"""Tokens of a stream at most."""


@dataclass
class Window:
    """What came while it was open."""

    seconds: float = 0.0
    num_tokens: int = 0
    """Of all streams."""
    one_gaps: list[tuple[float, int]] = field(default_factory=list)
    """Of the one stream: seconds between two of its messages, and the tokens of the second."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def one_tpot_s(self) -> float:
        """Mean seconds between tokens of the one stream."""
        return sum(gap for gap, _ in self.one_gaps) / sum(count for _, count in self.one_gaps)

    @property
    def longest_gap_s(self) -> float:
        return max(gap for gap, _ in self.one_gaps)


class Streams:
    """Answers of both callers, each followed by another, until they are ended."""

    def __init__(self, one: AsyncClient, many: AsyncClient, arm: str, options: argparse.Namespace) -> None:
        self._max_tokens, num_streams = options.max_tokens, options.streams
        self._window = Window()
        self._num_started = 0
        self.all_run = asyncio.Event()
        prompts = dev_prompts(num_streams + 1)
        self._num_streams = 1 if arm == ALONE else num_streams + 1
        named = Speculation(num_draft_tokens=0 if options.plain else NUM_DRAFT_TOKENS)
        auto, client = Speculation(num_draft_tokens="auto"), many if arm == UNSHARED else one
        self._tasks = [asyncio.create_task(self._run(client, prompts[0], auto, is_one=True))]
        for prompt in prompts[1 : self._num_streams]:
            self._tasks.append(asyncio.create_task(self._run(many, prompt, named, is_one=False)))

    async def _run(self, client: AsyncClient, prompt: str, speculation: Speculation, *, is_one: bool) -> None:
        options = GenerateOptions(
            max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True, speculation=speculation, timeout_s=None
        )
        for number in itertools.count():
            before: float | None = None
            async with client.stream(prompt, **options) as stream:
                async for chunk in stream:
                    now = time.perf_counter()
                    if before is None and not number:
                        self._num_started += 1
                        if self._num_started == self._num_streams:
                            self.all_run.set()
                    self._window.num_tokens += len(chunk.tokens)
                    if is_one and before is not None and chunk.tokens:
                        self._window.one_gaps.append((now - before, len(chunk.tokens)))
                    before = now

    async def measure(self, seconds: float) -> Window:
        window = self._window = Window()
        began_s = time.perf_counter()
        await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        window.seconds, self._window = time.perf_counter() - began_s, Window()
        for task in self._tasks:
            if task.done():
                task.result()  # they have no end of their own
        return window

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def measure(address: str, options: argparse.Namespace) -> dict[str, list[Window]]:
    """Return the windows by arm, one a repetition."""
    windows: dict[str, list[Window]] = {arm: [] for arm in ARMS}
    async with (
        AsyncClient(address, timeout_s=None, api_key=ONE) as one,
        AsyncClient(address, timeout_s=None, api_key=MANY) as many,
    ):
        for repetition in range(options.repetitions):
            for arm in (ALONE, *(ARMS[1:] if repetition % 2 else ARMS[:0:-1])):
                streams = Streams(one, many, arm, options)
                await streams.all_run.wait()
                await asyncio.sleep(options.warm_seconds)
                window = await streams.measure(options.seconds)
                await streams.end()
                windows[arm].append(window)
                print(f"{arm}: {1e3 * window.one_tpot_s:.1f} ms, {window.tokens_per_s:.1f} tokens/s", flush=True)
    return windows


@contextmanager
def system(options: argparse.Namespace) -> Iterator[str]:
    """Run target, draft and gateway; yield the gateway's address for gRPC."""
    cores = sorted(os.sched_getaffinity(0))
    cache = {"kv_cache_tokens": (options.streams + 2) * CONTEXT, "prefix_caching": False, "dtype": options.dtype}
    target = {"model": str(widened(options.size, options.dtype)), "cpu_cores": str(cores[-1]), **cache}
    draft = {"model": str(DEMO_DRAFT), "cpu_cores": str(cores[0]), **cache}
    weights = {ONE: options.weight, MANY: 1.0}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.yaml"
        write_keys(file, tuple(ApiKey(name=key, sha256=digest_of(key), weight=weights[key]) for key in weights))
        with running(target, draft, {"max_draft_tokens": NUM_DRAFT_TOKENS, "api_keys": str(file)}) as endpoints:
            yield endpoints.grpc


def show(report: Report, windows: dict[str, list[Window]], options: argparse.Namespace) -> list[str]:
    """Add the table; return what is not as it is wanted."""
    rows = [
        [
            arm,
            f"{1e3 * statistics.median(each.one_tpot_s for each in own):.1f}",
            f"{1e3 * statistics.median(each.longest_gap_s for each in own):.0f}",
            f"{statistics.median(each.tokens_per_s for each in own):.1f}",
        ]
        for arm, own in windows.items()
    ]
    kind = "plain streams" if options.plain else f"streams of {NUM_DRAFT_TOKENS} drafted tokens"
    heading = f"One stream of weight {options.weight:g} beside {options.streams} {kind}"
    report.table(heading, ("", "the one's time between tokens, ms", "its longest gap, ms", "tokens/s of all"), rows)
    slower = {
        arm: [each.one_tpot_s / alone.one_tpot_s for each, alone in zip(windows[arm], windows[ALONE], strict=True)]
        for arm in ARMS[1:]
    }
    pairs = zip(windows[SHARED], windows[UNSHARED], strict=True)
    throughput = [shared.tokens_per_s / unshared.tokens_per_s for shared, unshared in pairs]
    times, most, share = (statistics.median(each) for each in (slower[SHARED], slower[UNSHARED], throughput))
    report.text(
        f"Beside the others the one stream takes {times:.2f} times as long for a token as alone ({most:.2f} times "
        f"without sharing), and all streams together make {share:.2f} times the tokens (medians of "
        f"{options.repetitions} repetitions)."
    )
    report.data |= {
        "one_tpot_s": {arm: [each.one_tpot_s for each in own] for arm, own in windows.items()},
        "tokens_per_s": {arm: [each.tokens_per_s for each in own] for arm, own in windows.items()},
    }
    violations = []
    allowed = 1.0 + (MOST_TIMES_SLOWER - 1.0) / options.weight
    if not times <= allowed:
        violations.append(f"the one stream is {times:.2f} times as slow as alone, above {allowed:g}")
    if not options.plain and not share >= LEAST_THROUGHPUT:
        violations.append(f"all streams make {share:.2f} times the tokens, below {LEAST_THROUGHPUT:g}")
    return violations


def main() -> int:
    sizes = {"size": "94M", "dtype": "float32", "streams": 48, "max_tokens": 640}
    made = parser(__doc__, **sizes, weight=1.0, seconds=15.0, warm_seconds=3.0, repetitions=5)
    made.add_argument("--plain", action="store_true")
    options = made.parse_args()
    report = Report("fairness", "One caller beside another")
    with system(options) as address:
        windows = asyncio.run(measure(address, options))
    violations = show(report, windows, options)
    report.verdict(violations)
    report.write(options.results)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
