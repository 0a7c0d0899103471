"""Section `memory`: a worker's load, in memory of the card and of the host, before, under and after it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import LLAMA_1B, TINY, random_llama, save
from outrider.engine.loading.loader import load_runner
from outrider.engine.step_plan import Row
from outrider.wire.settings.config import TargetConfig

LOOK_EVERY_S = 0.005
"""Seconds between two looks at this process's memory."""
MAX_HOST_SHARE = 0.5
"""Of the weights' bytes that the host may hold of its own while they go to a card."""
MAX_DEVICE_SHARE = 1.3
"""Of the weights' bytes that the card may hold under their load, before there is a cache."""
PROMPT_TOKENS = 2048
"""Of a full piece of a prompt."""


def run(bench: Bench) -> None:
    shape = bench.size(LLAMA_1B, TINY)
    folder = bench.folder(4 << 30)
    save(random_llama(shape, bench.device, torch.bfloat16), folder / "model")
    if bench.on_card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = _free(bench)
    tokens = bench.size(65_536, 512)
    config = TargetConfig(
        model=str(folder / "model"),
        device=bench.device,
        dtype="bfloat16",
        kv_cache_tokens=tokens,
        max_slots=bench.size(32, 2),
    )
    with HostPeak() as host:
        runner = load_runner(config)
    peak = torch.cuda.max_memory_allocated() if bench.on_card else 0
    after = _free(bench)
    cache_bytes = tokens * runner.kv_bytes_per_token
    weights = runner.num_weight_bytes
    table = runner.pool.new_table()
    num_tokens = bench.size(PROMPT_TOKENS, 64)
    if bench.on_card:
        torch.cuda.reset_peak_memory_stats()  # or the load's own peak would count
    runner.forward([Row.of(table, [7] * num_tokens, 0, 1)])
    under = torch.cuda.max_memory_allocated() - cache_bytes - weights if bench.on_card else 0
    bench.tell(
        "load",
        weights_mib=weights / 2**20,
        cache_mib=cache_bytes / 2**20,
        host_peak_mib=host.peak_bytes / 2**20,
        card_peak_mib=peak / 2**20,
        card_taken_mib=(before - after) / 2**20,
        a_prompts_piece_mib=under / 2**20,
        spare_mib=runner.spare.num_bytes / 2**20,
    )
    if bench.on_card:
        _judge(bench, weights, host.peak_bytes, peak - cache_bytes)
    bench.sum_up(
        f"weights {weights / 2**20:.0f} MiB: host peak {host.peak_bytes / 2**20:.0f}, card peak {peak / 2**20:.0f} "
        f"with a cache of {cache_bytes / 2**20:.0f}"
    )


def _judge(bench: Bench, weights: int, host_peak: int, device_peak: int) -> None:
    if host_peak > MAX_HOST_SHARE * weights:
        bench.find(f"the host held {host_peak / weights:.1f} times the weights while they went to the card")
    if device_peak > MAX_DEVICE_SHARE * weights:
        bench.find(f"the card held {device_peak / weights:.1f} times the weights beside the cache under load")


def _free(bench: Bench) -> int:
    return int(torch.cuda.mem_get_info(0)[0]) if bench.on_card else 0


class HostPeak:
    """Watches how much memory of its own (not of files) this process takes beyond what it had."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> HostPeak:
        self._before = anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes() - self._before)
            time.sleep(LOOK_EVERY_S)


def anonymous_bytes() -> int:
    """Return this process's resident memory that is of no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
