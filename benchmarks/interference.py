"""Measure how much running streams feel of a long prompt that arrives among them.

    python -m benchmarks.interference                # 6,000 tokens among 16 streams, a random-weight Llama of 94M

Each repetition runs the streams alone, then sends the prompt and goes on until its first token has come. Inter-token
latency is the time between two messages of a stream, at the client. Weights are random: only times matter here, and the
context is longer than the demo target's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import Report, random_94m
from benchmarks.running import running
from outrider.client import AsyncClient
from outrider.lab.load.figures import quantile

CONTEXT = 8192
"""Tokens of the model's context."""
STREAM_PROMPT = 64
"""Tokens of a running stream's prompt."""
VOCAB_SIZE = 4096


@dataclass
class Gaps:
    """Seconds between tokens over all streams, by what happened meanwhile."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    """Gaps while the long prompt was being fed."""
    first_token: list[float] = field(default_factory=list)
    """Seconds to the long prompt's first token."""


def some_ids(count: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(1, VOCAB_SIZE) for _ in range(count)]


class Streams:
    """Answers that run until they are ended, and the gaps between their tokens."""

    def __init__(self, client: AsyncClient, count: int) -> None:
        self._client = client
        self._gaps: list[float] | None = None
        self.all_run = asyncio.Event()
        self._num_started = 0
        self.tasks = [asyncio.create_task(self._run(index)) for index in range(count)]

    def record(self, gaps: list[float]) -> None:
        """Append the gaps that end from now on to this list."""
        self._gaps = gaps

    async def _run(self, index: int) -> None:
        before: float | None = None
        ids, room = some_ids(STREAM_PROMPT, index), CONTEXT - STREAM_PROMPT
        options = {"max_tokens": room, "temperature": 0.0, "ignore_eos": True, "speculation": False}
        async with self._client.stream(prompt_ids=ids, **options) as stream:  # type: ignore[arg-type]
            async for _ in stream:
                now = time.perf_counter()
                if before is None:
                    self._num_started += 1
                    if self._num_started == len(self.tasks):
                        self.all_run.set()
                elif self._gaps is not None:
                    self._gaps.append(now - before)
                before = now

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def measure(address: str, options: argparse.Namespace) -> Gaps:
    gaps = Gaps()
    async with AsyncClient(address, timeout_s=None) as client:
        for repetition in range(options.repetitions):
            streams = Streams(client, options.streams)
            await streams.all_run.wait()
            streams.record(gaps.alone)
            await asyncio.sleep(options.seconds)
            streams.record(gaps.beside)
            sent = time.perf_counter()
            prompt = some_ids(options.prompt_tokens, 1000 + repetition)
            await client.generate(prompt_ids=prompt, max_tokens=1, temperature=0.0, speculation=False, ignore_eos=True)
            gaps.first_token.append(time.perf_counter() - sent)
            await streams.end()
    return gaps


def show(report: Report, gaps: Gaps, options: argparse.Namespace) -> None:
    shares = (0.5, 0.9, 0.99)
    rows = [
        [name, *(f"{1e3 * quantile(values, share):.1f}" for share in shares), str(len(values))]
        for name, values in (("alone", gaps.alone), ("beside the prompt", gaps.beside))
    ]
    ratios = [quantile(gaps.beside, share) / quantile(gaps.alone, share) for share in shares]
    rows.append(["ratio", *(f"{ratio:.2f}" for ratio in ratios), ""])
    heading = f"Inter-token latency of {options.streams} streams, ms"
    report.table(heading, ["", "p50", "p90", "p99", "tokens"], rows)
    first = statistics.median(gaps.first_token)
    report.text(
        f"A prompt of {options.prompt_tokens} tokens among them has its first token after {first:.1f} s (median of "
        f"{len(gaps.first_token)}). The p99 of the streams rises {ratios[-1]:.2f} times."
    )
    report.data |= {"alone_s": gaps.alone, "beside_s": gaps.beside, "first_token_s": gaps.first_token}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    parser.add_argument("--seconds", type=float, default=10.0, help="that the streams run alone, each repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--model", type=Path, help="another folder; its context must hold the prompt")
    parser.add_argument("--dry", action="store_true", help="print, but write no result file")
    options = parser.parse_args()
    folder = options.model or random_94m(CONTEXT)
    cores = sorted(os.sched_getaffinity(0))
    target = {
        "model": str(folder),
        "cpu_cores": str(cores[-1]),
        "kv_cache_tokens": (options.streams + 3) * 2048 + CONTEXT,
        "prefix_caching": False,
    }
    report = Report("interference", "A long prompt among running streams")
    with running(target, None) as endpoints:
        gaps = asyncio.run(measure(endpoints.grpc, options))
    show(report, gaps, options)
    if not options.dry:
        report.write()


if __name__ == "__main__":
    main()
