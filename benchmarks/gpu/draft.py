"""Section `draft`: a draft's step on a random 1B Llama: its forward on the device, and the choice of its tokens.

The target beside it is tiny and of the same vocabulary: it is there so that the draft has slots to draft for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.bandwidth import copy_bandwidth, wait
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import LLAMA_1B, TINY, Shape, random_llama, save
from benchmarks.gpu.stepping import SteppedPair, stepped_pair
from outrider.engine.model_runner import ModelRunner
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.speculation import Speculation

NUM_ROUNDS = 5
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T = 1": {},
    "coupled": {"acceptance": AcceptanceRule.COUPLED},
}
CHAIN = Speculation(4, 4)
PROMPT_TOKENS = 64


def run(bench: Bench) -> None:
    folder = bench.folder(4 << 30)
    num_read = 0  # weights that the draft's step reads: of the embedding it reads a row a token
    shape: Shape = bench.size(LLAMA_1B, TINY)
    for name, each in (("target", replace(TINY, vocab=shape.vocab)), ("draft", shape)):
        model = random_llama(each, bench.device, torch.bfloat16)
        num_read = sum(parameter.numel() for parameter in model.parameters()) - each.vocab * each.hidden
        save(model, folder / name)
        del model
    device = torch.device(bench.device)
    if bench.on_card:
        torch.cuda.empty_cache()
    floor_s = 2 * num_read / copy_bandwidth(device, bench.size(2 << 30, 1 << 26))
    worst = ("", 0.0)
    settings = {"device": bench.device, "max_slots": 32, "kv_cache_tokens": 32_768, "dtype": "bfloat16"}
    with stepped_pair(str(folder / "draft"), str(folder / "target"), **settings) as pair:
        for batch in bench.size((1, 32, 8), (1, 2)):
            for case, sampling in CASES.items():
                try:
                    step_s, forward_s = _times(pair, batch, shape.vocab, sampling, device)
                except Exception as error:  # one kind that fails leaves the others
                    bench.find(f"{case}, {batch} slots: {type(error).__name__}: {error}")
                    continue
                finally:
                    pair.close_all()
                bench.tell(
                    "draft step",
                    rule=case,
                    slots=batch,
                    step_ms=1e3 * step_s,
                    forward_ms=1e3 * forward_s,
                    choice_ms=1e3 * (step_s - forward_s),
                    floor_ms=1e3 * floor_s,
                )
                if step_s > worst[1]:
                    worst = (f"{case}, {batch} slots", step_s)
            bench.sum_up(
                f"slowest: {worst[0]}: {1e3 * worst[1]:.1f} ms a step; the bytes' floor is {1e3 * floor_s:.1f}"
            )


def _times(
    pair: SteppedPair, batch: int, vocab: int, sampling: dict[str, Any], device: torch.device
) -> tuple[float, float]:
    """Return the median seconds of a draft's step over `batch` slots, and those of its forward."""
    prompts = [[(7 * place + 11 * slot) % vocab for place in range(PROMPT_TOKENS)] for slot in range(batch)]
    pair.open(prompts, CHAIN, **sampling)
    pair.round()  # prompts are fed, tables made
    steps_s: list[float] = []
    forwards_s: list[float] = []
    runner = _runner_of(pair)
    forward = runner.forward

    def timed_forward(rows: Any) -> Any:
        wait(device)
        began_s = time.perf_counter()
        logits = forward(rows)
        wait(device)
        forwards_s.append(time.perf_counter() - began_s)
        return logits

    @contextmanager
    def timed_step() -> Iterator[None]:
        num_before = len(forwards_s)
        began_s = time.perf_counter()
        yield
        wait(device)
        if len(forwards_s) > num_before:  # not one that finds nothing to do
            steps_s.append(time.perf_counter() - began_s)

    with mock.patch.object(runner, "forward", timed_forward):
        pair.draft.around_step = timed_step
        try:
            for _ in range(NUM_ROUNDS):
                pair.round()
        finally:
            pair.draft.around_step = nullcontext
    return statistics.median(steps_s), statistics.median(forwards_s)


def _runner_of(pair: SteppedPair) -> ModelRunner:
    runner: ModelRunner = pair.draft.loaded.runner
    return runner
