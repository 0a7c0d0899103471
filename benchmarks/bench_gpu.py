"""Measure on a GPU: steps against the memory floor, graphs against eager steps, tokens/s beside transformers.

    make bench-gpu                                    # or: python -m benchmarks.bench_gpu --help

The demo pair is *widened* (benchmarks/widen.py), the draft to about 1B parameters and the target to about 3B: the demo
pair's own text and acceptance at the cost of models of that size. Draft and target share the one GPU. Everything that
is compared takes turns within one run. Exits 3 where there is no GPU; `--rehearse` runs all of it on the CPU with small
models, which shows that it works and measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, WORK, Report, dev_prompts
from benchmarks.running import running
from benchmarks.widen import Sizes, widen_folder
from outrider.client import AsyncClient, Speculation
from outrider.engine.cuda.graphed_path import GraphedPath
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.wire.settings.config import TargetConfig

SIZES = {
    "draft": (DEMO_DRAFT, Sizes(hidden=2048, intermediate=5632, heads=32, kv_heads=8, extra_layers=20)),  # 1.0B
    "target": (DEMO_TARGET, Sizes(hidden=3072, intermediate=8192, heads=48, kv_heads=8, extra_layers=22)),  # 2.8B
}
SMALL = {
    "draft": (DEMO_DRAFT, Sizes(hidden=256, intermediate=512, heads=4, kv_heads=2)),
    "target": (DEMO_TARGET, Sizes(hidden=512, intermediate=1024, heads=8, kv_heads=2)),
}
DTYPE = "bfloat16"
CONTEXT_TOKENS = 512
NO_GPU = 3
"""Exit status where there is no GPU."""


@dataclass(frozen=True)
class Plan:
    """The models, sizes and device of a run."""

    device: torch.device
    folders: dict[str, Path]
    batches: Sequence[int]
    num_draft_tokens: int
    num_rounds: int
    prompts: Sequence[str]
    max_tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("-K", "--num-draft-tokens", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30, help="steps of each kind; the median counts")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU with small models; the figures mean nothing"
    )
    options = parser.parse_args(argv)
    if not options.rehearse and not torch.cuda.is_available():
        print("no GPU: torch sees no CUDA device here, nothing is measured", file=sys.stderr)
        return NO_GPU
    device = torch.device("cpu") if options.rehearse else torch.device("cuda", 0)
    sizes = SMALL if options.rehearse else SIZES
    plan = Plan(
        device=device,
        folders={role: _widened(role, *wanted, small=options.rehearse) for role, wanted in sizes.items()},
        batches=options.batch,
        num_draft_tokens=options.num_draft_tokens,
        num_rounds=options.rounds,
        prompts=dev_prompts(options.prompts),
        max_tokens=options.max_tokens,
    )
    report = Report("gpu", "On a GPU: the demo pair widened to about 1B and 3B parameters, bfloat16")
    report.text(f"Device: {_device_name(device)}.")
    bandwidth = _bandwidth(device, 2**26 if options.rehearse else 2**31)
    report.text(f"Memory is copied at {bandwidth / 1e9:.0f} GB/s; the floor of a step is its weights at that rate.")
    for role, folder in plan.folders.items():
        _steps(report, role, folder, plan, bandwidth)
    _throughput(report, plan)
    if options.rehearse:
        print("a rehearsal: nothing is written")
    else:
        report.write()
    return 0


def _widened(role: str, source: Path, sizes: Sizes, *, small: bool) -> Path:
    """Return the folder of the widened model, made when it is missing."""
    folder = WORK / f"gpu-{role}{'-small' if small else ''}"
    if not (folder / "config.json").exists():
        print(f"{role}: {widen_folder(source, folder, sizes, getattr(torch, DTYPE))}", flush=True)
    return folder


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU, a rehearsal"
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until the last kernel of `run` has ended."""
    _wait(device)
    started = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bandwidth(device: torch.device, num_values: int) -> float:
    """Return the bytes read and written per second by a copy, the best of several."""
    source = torch.zeros(num_values, dtype=torch.bfloat16, device=device)
    copy = torch.empty_like(source)
    return 4 * num_values / min(_seconds(lambda: copy.copy_(source), device) for _ in range(10))


