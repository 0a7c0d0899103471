"""Time one step of a model, by transformers and by each of our paths, over the same contexts. For `bench-engine`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from outrider.engine.kv_pool import BlockTable
from outrider.engine.loading.attention_choice import describe_self_test
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.wire.settings.config import TargetConfig

BURST = 6
"""Steps of each width that a contestant takes in its turn."""
Clock = Callable[[], float]
"""Returns seconds: `time.perf_counter`, or `time.thread_time` for one thread on a machine with other work."""


class Steps(Protocol):
    """Steps of one shape."""

    name: str

    def step(self, clock: Clock) -> float:
        """Run one forward and return its seconds; the cache is then as it was."""


class Contestant(Protocol):
    name: str

    def for_shape(self, batch: int, width: int) -> Steps:
        """Return forwards over `batch` rows of `width` tokens each, all of the same context."""


class ReadSteps:
    """The floor: reads as many bytes as the weights have, again and again, beside the others' steps.

    It reads no more, because a step may also gain by what a processor's caches keep of its bytes from step to step. A
    step is the faster of a sum and a product of two halves, which reads in two places.
    """

    name = "floor"

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._halves = torch.zeros(2, num_bytes // 8)  # float32

    def for_shape(self, batch: int, width: int) -> ReadSteps:
        return self

    def step(self, clock: Clock) -> float:
        seconds = []
        for read in (self._halves.sum, lambda: torch.dot(self._halves[0], self._halves[1])):
            started = clock()
            read()
            seconds.append(clock() - started)
        return min(seconds)


class TransformersSteps:
    """Runs transformers' modules over its DynamicCache in their best case: rows of one length, without a mask."""

    name = "transformers"

    def __init__(self, model: PreTrainedModel, prompt: list[int]) -> None:
        self._model, self._prompt = model, prompt

    @torch.inference_mode()
    def for_shape(self, batch: int, width: int) -> TransformersSteps:
        steps = TransformersSteps(self._model, self._prompt)
        steps._cache = DynamicCache(config=self._model.config)
        self._model(torch.tensor([self._prompt]), past_key_values=steps._cache, use_cache=True)
        steps._cache.batch_repeat_interleave(batch)
        steps._ids = torch.tensor([self._prompt[:width]] * batch)  # [B, q] int64
        return steps

    @torch.inference_mode()
    def step(self, clock: Clock) -> float:
        started = clock()
        self._model(self._ids, past_key_values=self._cache, use_cache=True)
        elapsed = clock() - started
        self._cache.crop(-self._ids.shape[1])
        return elapsed


class OurSteps:
    """Runs a ModelRunner; every row has blocks of its own."""

    def __init__(self, runner: ModelRunner, prompt: list[int]) -> None:
        quantization = runner.facts.quantization
        self.name = runner.path.name if quantization == "none" else f"{runner.path.name} {quantization}"
        self.batch_invariant = runner.path.batch_invariant
        self.margin = describe_self_test(runner)
        self._runner, self._prompt = runner, prompt
        self._tables: dict[int, list[BlockTable]] = {}  # by width
        self._rows: list[Row] = []

    def for_shape(self, batch: int, width: int) -> OurSteps:
        steps = OurSteps(self._runner, self._prompt)
        tables = self._tables.setdefault(width, [])
        while len(tables) < batch:
            tables.append(self._runner.pool.new_table())
            self._runner.forward([Row.of(tables[-1], self._prompt, 0, 1)])
        ids = self._prompt + self._prompt[:width]
        steps._rows = [Row.of(table, ids, len(self._prompt), width) for table in tables[:batch]]
        return steps

    def step(self, clock: Clock) -> float:
        started = clock()
        self._runner.forward(self._rows)
        elapsed = clock() - started
        for row in self._rows:
            row.table.truncate(row.num_cached)
        return elapsed


def load_transformers(folder: Path, dtype: str, prompt: list[int]) -> tuple[TransformersSteps, int]:
    """Return transformers' steps, and the bytes of weights that a step reads.

    Those are all parameters, but an input embedding only if it is tied to the head, and then once.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().requires_grad_(False)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is not embedding.weight:
        num_bytes -= embedding.weight.numel() * embedding.weight.element_size()
    return TransformersSteps(model, prompt), num_bytes


def load_ours(
    folder: Path,
    dtype: str,
    path: str,
    prompt: list[int],
    max_batch: int,
    widths: list[int],
    quantization: str = "none",
) -> OurSteps:
    """Return our steps on a path. Raises ConfigError where the path cannot run."""
    tokens = len(widths) * max_batch * (-(-(len(prompt) + max(widths)) // 128) * 128)  # whole blocks of any size
    runner = load_runner(
        TargetConfig(
            model=str(folder),
            device="cpu",
            dtype=dtype,
            kv_cache_tokens=tokens,
            max_slots=len(widths) * max_batch,
            context_limit=None,
            attention_path=path,
            quantization=quantization,
        )
    )
    return OurSteps(runner, prompt)


def interleaved_steps(
    contestants: list[Contestant], batch: int, widths: list[int], clock: Clock, seconds: float, max_rounds: int
) -> dict[int, dict[str, list[float]]]:
    """Return the seconds of a step in each round, by width and name.

    The i-th values are of the same moment, so that their ratios say more than their differences. In a round every
    contestant's turn comes once: BURST steps of each width, alternately, of which the first are left out, since the one
    before has other weights in the caches and threads that still look for work. The median counts.
    """
    shapes = [(each.name, {width: each.for_shape(batch, width) for width in widths}) for each in contestants]
    taken: dict[int, dict[str, list[float]]] = {width: {each.name: [] for each in contestants} for width in widths}
    end = time.perf_counter() + seconds
    for done in range(max_rounds):
        for name, steps in shapes:
            burst = [{width: steps[width].step(clock) for width in widths} for _ in range(BURST)]
            for width in widths:
                taken[width][name].append(statistics.median(each[width] for each in burst[1:]))
        if time.perf_counter() > end and done >= 2:
            break
    return taken


def median_ratio(over: list[float], under: list[float]) -> float:
    """Return the median ratio of the times of the same round."""
    return statistics.median(mine / theirs for mine, theirs in zip(over, under, strict=True))
