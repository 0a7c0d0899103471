"""Section `prompts`, run by name: time until a prompt is fed to the random 8B Llama, in pieces as a worker does."""

from __future__ import annotations

import torch

from benchmarks.gpu.bandwidth import seconds
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import LLAMA_8B, TINY
from benchmarks.gpu.steps import runner_of
from outrider.engine.loading.cache_size import PREFILL_TOKENS_CUDA
from outrider.engine.step_plan import Row

LENGTHS = (2048, 16_384)


def run(bench: Bench) -> None:
    lengths = bench.size(LENGTHS, (128,))
    piece = min(PREFILL_TOKENS_CUDA, max(lengths))
    runner = runner_of(bench, bench.size(LLAMA_8B, TINY), 1, max(lengths) + 1)
    for length in lengths:
        ids = [(7 * place + 3) % runner.facts.vocab_size for place in range(length)]
        times = []
        for _ in range(2):  # the first one takes memory and chooses kernels
            table, elapsed_s = runner.pool.new_table(), 0.0
            for start in range(0, length, piece):
                row = Row.of(table, ids[: start + piece], start, int(start + piece >= length))
                elapsed_s += seconds(lambda row=row: runner.forward([row]), torch.device(bench.device))
            table.free()
            times.append(elapsed_s)
        bench.tell("prompt", tokens=length, pieces_of=piece, first_s=times[0], again_s=times[1])
    bench.sum_up(f"{lengths[-1]} tokens in {times[-1]:.2f} s on the path {runner.path.name}")