# steps


def _steps(report: Report, role: str, folder: Path, plan: Plan, bandwidth: float) -> None:
    """Add a table of decode and verify steps of one model, in turns by transformers, eagerly and by graph."""
    runner = _runner(folder, plan)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPE)).to(plan.device).eval()
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())  # the embedding is also the head
    floor_ms = 1e3 * num_bytes / bandwidth
    rows = []
    for batch in plan.batches:
        for width in (1, plan.num_draft_tokens + 1):
            arms = {"transformers": _transformers_step(model, batch, width, plan.device)}
            arms |= _our_steps(runner, batch, width)
            ms = {name: 1e3 * value for name, value in _in_turns(arms, plan).items()}
            graph, eager = ms.get("graph", math.nan), ms["eager"]
            figures = (ms["transformers"], eager, graph, eager / graph, graph / floor_ms)
            rows.append([f"{batch} x {width}", *("-" if math.isnan(f) else f"{f:.2f}" for f in figures)])
    columns = ["rows x tokens", "transformers ms", "eager ms", "graph ms", "eager / graph", "graph / floor"]
    heading = f"Steps of the {role}, {num_bytes / 2e9:.2f}B parameters, {CONTEXT_TOKENS} tokens of context each"
    report.table(f"{heading}; floor {floor_ms:.2f} ms", columns, rows)
    report.data[f"{role}_steps"] = {
        "floor_ms": floor_ms,
        "rows": [dict(zip(columns, row, strict=True)) for row in rows],
    }


def _runner(folder: Path, plan: Plan) -> ModelRunner:
    """Return a runner with room for the widest step, its graphs captured."""
    most = max(plan.batches)
    runner = load_runner(
        TargetConfig(
            model=str(folder),
            device=str(plan.device),
            dtype=DTYPE,
            kv_cache_tokens=(most + 1) * (CONTEXT_TOKENS + 512),
            max_slots=most,
            context_limit=None,
            attention_path="flash" if plan.device.type == "cuda" else "auto",
        )
    )
    if isinstance(runner.path, GraphedPath):
        runner.path.prepare(most, runner.facts.context_limit)
    return runner


def _context(count: int, vocab_size: int) -> list[int]:
    return [(7 * i + 3) % vocab_size for i in range(count)]


def _our_steps(runner: ModelRunner, batch: int, width: int) -> dict[str, Callable[[], object]]:
    ids = _context(CONTEXT_TOKENS + width, runner.facts.vocab_size)
    tables = [runner.pool.new_table() for _ in range(batch)]
    for table in tables:
        runner.forward([Row.of(table, ids[:CONTEXT_TOKENS], 0, 0)])
    rows = [Row.of(table, ids, CONTEXT_TOKENS, width) for table in tables]

    def step(graphs: bool) -> None:
        if isinstance(runner.path, GraphedPath):
            runner.path.uses_graphs = graphs
        runner.forward(rows)
        for row in rows:
            row.table.truncate(row.num_cached)

    arms: dict[str, Callable[[], object]] = {"eager": lambda: step(graphs=False)}
    if isinstance(runner.path, GraphedPath):
        arms["graph"] = lambda: step(graphs=True)
    return arms | {"": lambda: [table.free() for table in tables]}  # `_in_turns` removes it


