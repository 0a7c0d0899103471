"""Section `profile`: launches of one step of the random 8B Llama, and the gaps between them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bandwidth import median_s
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import LLAMA_8B
from benchmarks.gpu.steps import runner_of
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row

CONTEXT = 512
WIDTH = 5
TOP = 12
"""Kernels that are listed, by their share of the device's time."""


def run(bench: Bench) -> None:
    runner = runner_of(bench, LLAMA_8B, 32, CONTEXT + WIDTH)
    parts = []
    for batch in (1, 32):
        step = _profiled(runner, batch)
        kernels = step.pop("kernels")
        bench.tell("step", slots=batch, rows=WIDTH, **step)
        for name, (num, us) in kernels:
            bench.tell(f"kernels of {batch} slots", kernel=name[:100], launches=num, ms=us / 1e3)
        parts.append(
            f"{batch} slots: {step['launches']} launches, {step['busy_ms']:.1f} of {step['span_ms']:.1f} ms busy"
        )
    bench.sum_up("; ".join(parts))


def _profiled(runner: ModelRunner, batch: int) -> dict[str, Any]:
    """Return a step's time without the profiler and, under it, its launches, the device's time from the first to the
    last kernel, and how much of that it worked.
    """
    ids = [(7 * place + 3) % runner.facts.vocab_size for place in range(CONTEXT + WIDTH)]
    tables = [runner.pool.new_table() for _ in range(batch)]
    for table in tables:
        table.reserve(CONTEXT)
    rows = [Row.of(table, ids, CONTEXT, WIDTH) for table in tables]

    def step() -> None:
        runner.forward(rows)
        torch.cuda.synchronize()
        for table in tables:
            table.truncate(CONTEXT)

    step_s = median_s(step, runner.device, num=3)
    # The device alone: to record each operation on the host, too, would delay launches and widen the gaps.
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
    for table in tables:
        table.free()
    found = summarized(
        [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiled.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
    )
    return {"without_profiler_ms": 1e3 * step_s, **found}


def summarized(kernels: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Return what the device did in a step. kernels: name, start and end in microseconds of each."""
    if not kernels:
        return {"launches": 0, "span_ms": 0.0, "busy_ms": 0.0, "gaps_ms": 0.0, "longest_gap_ms": 0.0, "kernels": []}
    kernels = sorted(kernels, key=lambda kernel: kernel[1])
    first_us = reached_us = kernels[0][1]
    gaps_us = []
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, start_us, end_us in kernels:
        gaps_us.append(max(0.0, start_us - reached_us))
        reached_us = max(reached_us, end_us)
        by_name[name].append(end_us - start_us)
    span_us = reached_us - first_us
    totals = [(name, (len(times), sum(times))) for name, times in by_name.items()]
    return {
        "launches": len(kernels),
        "span_ms": span_us / 1e3,
        "busy_ms": (span_us - sum(gaps_us)) / 1e3,
        "gaps_ms": sum(gaps_us) / 1e3,
        "longest_gap_ms": max(gaps_us) / 1e3,
        "kernels": sorted(totals, key=lambda total: -total[1][1])[:TOP],
    }
