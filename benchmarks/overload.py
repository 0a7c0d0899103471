"""Send four times the sustainable load for a minute: do admitted requests feel it, and what do the refused ones get?

    make bench-overload                            # or: python -m benchmarks overload --help

The sustainable rate is that of a closed loop with as many requests as run at once. Then requests come by themselves
(Poisson): at a share of that rate, which is the baseline, since a queue at the full rate grows without bound; at a
multiple of the rate; and at the baseline's again until latency is what it was. All settings but `max_running` are the
defaults. The load comes from a process of its own, which shares the machine's cores with the system.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Sequence

from benchmarks.arrivals import Sustainable, add_latencies, in_own_process, open_loop
from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, Option, Report, dev_prompts
from benchmarks.footprint import Held, left_in, parts_below, watched
from benchmarks.runner import Benchmark
from benchmarks.running import running
from outrider.lab.load.figures import quantile
from outrider.lab.load.load import Load, RequestOutcome

PROMPT_CHARACTERS = 600
NUM_PROMPTS = 48
WINDOW_S = 5.0
"""Seconds of a window of the baseline and of the time afterwards, whose medians are compared."""
MOST_TIMES_SLOWER = 1.5
"""Most that latency under overload may be, as a multiple of the baseline's."""
SHARES = (0.5, 0.95, 0.99)
"""Quantiles of latency that are compared."""
MOST_REFUSAL_S = 0.25
"""Seconds within which ninety-nine refusals in a hundred must come: at once, as far as a client can tell."""
MOST_RECOVERY_S = 15.0
"""Seconds within which latency must be what it was."""
LEAST_SERVED = 0.8
"""Least share of the sustainable rate that must be served under overload."""
MOST_GROWTH_MIB = 64.0
"""MiB that a process may grow by during the overload, over the most that it held in the baseline."""
MIB = 2**20


def add_outcomes(report: Report, phases: dict[str, Sequence[RequestOutcome]], seconds: dict[str, float]) -> list[str]:
    rows, violations = [], []
    for name, phase in phases.items():
        whole, refused = [each for each in phase if each.is_complete], [each for each in phase if each.is_refused]
        waited = [1e3 * each.total_s for each in refused]
        asked_to_wait = Counter(each.retry_after for each in refused)
        faults = [each.fault for each in phase if each.fault is not None]
        rows.append(
            [
                name,
                f"{len(phase) / seconds[name]:.1f}",
                f"{len(whole) / seconds[name]:.1f}",
                str(len(refused)),
                f"{quantile(waited, 0.5):.1f}" if refused else "",
                f"{quantile(waited, 0.99):.1f}" if refused else "",
                ", ".join(f"{value} s" for value in sorted(filter(None, asked_to_wait), key=float)),
                str(len(faults)),
            ]
        )
        if refused and not quantile(waited, 0.99) <= 1e3 * MOST_REFUSAL_S:
            violations.append(f"{name}: refusals took {quantile(waited, 0.99):.0f} ms (p99)")
        if None in asked_to_wait:
            violations.append(f"{name}: {asked_to_wait[None]} refusals without Retry-After")
        violations += [f"{name}: {count} times {fault}" for fault, count in Counter(faults).most_common(5)]
    columns = ("phase", "asked / s", "answered / s", "429", "refused after, p50 ms", "p99 ms", "Retry-After", "faults")
    report.table("What became of them", columns, rows)
    return violations


def add_memory(
    report: Report, seen: dict[str, list[Held]], baseline: Sequence[RequestOutcome], overload: Sequence[RequestOutcome]
) -> list[str]:
    rows, violations = [], []
    for name, samples in seen.items():
        most = [max(each.own_bytes for each in within(samples, phase)) / MIB for phase in (baseline, overload)]
        end = samples[-1].own_bytes / MIB
        rows.append([name, *(f"{value:.1f}" for value in (*most, most[1] - most[0], end))])
        if most[1] - most[0] > MOST_GROWTH_MIB:
            violations.append(f"{name} grew by {most[1] - most[0]:.1f} MiB under overload")
    report.table("Own memory, MiB", ("part", "most in baseline", "most in overload", "more", "at the end"), rows)
    return violations


def within(samples: Sequence[Held], phase: Sequence[RequestOutcome]) -> list[Held]:
    from_s, to_s = phase[0].sent_s, max(asked.ended_s for asked in phase)
    return [each for each in samples if from_s <= each.at_s <= to_s]


def windows(phase: Sequence[RequestOutcome]) -> list[float]:
    """Return the median latency of whole answers sent in each window, in seconds; NaN where there are none."""
    from_s = phase[0].sent_s
    count = int((phase[-1].sent_s - from_s) / WINDOW_S)
    by_window: list[list[float]] = [[] for _ in range(max(1, count))]
    for asked in phase:
        index = int((asked.sent_s - from_s) / WINDOW_S)
        if asked.is_complete and index < len(by_window):
            by_window[index].append(asked.total_s)
    return [quantile(each, 0.5) for each in by_window]


