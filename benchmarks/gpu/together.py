"""Section `together`: two workers on one card, with nothing but their models named, and an answer of the pair.

They are started with what `outrider up --no-ray` derives for workers that share a GPU. The models are small but for
their KV caches: what all slots may use is many times the card's memory, so that a worker that took nearly all that is
free would leave the other none.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import TINY, Shape, random_llama, save
from benchmarks.gpu.services import Answer, Worker, WorkerFailed, gateway, prompt_ids, workers
from gateway.generation import SpeculationOptions
from outrider.cli.up.machine_shares import own_gpu_memory
from outrider.wire.settings.system import SystemConfig

HUNGRY = Shape(1024, 2048, 16, 8, 8, 4096, 128, 131_072)
"""64 KiB of KV a token: 64 slots of 131,072 tokens are 512 GiB."""


def run(bench: Bench) -> None:
    folder = bench.folder(2 << 30)
    models = _write_models(bench, folder)
    before_gib = _free_gib(bench)
    with workers() as started:
        for role, settings in _default_settings(bench, models).items():
            started.append(Worker(role, **settings))
        addresses = []
        for worker in started:
            try:
                addresses.append(worker.address())
            except WorkerFailed as error:
                bench.find(
                    f"on one card by default settings: {str(error).splitlines()[0]} {str(error).splitlines()[-1]}"
                )
                bench.tell("worker", role=worker.role, outcome=str(error))
                continue
            line = next((each for each in worker.log() if "memory on" in each), "")
            bench.tell("worker", role=worker.role, outcome="serves", load_s=worker.load_s, memory=line)
        after_gib = _free_gib(bench)
        bench.tell("card", free_before_gib=before_gib, free_with_both_gib=after_gib)
        if len(addresses) < len(started):
            return
        draft, target = addresses
        answer = asyncio.run(_answer(target, draft, prompt_ids(models["target"], 1)[0], bench.size(16, 4)))
    bench.tell("answer", tokens=len(answer.ids), drafted=answer.usage.num_draft_tokens, seconds=answer.seconds)
    if not answer.usage.num_draft_tokens:
        bench.find("the pair on one card answers without drafts")
    bench.sum_up(f"both serve; {before_gib:.1f} GiB free before, {after_gib:.1f} with both")


async def _answer(target: str, draft: str, prompt: list[int], num_tokens: int) -> Answer:
    async with gateway(target, draft) as served:
        if served.refusals():
            raise WorkerFailed("; ".join(served.refusals()))
        return await served.answer(prompt, num_tokens, SpeculationOptions(num_draft_tokens=2))


def _default_settings(bench: Bench, models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Return what each worker is started with where both are on the one GPU, the draft first."""
    named = {role: {"model": str(model), "device": bench.device} for role, model in models.items()}
    system = SystemConfig.read({**named, "ray": None})
    shares = own_gpu_memory(system.pools)
    found: dict[str, dict[str, Any]] = {}
    for role, settings in named.items():
        found[role] = dict(settings)
        if role in shares:
            found[role]["gpu_memory_utilization"] = shares[role]
    bench.tell("derived", **{role: shares.get(role) for role in named})
    return found


def _write_models(bench: Bench, folder: Path) -> dict[str, Path]:
    """Write the same random model for both roles: its drafts are then its own words."""
    shape = bench.size(HUNGRY, TINY)
    if bench.rehearse:
        shape = replace(shape, vocab=HUNGRY.vocab)
    save(random_llama(shape, bench.device, torch.bfloat16), folder / "model")
    if bench.on_card:
        torch.cuda.empty_cache()
    return {"draft": folder / "model", "target": folder / "model"}


def _free_gib(bench: Bench) -> float:
    if not bench.on_card:
        return 0.0
    return float(torch.cuda.mem_get_info(0)[0] / 2**30)
