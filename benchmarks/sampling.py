"""`python -m benchmarks.sampling`: from logits to a token, beside transformers' processors; CPU time of one thread.

Logits are the demo target's on a development prompt; for the larger vocabulary rows of the same shape, its quantiles
spread over 128,256 ids; and flat ones, which have the widest nucleus. Calls of both sides take turns, and the shortest
of many is shown, so that other processes of the machine matter little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import logits_process as hf

from benchmarks.common import DEMO_TARGET, Report, dev_prompts
from outrider.engine.acceptance import Noise, accept_block_one
from outrider.engine.host_sampling import HostLogits
from outrider.engine.noise import Purpose
from outrider.engine.penalties import LogitRow, SamplingState
from outrider.engine.row_law import RowLaw
from outrider.engine.slot_noise import host_slot_uniforms
from outrider.wire.params import SamplingParams
from outrider.wire.rpc import tune_malloc

NUM_ROWS = 6
"""Positions of a verify with K = 5."""
VOCABULARIES = (4096, 128_256)
NUM_PROMPT, NUM_OUTPUT = 500, 50
CHAINS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "repetition penalty, temperature, top-k 50, top-p, min-p": {
        "repetition_penalty": 1.1,
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.02,
    },
}


@dataclass(frozen=True)
class Setting:
    """One request's parameters and text, and the logits at some positions of it."""

    params: SamplingParams
    logits: Tensor
    """[R, V] float32"""
    prompt_ids: list[int]
    output_ids: list[int]

    def state(self) -> SamplingState:
        made = SamplingState(self.params, self.prompt_ids, ())
        made.set_output(self.output_ids)
        return made


def shortest_ms(calls: Sequence[Callable[[], object]], num_rounds: int) -> list[float]:
    """CPU time of this thread for each call, the least of num_rounds; the calls take turns."""
    best = [float("inf")] * len(calls)
    for _ in range(num_rounds):
        for index, call in enumerate(calls):
            started = time.thread_time_ns()
            call()
            best[index] = min(best[index], (time.thread_time_ns() - started) / 1e6)
    return best


def transformers_call(setting: Setting) -> Callable[[], object]:
    """`generate`'s way: the processors over the batch, softmax, multinomial. [R] ids."""
    p, logits = setting.params, setting.logits
    ids = torch.tensor([setting.prompt_ids + setting.output_ids] * len(logits))
    chain = hf.LogitsProcessorList()
    if p.greedy:
        return lambda: logits.argmax(dim=-1)
    if p.repetition_penalty != 1.0:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.temperature != 1.0:
        chain.append(hf.TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        chain.append(hf.TopKLogitsWarper(p.top_k))
    if p.top_p < 1.0:
        chain.append(hf.TopPLogitsWarper(p.top_p))
    if p.min_p:
        chain.append(hf.MinPLogitsWarper(p.min_p))
    return lambda: torch.multinomial(chain(ids, logits).softmax(dim=-1), 1)


def outrider_call(setting: Setting) -> Callable[[], object]:
    """The draft's way, with the law as it is shipped."""
    state = setting.state()
    row = LogitRow(state)

    def call() -> list[int]:
        host = HostLogits(setting.logits)
        if setting.params.greedy:
            return [host.best_id(r, row) for r in range(len(setting.logits))]
        return [host.law(r, row).normalised().draw(0.4) for r in range(len(setting.logits))]

    return call


def verify_call(setting: Setting) -> Callable[[], object]:
    """The target's way with K = 5 drafts that are all kept: every position is computed, and its noise."""
    state, num_drafted = setting.state(), len(setting.logits) - 1
    draft_ids, laws = list[int](), list[RowLaw]()
    for j in range(num_drafted):
        laws.append(HostLogits(setting.logits).law(j, LogitRow(state, tuple(draft_ids))).normalised())
        draft_ids.append(laws[-1].draw(0.4))
    positions = range(NUM_PROMPT, NUM_PROMPT + num_drafted + 1)

    def call() -> tuple[int, int]:
        host = HostLogits(setting.logits)
        drafts = [RowLaw(law.vocab_size, law.scores, law.ids) for law in laws]  # as they come from the wire
        purposes = (Purpose.ACCEPT, Purpose.RECOVER, Purpose.TARGET)
        params, rounds = [setting.params] * len(positions), [NUM_PROMPT] * len(positions)
        noise = Noise(*host_slot_uniforms(params, rounds, positions, purposes))
        return accept_block_one(lambda j: host.law(j, LogitRow(state, tuple(draft_ids[:j]))), drafts, draft_ids, noise)

    assert call()[0] == num_drafted
    return call


def demo_logits(num_rows: int) -> Tensor:
    """[num_rows, 4096] float32: the demo target's, at the last positions of a development prompt."""
    ids = AutoTokenizer.from_pretrained(DEMO_TARGET)(dev_prompts(1)[0], return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    return model(input_ids=ids, use_cache=False).logits[0, -num_rows:].float().clone()


def logits_of(vocab_size: int, real: Tensor, generator: np.random.Generator) -> dict[str, Tensor]:
    """By kind, [R, V] float32 each."""
    flat = torch.from_numpy(generator.standard_normal((len(real), vocab_size), dtype=np.float32))
    if vocab_size == real.shape[1]:
        return {"real": real, "flat": flat}
    at = np.linspace(0, real.shape[1] - 1, vocab_size)
    rows = [np.interp(at, np.arange(real.shape[1]), np.sort(row)).astype(np.float32) for row in real.numpy()]
    return {"real": torch.from_numpy(np.stack([generator.permutation(row) for row in rows])), "flat": flat}


def measure(vocab_size: int, real: Tensor, num_rounds: int) -> dict[str, list[float]]:
    """By what is asked and of which logits: ms a row of transformers and of Outrider, ms of a verify of 6 rows."""
    generator = np.random.default_rng(0)
    prompt, output = (generator.integers(0, vocab_size, num).tolist() for num in (NUM_PROMPT, NUM_OUTPUT))
    found: dict[str, list[float]] = {}
    for kind, logits in logits_of(vocab_size, real, generator).items():
        for name, values in CHAINS.items():
            setting = Setting(SamplingParams(max_tokens=1000, seed=1, **values), logits, prompt, output)
            calls = [transformers_call(setting), outrider_call(setting)]
            if not setting.params.greedy:
                calls.append(verify_call(setting))
            theirs, ours, *verify = shortest_ms(calls, num_rounds)
            found[f"{name}; {kind} logits"] = [theirs / len(logits), ours / len(logits), *verify]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="calls of each side; the shortest counts")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_malloc()  # as every worker does
    report = Report("sampling", "From logits to a token")
    with torch.inference_mode():
        real = demo_logits(NUM_ROWS)
        for vocab_size in VOCABULARIES:
            found = measure(vocab_size, real, options.rounds)
            rows = [
                [name, f"{theirs:.3f}", f"{ours:.3f}", f"{theirs / ours:.0f}x", f"{verify[0]:.2f}" if verify else ""]
                for name, (theirs, ours, *verify) in found.items()
            ]
            columns = ["", "transformers, ms a row", "Outrider, ms a row", "faster", f"verify of {NUM_ROWS} rows, ms"]
            report.table(f"Vocabulary of {vocab_size:,}", columns, rows)
            report.data[str(vocab_size)] = found
    if options.write:
        report.write()


if __name__ == "__main__":
    main()
