"""Keep a steady load for half an hour: does any process grow, does anything fail, does acceptance drift?

    make bench-soak ARGS='--minutes 30'                  # or: python -m benchmarks soak --help

The system is what `outrider up` starts: Ray, the launcher, its workers and a gateway; `--no-ray` for plain processes.
Poisson arrivals at a share of the sustainable rate, which a closed loop finds first. Slopes are Theil and Sen's, the
median of those between any two samples, with their 95 % intervals: a stray sample does not move them. Nor does a step,
so the first tenth of the run is compared with the last as well.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from scipy.stats import theilslopes

from benchmarks.arrivals import Sustainable, add_latencies, in_own_process, open_loop
from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, Option, Report, dev_prompts
from benchmarks.footprint import RAYS_OWN, Held, left_in, parts_below, repeated, watched
from benchmarks.runner import Benchmark
from benchmarks.running import running
from outrider.cli.monitor.series import Scrape
from outrider.lab.load.figures import quantile
from outrider.lab.load.load import Load, RequestOutcome

MIB = 2**20
SAMPLES = 240
"""Samples of each process over the run."""
FLAT_SHARE, FLAT_MIB = 0.01, 4.0
"""A process is flat when its slope takes it no further than the larger of these over the run."""
MOST_DRIFT = 0.02
"""Most by which the acceptance rate may drift over the run."""
MOST_TIMES_SLOWER = 1.25
"""Median latency of the last tenth of the answers, over that of the first."""
MORE_FILES, MORE_THREADS = 4, 2
"""Files and threads that a process may hold more than at the beginning: connections of clients come and go, and
pools of threads start one when they first need it."""


@dataclass(frozen=True)
class Slope:
    """A change per hour, with the ends of its interval."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, times_s: Sequence[float], values: Sequence[float]) -> Slope:
        found = theilslopes(values, [each / 3600.0 for each in times_s])
        return cls(float(found.slope), float(found.low_slope), float(found.high_slope))

    def __str__(self) -> str:
        return f"{self.middle:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


@dataclass(frozen=True)
class DraftCounts:
    """Tokens over all pairs of models, by the gateway's counts."""

    at_s: float
    """Monotonic time."""
    num_drafted: float
    num_accepted: float

    @classmethod
    def read(cls, url: str) -> DraftCounts:
        """Read them from the gateway's metrics."""
        scrape = Scrape.parse(httpx.get(f"{url}/metrics").text, time.monotonic())
        num_drafted = sum(value for _, value in scrape.find("spec_draft_tokens_total"))
        num_accepted = sum(value for _, value in scrape.find("spec_accepted_tokens_total"))
        return cls(scrape.at_s, num_drafted, num_accepted)