@torch.inference_mode()
def _transformers_step(model: PreTrainedModel, batch: int, width: int, device: torch.device) -> Callable[[], object]:
    """Return transformers' step in its best case: every row of the same length, without a mask."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([_context(CONTEXT_TOKENS, model.config.vocab_size)] * batch, device=device)  # [B, T]
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def step() -> None:
        model(ids[:, :width], past_key_values=cache, use_cache=True)
        cache.crop(-width)

    return step


def _in_turns(arms: dict[str, Callable[[], object]], plan: Plan) -> dict[str, float]:
    """Return the median seconds of each arm; the arm without a name frees what the others used."""
    end = arms.pop("", lambda: None)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repetition in range(plan.num_rounds + 3):  # the first three warm up, and prove a graph
        for name, run in arms.items():
            seconds = _seconds(run, plan.device)
            if repetition >= 3:
                times[name].append(seconds)
    end()
    return {name: statistics.median(values) for name, values in times.items()}


# tokens per second


def _throughput(report: Report, plan: Plan) -> None:
    """Compare one prompt at a time, greedy: transformers plain and assisted, ours plain and speculative, in turns.

    Runs without a prefix cache, since transformers feeds every prompt in both its arms.
    """
    values = {
        role: {"model": str(folder), "dtype": DTYPE, "device": str(plan.device), "prefix_caching": False}
        for role, folder in plan.folders.items()
    }
    gc.collect()
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()  # the workers are processes of their own
    with running(values["target"], values["draft"]) as endpoints:
        asyncio.run(_compare(report, plan, endpoints.grpc))


async def _compare(report: Report, plan: Plan, address: str) -> None:
    theirs = _Transformers(plan)
    k, times = plan.num_draft_tokens, dict[str, list[float]]()
    texts: dict[str, list[list[int]]] = {}
    async with AsyncClient(address) as client:
        arms = {
            "transformers": lambda text: theirs.generate(text, assisted=False),
            "transformers, assisted": lambda text: theirs.generate(text, assisted=True),
            "Outrider": lambda text: _generate(client, text, plan.max_tokens, 0),
            f"Outrider, K = {k}": lambda text: _generate(client, text, plan.max_tokens, k),
        }
        for index, text in enumerate([plan.prompts[0], *plan.prompts]):  # the first one warms up
            for name, generate in arms.items():
                started = time.perf_counter()
                token_ids = await generate(text)
                seconds = time.perf_counter() - started
                if index:
                    times.setdefault(name, []).append(seconds)
                    texts.setdefault(name, []).append(token_ids)
    rows = []
    for name, own in times.items():
        rate = sum(map(len, texts[name])) / sum(own)
        same = sum(a == b for a, b in zip(texts[name], texts["transformers"], strict=True))
        rows.append([name, f"{rate:.1f}", f"{same} of {len(own)}"])
    columns = ["", "tokens/s", "same text as transformers"]
    heading = f"Greedy, one prompt at a time, {len(plan.prompts)} prompts x {plan.max_tokens} tokens"
    report.table(heading, columns, rows)
    report.data["throughput"] = [dict(zip(("engine", *columns[1:]), row, strict=True)) for row in rows]


async def _generate(client: AsyncClient, text: str, max_tokens: int, k: int) -> list[int]:
    speculation = Speculation(enabled=k > 0, num_draft_tokens=k)
    options = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "speculation": speculation}
    async with client.stream(text, **options) as stream:
        return [token.id for item in [item async for item in stream] for token in item.tokens]


class _Transformers:
    """Runs both models on the same device with transformers' own loops."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._target, self._draft = (self._load(plan.folders[role]) for role in ("target", "draft"))
        self._draft.generation_config.num_assistant_tokens = plan.num_draft_tokens
        self._draft.generation_config.num_assistant_tokens_schedule = "constant"
        self._tokenizer = AutoTokenizer.from_pretrained(plan.folders["target"])

    def _load(self, folder: Path) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPE)).to(self._plan.device).eval()
        model.generation_config.eos_token_id = None  # ends of sequence are ignored
        model.generation_config.pad_token_id = 0
        return model

    @torch.inference_mode()
    def _run(self, text: str, assisted: bool) -> list[int]:
        ids = self._tokenizer(text, return_tensors="pt").input_ids.to(self._plan.device)  # [1, T]
        made = self._target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self._plan.max_tokens,
            do_sample=False,
            assistant_model=self._draft if assisted else None,
        )
        return made[0, ids.shape[1] :].tolist()

    async def generate(self, text: str, assisted: bool) -> list[int]:
        return self._run(text, assisted)


if __name__ == "__main__":
    sys.exit(main())
