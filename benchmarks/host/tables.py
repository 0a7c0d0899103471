"""The tables of the report: cells, the cost of a step, and two systems beside each other."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from benchmarks.common import Report
from benchmarks.host.accounts import DRAFT, GATEWAY, PROCESSES, TARGET, StepCost, geometric_mean
from benchmarks.host.cells import DELIVERIES, NUM_AT_ONCE, PLAIN, SAMPLINGS, SPECULATIONS, Cell, Pass

Passes = Mapping[Cell, Sequence[Pass]]
"""By cell, one a repetition."""
MAX_MEAN, MAX_CELL = 1.02, 1.05
"""Largest host time over the other checkout's: the geometric mean over all cells, and the low end of a cell's interval.
"""
MAX_EVENTS_APART = 0.05
"""Largest difference between the events of two passes that are compared, over those of one."""


def add_cells(report: Report, found: Passes) -> None:
    """Add a table for each speculation: CPU time a token of each process, speed, events and waits."""
    columns = ["sampling, delivery, answers at once", "tok/s", *(f"{name}, us" for name in PROCESSES)]
    columns += ["together, us", "target's forward, us", "draft's forward, us", "tokens a slot and step"]
    columns += ["events", "next token p50, ms", "p99, ms"]
    for speculation in SPECULATIONS:
        cells = [cell for cell in found if cell.speculation == speculation]
        rows = [[f"{cell.sampling}, {cell.delivery}, {cell.num_at_once}", *_row(found[cell])] for cell in cells]
        report.table(f"{speculation}: CPU time a token", columns, rows)
    report.text(
        "us: microseconds of CPU time a token by the operating system's accounts, all threads and children; the median "
        "of the passes. Of target and draft the time in the model's forward is taken off and stands apart. Events: of "
        "a pass, sent to the client. Next token: between two arrivals of an answer at the client, which may bring "
        "several tokens; over all passes."
    )
    report.data["cells"] = {str(cell): [_facts(each) for each in passes] for cell, passes in found.items()}


def _row(passes: Sequence[Pass]) -> list[str]:
    times_us = [_median(each.us_a_token(each.spent.host_s(name)) for each in passes) for name in PROCESSES]
    times_us.append(_median(each.host_us for each in passes))
    for name in (TARGET, DRAFT):
        times_us.append(_median(each.us_a_token(each.spent.forwards[name].cpu_s) for each in passes))
    tokens = _median(each.num_tokens / each.spent.forwards[TARGET].num_slots for each in passes)
    return [_speed(passes), *(f"{time_us:.0f}" for time_us in times_us), f"{tokens:.2f}", *_arrivals(passes)]


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _speed(passes: Sequence[Pass]) -> str:
    return f"{_median(each.tokens_per_s for each in passes):.0f}"


def _arrivals(passes: Sequence[Pass]) -> list[str]:
    """Return events, and the 50th and 99th percentile of the time to the next token in milliseconds."""
    gaps_s = [gap_s for each in passes for gap_s in each.gaps_s]
    if not gaps_s:
        return ["", "", ""]
    p50_s, p99_s = np.quantile(gaps_s, (0.5, 0.99))
    return [f"{_median(each.num_events for each in passes):.0f}", f"{1e3 * p50_s:.2f}", f"{1e3 * p99_s:.2f}"]


def _facts(each: Pass) -> dict[str, object]:
    return {
        "seconds": each.seconds,
        "tokens": each.num_tokens,
        "events": each.num_events,
        "cpu_s": dict(each.spent.cpu_s),
        "forward_s": {name: counts.cpu_s for name, counts in each.spent.forwards.items()},
        "steps": {name: counts.num_steps for name, counts in each.spent.forwards.items()},
        "slots": {name: counts.num_slots for name, counts in each.spent.forwards.items()},
    }


def add_steps(report: Report, found: Passes) -> None:
    """Add what a step of the target costs each process by its slots: a line over all numbers of answers at once."""
    parts: dict[str, Callable[[Pass], float]] = {
        GATEWAY: lambda each: each.spent.host_s(GATEWAY),
        TARGET: lambda each: each.spent.host_s(TARGET),
        DRAFT: lambda each: each.spent.host_s(DRAFT),
        "together": lambda each: each.spent.total_host_s,
        "target's forward": lambda each: each.spent.forwards[TARGET].cpu_s,
    }
    columns = ["speculation, sampling, delivery"]
    for name in parts:
        columns += [f"{name}: fixed, us", "a slot, us"]
    rows = list[list[str]]()
    for arm in itertools.product(SPECULATIONS, SAMPLINGS, DELIVERIES):
        passes = [each for num in NUM_AT_ONCE for each in found[Cell(*arm, num)]]
        row = [", ".join(arm)]
        for name, seconds in parts.items():
            is_idle = arm[0] == PLAIN and name == DRAFT
            row += ["idle", ""] if is_idle else _line(_fit(passes, seconds))
        off = _fit(passes, parts["together"]).max_error
        rows.append([*row, f"{100 * off:.0f} %"])
    report.table("A step of the target by its slots", [*columns, "off the line, together"], rows)
    report.text(
        "CPU time of a step of the target as a straight line over its slots, fitted to all passes at "
        f"{', '.join(map(str, NUM_AT_ONCE))} answers at once by their relative error, forwards taken off. Requests "
        "and prompts are in it. Slots of a step: the mean of the pass. Off the line: the largest distance of a pass "
        "from it. A draft under auto steps in some passes and not in others, so its line says little."
    )


def _fit(passes: Sequence[Pass], seconds: Callable[[Pass], float]) -> StepCost:
    steps = [each.spent.forwards[TARGET] for each in passes]
    slots = [step.num_slots / step.num_steps for step in steps]
    took_s = [seconds(each) / step.num_steps for each, step in zip(passes, steps, strict=True)]
    return StepCost.fit(slots, took_s)


def _line(cost: StepCost) -> list[str]:
    return [f"{1e6 * cost.fixed_s:.0f}", f"{1e6 * cost.slot_s:.1f}"]


def add_vllm(report: Report, ours: Passes, theirs: Passes) -> None:
    """Add vLLM's server beside Outrider's, forwards included in both."""
    columns = ["plain, streamed", "system", "tok/s", "CPU a token, us", "CPU an event, us", "events"]
    columns += ["next token p50, ms", "p99, ms", "CPU a token over vLLM's", "pairs"]
    rows = list[list[str]]()
    for cell, passes in theirs.items():
        for name, own in (("Outrider", ours[cell]), ("vLLM", passes)):
            cpu_us = f"{_median(each.cpu_us for each in own):.0f}"
            event_us = f"{_median(1e6 * each.spent.total_cpu_s / each.num_events for each in own):.0f}"
            rows.append([f"{cell.sampling}, {cell.num_at_once}", name, _speed(own), cpu_us, event_us, *_arrivals(own)])
        rows[-2] += _over_vllm(ours[cell], passes)
        rows[-1] += ["", ""]
    report.table("Beside vLLM", columns, rows)
    report.text(
        "Forwards are in both: those of vLLM are not counted apart. Pairs: those whose numbers of events differ by at "
        f"most {100 * MAX_EVENTS_APART:g} %, of which the ratio is; a server that lags behind its engine sends "
        "several tokens in an event. Each was idle while the other was measured."
    )
    report.data["vllm"] = {str(cell): [_facts(each) for each in passes] for cell, passes in theirs.items()}


def _over_vllm(ours: Sequence[Pass], theirs: Sequence[Pass]) -> list[str]:
    """Return the ratio of CPU time a token over pairs with equal numbers of events, and how many those are."""
    pairs = list(zip(ours, theirs, strict=True))
    equal = [pair for pair in pairs if abs(pair[0].num_events / pair[1].num_events - 1) <= MAX_EVENTS_APART]
    ratio = _ratio([own.cpu_us / other.cpu_us for own, other in equal]) if equal else "events differ"
    return [ratio, f"{len(equal)} of {len(pairs)}"]


def _ratio(ratios: Sequence[float]) -> str:
    return "{:.3f} ({:.3f}-{:.3f})".format(*geometric_mean(ratios))


def add_ratios(report: Report, ours: Passes, theirs: Passes) -> list[str]:
    """Add both checkouts in turn, this one over the other; return what is above MAX_MEAN or MAX_CELL."""
    host, speed = dict[Cell, list[float]](), dict[Cell, list[float]]()
    rows, violations = list[list[str]](), list[str]()
    for cell, passes in ours.items():
        pairs = list(zip(passes, theirs[cell], strict=True))
        host[cell] = [own.host_us / other.host_us for own, other in pairs]
        speed[cell] = [own.tokens_per_s / other.tokens_per_s for own, other in pairs]
        rows.append([str(cell), _ratio(host[cell]), _ratio(speed[cell])])
        if geometric_mean(host[cell])[1] > MAX_CELL:
            violations.append(f"{cell}: host time {_ratio(host[cell])} of the other's, wholly above {MAX_CELL:g}")
    overall = over_cells(host)
    rows.append(["geometric mean over all cells", _ratio(overall), _ratio(over_cells(speed))])
    report.table("This checkout over the other, in turn", ("cell", "host time a token", "tok/s"), rows)
    report.text(
        "Host time: CPU time of all processes outside the forwards. Geometric means of pairs of passes, and their "
        "intervals of 95 % by Student's t; one pair has none."
    )
    if geometric_mean(overall)[0] > MAX_MEAN:
        violations.append(f"over all cells host time is {_ratio(overall)} of the other's, above {MAX_MEAN:g}")
    report.data["ratios"] = {str(cell): {"host": host[cell], "speed": speed[cell]} for cell in host}
    return violations


def over_cells(ratios: Mapping[Cell, Sequence[float]]) -> list[float]:
    """Return the geometric mean over all cells, one a repetition."""
    return [math.exp(statistics.fmean(map(math.log, each))) for each in zip(*ratios.values(), strict=True)]
