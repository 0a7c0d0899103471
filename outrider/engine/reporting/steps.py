"""How a model loads on a device, and what its steps take there: eagerly, as CUDA graphs, and by the memory's speed."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from outrider.engine.cuda.graphed_path import GraphedPath
from outrider.engine.loading.loader import load_runner, read_config, resolve_device
from outrider.engine.model_runner import ModelRunner
from outrider.engine.paths.block_cache import layer_limits, num_decoder_layers
from outrider.engine.paths.choice import margin
from outrider.engine.step_plan import Row
from outrider.wire.settings.config import TargetConfig

NUM_WARM = 3
"""Steps of each kind that do not count: memory is taken, kernels are chosen, a graph is proven."""
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
"""Bytes that are copied to learn the memory's speed: many times what a cache holds."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

Arms = Mapping[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class StepsTask:
    """What is to be measured."""

    model: str
    device: str
    dtype: str
    batches: list[int]
    num_draft_tokens: int
    """K: a verify feeds K + 1 tokens of each row."""
    context_tokens: int
    """Tokens that each row has in its cache."""
    num_rounds: int
    """Steps of each kind; their median counts."""


def steps(task: StepsTask) -> Iterator[dict[str, Any]]:
    """Yield how the model loads, its graphs, the memory's speed, and each step's time beside its floor.

    Raises ConfigError as the loader does.
    """
    widest, lines = max(task.batches), list[str]()
    with log_into(lines):
        began_s = time.monotonic()
        runner = load_runner(
            TargetConfig(
                model=task.model,
                device=task.device,
                dtype=task.dtype,  # type: ignore[arg-type]
                kv_cache_tokens=(widest + 1) * 2 * task.context_tokens,
                max_slots=widest,
            )
        )
        yield {"event": "loaded", **facts_of(runner), "seconds": time.monotonic() - began_s, "log": lines}
        lines = []
    if isinstance(runner.path, GraphedPath):
        with log_into(lines):
            began_s = time.monotonic()
            runner.path.prepare(widest, runner.facts.context_limit)
        captured = sorted(runner.path.captured, key=lambda shape: shape.num_tokens)
        yield {
            "event": "graphs",
            "captured": list(map(str, captured)),
            "seconds": time.monotonic() - began_s,
            "log": lines,
        }
    bandwidth = copy_bandwidth(resolve_device(task.device))
    yield {"event": "bandwidth", "bytes_per_s": bandwidth}
    made_of = read_config(task.model).get_text_config(decoder=True)
    num_weight_bytes = read_bytes(runner, is_tied=bool(made_of.tie_word_embeddings))
    for batch in task.batches:
        for width in (1, task.num_draft_tokens + 1):
            context = min(task.context_tokens, runner.facts.context_limit - width)
            times_s = step_times(runner, batch, width, context, task.num_rounds)
            cached = batch * seen_tokens(made_of, context, width) * runner.kv_bytes_per_token
            floor_s = None if is_mixture(made_of) else (num_weight_bytes + cached) / bandwidth
            yield {"event": "step", "rows": batch, "tokens": width, "context": context, "floor_s": floor_s, **times_s}


def facts_of(runner: ModelRunner) -> dict[str, Any]:
    facts = runner.facts
    return {
        "model": facts.model_id,
        "num_parameters": facts.num_parameters,
        "num_weight_bytes": runner.num_weight_bytes,
        "dtype": facts.dtype,
        "quantization": facts.quantization,
        "device": facts.device,
        "path": runner.path.name,
        "self_test": margin(runner),
        "trees": runner.tree_refusal or "run",
        "features": runner.features_refusal or "given",
    }


def is_mixture(config: PreTrainedConfig) -> bool:
    """Return whether it has experts, by any of the names that transformers has for their number: which of them a step
    reads, its tokens choose.
    """
    values = config.to_dict()
    values |= values.get("ffn_config") or {}  # where DBRX has it
    return any((values.get(name) or 0) > 1 for name in _NUM_EXPERTS)


def seen_tokens(config: PreTrainedConfig, context: int, width: int) -> float:
    """Return the cached tokens that a step of `width` new tokens of a row reads, the mean over layers.

    A layer with a window or chunks reads those that any of them sees.
    """
    limits = [layer_limits(config, index) for index in range(num_decoder_layers(config))]
    firsts = [
        max(0, context + 1 - window if window else 0, context // chunk * chunk if chunk else 0)
        for window, chunk in limits
    ]
    return context + width - statistics.fmean(firsts)


def read_bytes(runner: ModelRunner, is_tied: bool) -> int:
    """Return the bytes of weights that a step reads: all, but an embedding that is not the output matrix, too.

    Of that it reads a row for each token.
    """
    if is_tied:
        return runner.num_weight_bytes
    facts = runner.facts
    return runner.num_weight_bytes - facts.vocab_size * facts.hidden_size * getattr(torch, facts.dtype).itemsize


def step_times(runner: ModelRunner, batch: int, width: int, context: int, num_rounds: int) -> dict[str, float]:
    """Return the median seconds of a step of `width` new tokens a row, by how it runs: "eager_s" and, where the path
    has graphs, "graph_s". They take turns.
    """
    ids = [(7 * place + 3) % runner.facts.vocab_size for place in range(context + width)]
    tables = [runner.pool.new_table() for _ in range(batch)]
    for table in tables:
        runner.forward([Row.of(table, ids[:context], 0, 0)])
    rows = [Row.of(table, ids, context, width) for table in tables]

    def step(graphs: bool) -> None:
        if isinstance(runner.path, GraphedPath):
            runner.path.uses_graphs = graphs
        runner.forward(rows)
        for table in tables:
            table.truncate(context)

    arms = {"eager_s": lambda: step(graphs=False)}
    if isinstance(runner.path, GraphedPath):
        arms["graph_s"] = lambda: step(graphs=True)
    found = in_turns(arms, num_rounds, runner.device)
    for table in tables:
        table.free()
    return found


def in_turns(arms: Arms, num_rounds: int, device: torch.device) -> dict[str, float]:
    """Return the median seconds of each arm."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repetition in range(NUM_WARM + num_rounds):
        for name, run in arms.items():
            elapsed_s = seconds(run, device)
            if repetition >= NUM_WARM:
                times[name].append(elapsed_s)
    return {name: statistics.median(values) for name, values in times.items()}


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes read and written per second by a copy, the best of several."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * source.numel() / min(seconds(lambda: copy.copy_(source), device) for _ in range(10))


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until the last kernel of `run` has ended."""
    _wait(device)
    began_s = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - began_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextmanager
def log_into(lines: list[str]) -> Iterator[None]:
    """Add to `lines` what the package logs: which paths were refused and why, what became of the graphs."""
    handler, package = _Lines(lines), logging.getLogger("outrider")
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
