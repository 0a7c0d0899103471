"""Section `steps`: steps of a random 8B Llama in bfloat16, made on the card, beside what the bytes allow.

Slots 1, 8 and 32; of each 1 row, 5 rows or a tree of 8; 512 and 8,192 tokens of context. The floor of a step is its
weights and the cached tokens that its rows read, over the speed of a copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

import outrider.engine.cuda.graphed_path as graphed_path
from benchmarks.gpu.bandwidth import copy_bandwidth, median_s, wait
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import LLAMA_8B, TINY, Shape, random_llama
from outrider.engine.kv_pool import BlockTable, KVPool
from outrider.engine.loading.attention_choice import choose_path, describe_self_test
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row

CELL_S = 0.9
"""Seconds of steps of one kind, after which no further one begins."""
MAX_ROUNDS = 20
CAPTURE_S = 8.0
"""Seconds for capturing graphs, where a version has them: a worker may take 30."""
PARENTS = (-1, -1, 0, 0, 1, 2, 2, 5)
"""A tree of 8 nodes."""


def run(bench: Bench) -> None:
    shape = bench.size(LLAMA_8B, TINY)
    device = torch.device(bench.device)
    bytes_per_s = copy_bandwidth(device, bench.size(2 << 30, 1 << 26))
    contexts = bench.size((512, 8192), (64, 128))
    batches = bench.size((1, 8, 32), (1, 2))
    runner = runner_of(bench, shape, max(batches), max(contexts) + 64)
    num_read = read_bytes(runner)
    worst = 0.0
    for context in contexts:
        for batch in batches:
            for what, width, parents in (("1 row", 1, None), ("5 rows", 5, None), ("tree of 8", 8, PARENTS)):
                if parents is not None and not runner.supports_trees:
                    bench.tell("step", slots=batch, rows=what, context=context, why=runner.tree_refusal)
                    continue
                floor_s = (num_read + batch * (context + width) * runner.kv_bytes_per_token) / bytes_per_s
                try:
                    times = step_times(runner, batch, width, context, parents)
                except Exception as error:  # an out-of-memory error of one shape leaves the others
                    bench.find(f"{batch} slots of {what} at {context}: {type(error).__name__}: {error}")
                    if bench.on_card:
                        torch.cuda.empty_cache()
                    continue
                best_s = min(times.values())
                worst = max(worst, best_s / floor_s)
                bench.tell(
                    "step",
                    slots=batch,
                    rows=what,
                    context=context,
                    floor_ms=1e3 * floor_s,
                    **{f"{name}_ms": 1e3 * value for name, value in times.items()},
                    over_the_floor=best_s / floor_s,
                )
        bench.sum_up(f"path {runner.path.name}; a step takes up to {worst:.1f} times its floor")


def runner_of(bench: Bench, shape: Shape, max_rows: int, max_context: int) -> ModelRunner:
    """Return a runner of a random Llama on the path that a worker would take, with graphs where that has any."""
    began_s = time.monotonic()
    device = torch.device(bench.device)
    network = random_llama(shape, bench.device, torch.bfloat16)
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    facts = ModelFacts("random", shape.vocab, shape.context, "bfloat16", str(device), (), num_parameters)
    # In a rehearsal the path that cards without a better one take, not the processor's own.
    runner = choose_path(network, facts, bench.size("auto", "paged"), batch_invariant=False)
    runner.num_weight_bytes = 2 * num_parameters
    del network
    block_size = runner.path.block_size
    num_blocks = max_rows * -(-max_context // block_size) + 1
    runner.set_pool(KVPool(num_blocks, block_size))
    runner.allocate()
    _fill_cache(runner)
    num_graphs = None
    if isinstance(runner.path, graphed_path.GraphedPath):
        graphed_path.CAPTURE_BUDGET_S = CAPTURE_S
        runner.path.prepare(max_rows, max_context)
        num_graphs = len(runner.path.captured)
    wait(device)
    bench.tell(
        "model",
        parameters=num_parameters,
        path=runner.path.name,
        self_test=describe_self_test(runner),
        trees=runner.tree_refusal or "run",
        graphs=num_graphs,
        kv_bytes_a_token=runner.kv_bytes_per_token,
        ready_s=time.monotonic() - began_s,
    )
    return runner


@torch.inference_mode()
def _fill_cache(runner: ModelRunner) -> None:
    """Fill the cache with random numbers, as if prompts had been fed: feeding 262,144 tokens would take the section's
    whole time.
    """
    path: Any = getattr(runner.path, "_paged", runner.path)
    cache = getattr(path, "_cache", None)
    for layer in getattr(cache, "layers", ()):
        layer.keys.normal_()
        layer.values.normal_()


def read_bytes(runner: ModelRunner) -> int:
    """Return the bytes of weights that a step reads: all but the embedding, of which it reads a row a token."""
    hidden = getattr(getattr(runner.path, "_paged", runner.path), "_text_config", None)
    width = hidden.hidden_size if hidden is not None else 0
    return runner.num_weight_bytes - 2 * runner.facts.vocab_size * width


def step_times(
    runner: ModelRunner, batch: int, width: int, context: int, parents: Sequence[int] | None
) -> dict[str, float]:
    """Return the median seconds of a step by how it runs: eager and, where the path has graphs, graph."""
    tables = [runner.pool.new_table() for _ in range(batch)]
    for table in tables:
        table.reserve(context)
    ids = [(7 * place + 3) % runner.facts.vocab_size for place in range(context + width)]
    rows = [_row(table, ids, context, width, parents) for table in tables]

    def step() -> None:
        runner.forward(rows)
        for table in tables:
            table.truncate(context)

    found = {}
    try:
        arms: dict[str, bool | None] = {"eager": None}
        if isinstance(runner.path, graphed_path.GraphedPath):
            arms = {"eager": False, "graph": True}
        for name, uses_graphs in arms.items():
            if isinstance(runner.path, graphed_path.GraphedPath) and uses_graphs is not None:
                runner.path.uses_graphs = uses_graphs
            found[name] = median_s(step, runner.device, MAX_ROUNDS, CELL_S)
    finally:
        for table in tables:
            table.free()
    return found


def _row(table: BlockTable, ids: list[int], context: int, width: int, parents: Sequence[int] | None) -> Row:
    if parents is None:
        return Row.of(table, ids, context, width)
    return Row(table, ids[context:], context, width, ids[:context], parents)
