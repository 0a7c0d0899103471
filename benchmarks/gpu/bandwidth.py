"""Section `bandwidth`: the card's two ceilings, the way to it and back, and the native library's build."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.versions import build_native, tell_gpu

NUM_REPEATS = 10


def run(bench: Bench) -> None:
    device = torch.device(bench.device)
    if bench.on_card:
        tell_gpu(bench)
    bytes_per_s = copy_bandwidth(device, bench.size(4 << 30, 1 << 26))
    flops = product_rate(device, bench.size(8192, 512), torch.bfloat16)
    row: dict[str, float] = {"copy_gb_per_s": bytes_per_s / 1e9, "bfloat16_tflop_per_s": flops / 1e12}
    if bench.on_card:
        row |= _transfers(device)
    bench.tell("ceilings", **row)
    build_s = build_native(bench)
    bench.tell("native library", build_s=build_s)
    bench.sum_up(f"copy {bytes_per_s / 1e9:.0f} GB/s read and written, bfloat16 {flops / 1e12:.0f} TFLOP/s")


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return the bytes read and written per second by a copy, the median of several."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * num_bytes / median_s(lambda: copy.copy_(source), device)


def product_rate(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a square matrix product on random data."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / median_s(lambda: torch.matmul(a, b), device)


def _transfers(device: torch.device) -> dict[str, float]:
    """Return the speed of copies between host and card, from pinned and from pageable memory."""
    num_bytes = 1 << 28
    on_card = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    pageable = torch.ones(num_bytes, dtype=torch.uint8)  # pages that were never written are one page of zeros
    pinned = pageable.pin_memory()
    small, on_host = torch.zeros(1, device=device), torch.zeros(1)
    return {
        "up_pinned_gb_per_s": num_bytes / median_s(lambda: on_card.copy_(pinned, non_blocking=True), device) / 1e9,
        "up_pageable_gb_per_s": num_bytes / median_s(lambda: on_card.copy_(pageable), device) / 1e9,
        "down_pinned_gb_per_s": num_bytes / median_s(lambda: pinned.copy_(on_card, non_blocking=True), device) / 1e9,
        "down_pageable_gb_per_s": num_bytes / median_s(lambda: pageable.copy_(on_card), device) / 1e9,
        "wait_us": 1e6 * median_s(lambda: on_host.copy_(small), device),
        "launch_us": 1e6 * _launch_s(small),
    }


def _launch_s(tensor: torch.Tensor) -> float:
    """Return the host's seconds for one small operation."""
    num = 2000
    tensor.add_(1.0)  # the first one loads the kernel
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(num):
        tensor.add_(1.0)
    elapsed_s = time.perf_counter() - began_s
    torch.cuda.synchronize()
    return elapsed_s / num


def median_s(
    run: Callable[[], object], device: torch.device, num: int = NUM_REPEATS, budget_s: float = math.inf
) -> float:
    """Return the median seconds until the last kernel of `run` has ended, after two runs that do not count.

    budget_s: no further run begins after so many seconds; one counts at least.
    """
    began_s = time.monotonic()
    run()
    run()
    times = [seconds(run, device)]
    while len(times) < num and time.monotonic() - began_s < budget_s:
        times.append(seconds(run, device))
    return statistics.median(times)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until the last kernel of `run` has ended."""
    wait(device)
    began_s = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - began_s


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
