"""Section `graphs`: steps as CUDA graphs and eagerly, bit for bit, for every captured shape; and the graphs' memory."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.bench import DEMO_TARGET, Bench
from outrider.engine.cuda.graphed_path import GraphedPath
from outrider.engine.cuda.step_graphs import WIDTHS
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.wire.settings.config import TargetConfig

MAX_ROWS = 8
PAST = 300
"""Tokens of a row before the step: more than one block of 256."""


def run(bench: Bench) -> None:
    config = TargetConfig(
        model=str(DEMO_TARGET),
        device=bench.device,
        dtype="bfloat16",
        kv_cache_tokens=64 * 256,
        max_slots=MAX_ROWS,
    )
    runner = load_runner(config)
    path = runner.path
    if not isinstance(path, GraphedPath):
        bench.tell("graphs", path=path.name, captured="none: this path has no graphs in this version")
        bench.sum_up(f"no graphs: the path is {path.name}")
        return
    free_bytes = torch.cuda.mem_get_info(0)[0]
    began_s = time.monotonic()
    path.prepare(MAX_ROWS, runner.facts.context_limit)
    bench.tell(
        "graphs",
        path=path.name,
        captured=sorted(map(str, path.captured)),
        seconds=time.monotonic() - began_s,
        memory_mib=(free_bytes - torch.cuda.mem_get_info(0)[0]) / 2**20,
    )
    num_same = num = 0
    for batch in range(1, MAX_ROWS + 1):
        for width in WIDTHS:
            is_same = _is_same(runner, path, batch, width)
            bench.tell("step", rows=batch, tokens=width, outcome="the same bits" if is_same else "OTHER BITS")
            num, num_same = num + 1, num_same + is_same
            if not is_same:
                bench.find(f"{batch} rows of {width}: other bits as a graph than eagerly")
    bench.sum_up(f"{len(path.captured)} graphs; {num_same} of {num} steps have the same bits")


def _is_same(runner: ModelRunner, path: GraphedPath, batch: int, width: int) -> bool:
    """Return whether a step's logits are the same bits as a graph and eagerly."""
    vocab_size = runner.facts.vocab_size
    rows, tables = [], []
    for index in range(batch):
        ids = [(7 * place + 3 * index) % vocab_size for place in range(PAST + index + width)]
        table = runner.pool.new_table()
        runner.forward([Row.of(table, ids[:-width], 0, 0)])
        rows.append(Row.of(table, ids, len(ids) - width, width))
        tables.append(table)
    found = []
    for uses_graphs in (True, False):
        path.uses_graphs = uses_graphs
        found.append(runner.forward(rows).clone())
        for row in rows:
            row.table.truncate(row.num_cached)
    path.uses_graphs = True
    for table in tables:
        table.free()
    return torch.equal(*found)