def add_recovery(report: Report, baseline: Sequence[RequestOutcome], afterwards: Sequence[RequestOutcome]) -> list[str]:
    usual = [each for each in windows(baseline) if not math.isnan(each)]
    after = windows(afterwards)
    recovered = next((index for index, median in enumerate(after) if median <= max(usual)), None)
    report.data["windows_s"] = {"baseline": usual, "afterwards": after}
    spread = f"{1e3 * min(usual):.0f} to {1e3 * max(usual):.0f} ms"
    if recovered is None:
        report.text(f"In no window of {WINDOW_S:g} s afterwards was the median one of the baseline's, {spread}.")
        return ["latency did not recover"]
    later = [each.total_s for each in afterwards[len(afterwards) // 2 :] if each.is_complete]
    report.text(
        f"Windows of {WINDOW_S:g} s have medians of {spread} in the baseline. Afterwards, window {recovered + 1} is "
        f"within that again: {1e3 * after[recovered]:.0f} ms, for requests sent {recovered * WINDOW_S:g} to "
        f"{(recovered + 1) * WINDOW_S:g} s after the overload. Median of the second half of the time afterwards: "
        f"{1e3 * quantile(later, 0.5):.0f} ms."
    )
    violations = []
    if recovered * WINDOW_S > MOST_RECOVERY_S:
        violations.append(f"latency recovered only {recovered * WINDOW_S:g} s after the overload")
    if not quantile(later, 0.5) <= max(usual):
        violations.append("latency did not stay what it was before the overload")
    return violations


def add_rates(report: Report, rate: float, overload: Sequence[RequestOutcome], seconds: float) -> list[str]:
    served = sum(each.is_complete for each in overload) / seconds
    report.text(f"Answered under overload: {served:.1f} a second, {served / rate:.2f} of the sustainable rate.")
    return [f"only {served / rate:.2f} of the sustainable rate was answered"] if served < LEAST_SERVED * rate else []


def measure(report: Report, options: argparse.Namespace) -> list[str]:
    """Run all phases and return the violations."""
    report.text(
        f"The demo pair as `outrider up` places it on {len(os.sched_getaffinity(0))} cores, with max_running "
        f"{options.max_running} and otherwise the default settings. Streams over HTTP, prompts of {PROMPT_CHARACTERS} "
        f"characters or less that share no cached prefix, {options.max_tokens} tokens an answer, temperatures 0 and "
        f"0.8 in turn; the load is one process on the same cores. {options.seconds:g} s at {options.baseline:g} times "
        f"the sustainable rate, as long at {options.times:g} times it, half as long at {options.baseline:g} times it "
        "again; arrivals are Poisson, and nobody who is refused asks again."
    )
    prompts = tuple(prompt[-PROMPT_CHARACTERS:] for prompt in dev_prompts(NUM_PROMPTS))
    gateway = {"max_running": options.max_running}
    with running({"model": str(DEMO_TARGET)}, {"model": str(DEMO_DRAFT)}, gateway) as endpoints:
        load = Load(f"http://{endpoints.http}", prompts, options.max_tokens, shared_prefixes=False)
        Sustainable.of(load, options.max_running, options.closed_s / 3)  # warm
        closed = Sustainable.of(load, options.max_running, options.closed_s)
        rate = closed.rate
        whole_ms = 1e3 * quantile([each.total_s for each in closed.outcomes], 0.5)
        first_ms = 1e3 * quantile([each.first_token_s for each in closed.outcomes if each.is_complete], 0.5)
        report.text(
            f"Sustainable: {rate:.1f} requests a second, from a closed loop of {options.max_running}, whose whole "
            f"answers take {whole_ms:.0f} ms (median) and first tokens {first_ms:.0f} ms."
        )
        seconds = {"baseline": options.seconds, "overload": options.seconds, "afterwards": options.seconds / 2}
        factors = (options.baseline, options.times, options.baseline)
        with watched(parts_below(), 1.0) as seen:
            phases = [(rate * factor, each) for factor, each in zip(factors, seconds.values(), strict=True)]
            asked = dict(zip(seconds, in_own_process(open_loop, load, phases), strict=True))
        left = left_in(endpoints)
    compared = {name: asked[name] for name in ("baseline", "overload")}
    max_ratios = dict.fromkeys(SHARES, MOST_TIMES_SLOWER)
    violations = add_latencies(report, "Latency of requests that were let in, ms", compared, SHARES, max_ratios)
    violations += add_outcomes(report, asked, seconds)
    violations += add_rates(report, rate, asked["overload"], seconds["overload"])
    violations += add_memory(report, seen, asked["baseline"], asked["overload"])
    violations += add_recovery(report, asked["baseline"], asked["afterwards"])
    report.data["rate_per_s"] = rate
    report.data["own_mib"] = {name: [each.own_bytes / MIB for each in samples] for name, samples in seen.items()}
    return violations + left


BENCHMARK = Benchmark(
    "Overload",
    measure,
    {
        "seconds": 60.0,
        "closed_s": 30.0,
        "max_running": 4,
        "max_tokens": 64,
        "times": Option(4.0, "the sustainable rate"),
        "baseline": Option(0.8, "share of the sustainable rate before and after"),
    },
    well=f"Latency is within {MOST_TIMES_SLOWER:g} times the baseline's, 99 refusals in 100 took at most "
    f"{1e3 * MOST_REFUSAL_S:g} ms and all said when to come back, every answer was whole, no process grew by "
    f"more than {MOST_GROWTH_MIB:g} MiB, and afterwards nothing held a slot, block, ticket or place.",
)