def tenths(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the first and the last tenth."""
    size = max(1, len(values) // 10)
    return values[:size], values[-size:]


def add_footprint(report: Report, seen: dict[str, list[Held]]) -> list[str]:
    """Add the table and return the violations. Ray's own processes are shown and not judged."""
    rows, violations = [], []
    most_samples = max(len(samples) for samples in seen.values())
    for name, samples in seen.items():
        ours = not name.startswith(RAYS_OWN)
        if ours and len(samples) < most_samples - 1:
            violations.append(f"{name} ended while the load went on")
        if len(samples) < 2:  # one alone makes no slope
            continue
        row, found = _judged(name, samples)
        rows.append(row)
        violations += found if ours else []
    columns = ("part", "first tenth", "last tenth", "most", "RSS, median", "slope, MiB / h (95 %)", "files", "threads")
    report.table("Own memory in MiB, open files and threads, from the end of the warm-up on", columns, rows)
    report.data["held"] = {
        name: [[each.at_s - samples[0].at_s, each.own_bytes, each.rss_bytes, each.num_files] for each in samples]
        for name, samples in seen.items()
    }
    return violations


def _judged(name: str, samples: Sequence[Held]) -> tuple[list[str], list[str]]:
    """Return a row of the table, and the violations."""
    times_s = [each.at_s for each in samples]
    hours = (times_s[-1] - times_s[0]) / 3600.0
    own = [each.own_bytes / MIB for each in samples]
    slope, (first, last) = Slope.of(times_s, own), (quantile(each, 0.5) for each in tenths(own))
    files, threads = ([getattr(each, kind) for each in samples] for kind in ("num_files", "num_threads"))
    row = [
        name,
        f"{first:.1f}",
        f"{last:.1f}",
        f"{max(own):.1f}",
        f"{quantile([each.rss_bytes / MIB for each in samples], 0.5):.1f}",
        str(slope),
        f"{min(files)} to {max(files)}, {files[-1]} at the end",
        f"{min(threads)} to {max(threads)}",
    ]
    violations = []
    most = max(FLAT_SHARE * first, FLAT_MIB)
    if slope.middle * hours > most:
        violations.append(f"{name} grows by {slope} MiB an hour: {slope.middle * hours:.1f} MiB in this run")
    if last - first > most:
        violations.append(f"{name} has {last - first:.1f} MiB more in the last tenth of the run than in the first")
    if files[-1] > files[0] + MORE_FILES:
        violations.append(f"{name} has {files[-1]} files open at the end, {files[0]} at the beginning")
    if threads[-1] > threads[0] + MORE_THREADS:
        violations.append(f"{name} has {threads[-1]} threads at the end, {threads[0]} at the beginning")
    return row, violations


def add_acceptance(report: Report, counts: Sequence[DraftCounts], every_s: float) -> list[str]:
    """Add the acceptance rate between each two readings; return the violations."""
    times_s, rates = list[float](), list[float]()
    for before, after in itertools.pairwise(counts):
        if after.num_drafted > before.num_drafted:
            times_s.append(after.at_s)
            rates.append((after.num_accepted - before.num_accepted) / (after.num_drafted - before.num_drafted))
    if len(rates) < 2:
        return ["nothing was drafted"]
    slope, (early, late) = Slope.of(times_s, rates), tenths(rates)
    first, last = quantile(early, 0.5), quantile(late, 0.5)
    drift = slope.middle * (times_s[-1] - times_s[0]) / 3600.0
    report.text(
        f"Acceptance rate per {every_s:g} s: {min(rates):.3f} to {max(rates):.3f}, median "
        f"{quantile(rates, 0.5):.3f}; slope per hour {slope.middle:+.4f} ({slope.low:+.4f} to {slope.high:+.4f}); "
        f"{first:.3f} in the first tenth, {last:.3f} in the last."
    )
    report.data["acceptance"] = rates
    violations = []
    if abs(drift) > MOST_DRIFT and not slope.low <= 0.0 <= slope.high:
        violations.append(f"acceptance drifts by {drift:+.3f} in this run")
    if abs(last - first) > MOST_DRIFT and (min(late) > max(early) or max(late) < min(early)):
        violations.append(f"acceptance is {first:.3f} in the first tenth of the run and {last:.3f} in the last")
    return violations


def add_requests(report: Report, asked: Sequence[RequestOutcome]) -> list[str]:
    ends = [each for each in asked if not each.is_complete]
    took_s = asked[-1].sent_s - asked[0].sent_s
    first, last = tenths([each for each in asked if each.is_complete])
    compared = {"first tenth": first, "last tenth": last}
    violations = add_latencies(report, "Latency, ms", compared, (0.5, 0.99), {0.5: MOST_TIMES_SLOWER})
    report.text(f"{len(asked)} requests, {len(asked) / took_s:.1f} a second; {len(ends)} did not get their answer.")
    faults = Counter(each.fault or str(each.status) for each in ends)
    return violations + [f"{count} times {why}" for why, count in faults.items()]


def measure(report: Report, options: argparse.Namespace) -> list[str]:
    """Run the load and return the violations."""
    report.text(
        f"The demo pair as `outrider up{'' if options.ray else ' --no-ray'}` places it on "
        f"{len(os.sched_getaffinity(0))} cores, streams over HTTP, "
        f"{options.max_tokens} tokens an answer, temperatures 0 and 0.8 in turn; the load is one process on the same "
        f"cores. {options.minutes:g} minutes. Own memory: resident pages that are no file's."
    )
    prompts = tuple(dev_prompts(48))
    gateway = {"max_running": options.max_running, "num_draft_tokens": 5}  # both workers work all the time
    pair = {"model": str(DEMO_TARGET)}, {"model": str(DEMO_DRAFT)}
    with running(*pair, gateway, with_ray=options.ray) as endpoints:
        load = Load(f"http://{endpoints.http}", prompts, options.max_tokens)
        full = Sustainable.of(load, options.max_running, options.closed_s).rate
        rate, seconds = full * options.share, 60.0 * options.minutes
        report.text(
            f"{rate:.1f} requests a second, {100 * options.share:g} % of the {full:.1f} of a closed loop of "
            f"{options.max_running}; {options.warm_up_s:g} s of warm-up at that rate, not measured."
        )
        in_own_process(open_loop, load, [(rate, options.warm_up_s)])
        every_s = min(30.0, seconds / 60)
        parts = parts_below(endpoints.workers)
        counts = list[DraftCounts]()

        def read_counts() -> None:
            counts.append(DraftCounts.read(load.url))

        with repeated(read_counts, every_s), watched(parts, seconds / SAMPLES) as seen:
            (asked,) = in_own_process(open_loop, load, [(rate, seconds)])
        left = left_in(endpoints)
    violations = add_footprint(report, seen)
    violations += add_acceptance(report, counts, every_s)
    violations += add_requests(report, asked)
    return violations + left


BENCHMARK = Benchmark(
    "A steady load for long",
    measure,
    {
        "minutes": 30.0,
        "closed_s": 30.0,
        "warm_up_s": 180.0,
        "max_running": 16,
        "max_tokens": 64,
        "share": Option(0.6, "of the sustainable rate"),
        "ray": Option(True, "the launcher starts the workers; otherwise they are plain processes"),
    },
    well="Memory is flat (neither its slope nor its last tenth takes a process of Outrider's further than 1 % or "
    "4 MiB from the first), every request had its whole answer, neither acceptance nor median latency drifts, "
    "and afterwards nothing held a slot, block, ticket or place.",
)
