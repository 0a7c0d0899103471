"""`python -m benchmarks.sampling`: CPU time from logits to a token on one thread, beside transformers' processors.

Logits are the demo target's on a development prompt; for the larger vocabulary rows of the same shape, its quantiles
spread over 128,256 ids; and flat ones, which have the widest nucleus. Calls of both take turns, and the shortest of
many is shown, so that other processes of the machine matter little.

The second tables say why the host has a law of its own beside the one in torch: what it saves of a target's step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.generation import logits_process as hf

from benchmarks.common import (
    DEMO_TARGET,
    REPO,
    WORK,
    Report,
    dev_prompts,
    earlier_checkout,
    random_94m,
    with_interval,
)
from benchmarks.steps import load_ours
from outrider.engine.sampling.acceptance import Noise, accept_block_one
from outrider.engine.sampling.coupled import coupled_index
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.noise import NoiseStream, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.params import SamplingParams
from outrider.wire.transport.rpc import tune_malloc
from target_service.step.decide import decide
from target_service.step.decide_on_device import decide_on_device
from tests.proposals import chain_proposal

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
    """Return the CPU time of this thread for each call, the least of num_rounds; the calls take turns."""
    best = [float("inf")] * len(calls)
    for _ in range(num_rounds):
        for index, call in enumerate(calls):
            started = time.thread_time_ns()
            call()
            best[index] = min(best[index], (time.thread_time_ns() - started) / 1e6)
    return best


def transformers_call(setting: Setting) -> Callable[[], object]:
    """Return a call in `generate`'s way: the processors over the batch, softmax, multinomial, to ids [R]."""
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
    """Return a call in the draft's way, with the law as it is sent."""
    state = setting.state()
    row = LogitRow(state)

    def call() -> list[int]:
        host = HostLogits(setting.logits)
        if setting.params.greedy:
            return [host.best_id(r, row) for r in range(len(setting.logits))]
        return [host.distribution(r, row).normalised().draw(0.4) for r in range(len(setting.logits))]

    return call


def verify_call(setting: Setting) -> Callable[[], object]:
    """Return a call in the target's way with K = 5 drafts, all kept: every position is computed, and its noise."""
    state, num_drafted = setting.state(), len(setting.logits) - 1
    draft_ids, laws = list[int](), list[TokenDistribution]()
    for j in range(num_drafted):
        laws.append(HostLogits(setting.logits).distribution(j, LogitRow(state, tuple(draft_ids))).normalised())
        draft_ids.append(laws[-1].draw(0.4))
    positions = range(NUM_PROMPT, NUM_PROMPT + num_drafted)

    def call() -> tuple[int, int]:
        host = HostLogits(setting.logits)
        drafts = [TokenDistribution(law.vocab_size, law.scores, law.ids) for law in laws]  # as they come from the wire
        params, rounds = [setting.params] * num_drafted, [NUM_PROMPT] * num_drafted
        (accept,) = host_slot_uniforms(params, rounds, positions, [NoiseStream.ACCEPT])
        noise = Noise(
            accept, lambda place, weights, ids: coupled_index(weights, ids, setting.params, NUM_PROMPT + place)
        )
        return accept_block_one(
            lambda j: host.distribution(j, LogitRow(state, tuple(draft_ids[:j]))), drafts, draft_ids, noise
        )

    assert call()[0] == num_drafted
    return call


def demo_logits(num_rows: int) -> Tensor:
    """Return the demo target's logits at the last positions of a development prompt, [num_rows, 4096] float32."""
    ids = AutoTokenizer.from_pretrained(DEMO_TARGET)(dev_prompts(1)[0], return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    return model(input_ids=ids, use_cache=False).logits[0, -num_rows:].float().clone()


def logits_of(vocab_size: int, real: Tensor, generator: np.random.Generator) -> dict[str, Tensor]:
    """Return logits by kind, [R, V] float32 each."""
    flat = torch.from_numpy(generator.standard_normal((len(real), vocab_size), dtype=np.float32))
    if vocab_size == real.shape[1]:
        return {"real": real, "flat": flat}
    at = np.linspace(0, real.shape[1] - 1, vocab_size)
    rows = [np.interp(at, np.arange(real.shape[1]), np.sort(row)).astype(np.float32) for row in real.numpy()]
    return {"real": torch.from_numpy(np.stack([generator.permutation(row) for row in rows])), "flat": flat}


def measure(vocab_size: int, real: Tensor, num_rounds: int) -> dict[str, list[float]]:
    """Return, by setting and kind of logits, ms a row of transformers and of Outrider, and ms of a verify of 6 rows."""
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


LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "lenience 0.8": {"lenience": 0.8},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "repetition penalty, top-k 50": {"repetition_penalty": 1.1, "top_k": 50},
    "coupled": {"acceptance": AcceptanceRule.COUPLED},
}
SLOTS = (1, 16)
"""Verified in one step. Twice as many take about twice as long, of the step as well."""


def verifies(values: dict[str, Any], logits: Tensor, num_slots: int) -> tuple[list[Any], list[SamplingState], Tensor]:
    """What a step of num_slots verifies hands to `decide`: each with drafts from laws near the target's.

    logits: of one slot, [K + 1, V] float32.
    """
    generator = np.random.default_rng(1)
    ready, states = list[Any](), list[SamplingState]()
    for slot in range(num_slots):
        params = SamplingParams(max_tokens=1000, seed=slot, **values)
        prompt = generator.integers(0, logits.shape[1], NUM_PROMPT).tolist()
        state, ids, laws = SamplingState(params, prompt, ()), list[int](), list[TokenDistribution]()
        noise = torch.from_numpy(generator.standard_normal(logits.shape, dtype=np.float32))
        draft = HostLogits(logits + 0.5 * noise)
        for j in range(len(logits) - 1):
            laws.append(draft.distribution(j, LogitRow(state, tuple(ids))).normalised())
            ids.append(laws[-1].draw(float(generator.uniform(1e-9, 1.0))))
        slot: Any = SimpleNamespace(params=params, committed=prompt)
        ready.append(chain_proposal(slot, ids, None if params.is_deterministic else laws))
        states.append(state)
    return ready, states, logits.repeat(num_slots, 1)


def wide_target() -> Path:
    """The demo target's shape with 128,256 ids and random weights, made once."""
    folder = WORK / "random-wide"
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(DEMO_TARGET)
        config.vocab_size = VOCABULARIES[-1]
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(DEMO_TARGET).save_pretrained(folder)
    return folder


def saved_shares(folder: Path, logits: Tensor, all_slots: Sequence[int], num_rounds: int) -> list[list[str]]:
    """By law and slots: ms of a step, of what it decides on the host and in torch, and the share of the step saved."""
    rows = []
    for num_slots in all_slots:
        steps = load_ours(folder, "float32", "fused", list(range(256)), num_slots, [len(logits)])
        forward = steps.for_shape(num_slots, len(logits))
        for name, values in LAWS.items():
            step = verifies(values, logits, num_slots)
            calls: list[Callable[[], object]] = [
                lambda step=step: decide(*step),  # type: ignore[misc]
                lambda step=step: decide_on_device(*step),  # type: ignore[misc]
                lambda forward=forward: forward.step(time.process_time),  # type: ignore[misc]
            ]
            taken = [[_seconds(call) for call in calls] for _ in range(num_rounds + 1)][1:]
            host, batch, model = (1e3 * statistics.median(times) for times in zip(*taken, strict=True))
            saved, low, high = with_interval([100 * (torch_s - host_s) / step_s for host_s, torch_s, step_s in taken])
            shown = [f"{value:.2f}" for value in (model, host, batch)]
            rows.append([name, str(num_slots), *shown, f"{saved:.0f} ({low:.0f} to {high:.0f})"])
    return rows


MEASURE = """
import json, sys, torch
from benchmarks.sampling import NUM_ROWS, VOCABULARIES, demo_logits, measure, tune_malloc
torch.set_num_threads(1)
tune_malloc()
with torch.inference_mode():
    real = demo_logits(NUM_ROWS)
    print(json.dumps({vocab_size: measure(vocab_size, real, int(sys.argv[1])) for vocab_size in VOCABULARIES}))
"""
"""What both checkouts run, each with its own code."""


def compare(report: Report, commit: str, num_pairs: int, num_rounds: int) -> None:
    """Report each row's time at an earlier commit over its time here, of processes that took turns."""
    trees = (earlier_checkout(commit), REPO)
    ratios: dict[str, list[float]] = {}
    for _ in range(num_pairs):
        then, now = (_measured(tree, num_rounds) for tree in trees)
        for row, took_ms in now.items():
            ratios.setdefault(row, []).append(math.log(then[row] / took_ms))
    found = {row: [math.exp(each) for each in with_interval(logs)] for row, logs in ratios.items()}
    rows = [[row, f"{mean:.3f}", f"{low:.3f} to {high:.3f}"] for row, (mean, low, high) in found.items()]
    report.table(f"Speed over that at {commit}, {num_pairs} pairs", ["", "ratio", "95 %"], rows)
    report.text(f"Geometric mean: {statistics.geometric_mean(mean for mean, *_ in found.values()):.3f}.")
    report.data["before"] = found


def _measured(tree: Path, num_rounds: int) -> dict[str, float]:
    """Return ms by row: vocabulary, setting, and whether it is a draft's row or a whole verify."""
    command = [str(tree / ".venv/bin/python"), "-c", MEASURE, str(num_rounds)]
    made = subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {
        f"{int(vocab_size):,} ids; {name}; {kind}": took_ms
        for vocab_size, found in json.loads(made.splitlines()[-1]).items()
        for name, (_, *ours) in found.items()
        for kind, took_ms in zip(("row", "verify"), ours, strict=False)
    }


def _seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="calls of each side; the shortest counts")
    parser.add_argument("--step-rounds", type=int, default=10, help="calls of each side beside a step; 0 for none")
    parser.add_argument("--before", metavar="COMMIT", help="compare with that commit of ours, and do nothing else")
    parser.add_argument("--pairs", type=int, default=12, help="of processes, for --before")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_malloc()  # as every worker does
    report = Report("sampling", "From logits to a token")
    if options.before:
        compare(report, options.before, options.pairs, options.rounds)
    else:
        compute(report, options)
    if options.write:
        report.write()


def compute(report: Report, options: argparse.Namespace) -> None:
    """Report what every setting takes, and what the host's law saves of a step."""
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
        sizes = {"the demo target": DEMO_TARGET, "94M": random_94m(2048), "the demo target, wider": wide_target()}
        for name, folder in sizes.items() if options.step_rounds else ():
            vocab_size = AutoConfig.from_pretrained(folder).vocab_size
            logits = logits_of(vocab_size, real, np.random.default_rng(0))["real"]
            columns = ["", "slots", "step, ms", "host, ms", "torch, ms", "saved, % of a step (95 %)"]
            title = f"Verify of {NUM_ROWS} rows a slot beside a step: {name}, vocabulary of {vocab_size:,}"
            report.table(
                title,
                columns,
                saved_shares(folder, logits, SLOTS if vocab_size < VOCABULARIES[-1] else (1,), options.step_rounds),
            )


if __name__ == "__main__":
    main()
