"""Section `together`: two workers on one card, with nothing but their models named, and an answer of the pair.

The models are small but for their KV caches: what all slots may use is many times the card's memory, so that a worker
that takes nearly all that is free leaves the other none.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import TINY, Shape, random_llama, save
from benchmarks.gpu.services import Worker, WorkerFailed, one_answer, prompt_ids, workers

HUNGRY = Shape(1024, 2048, 16, 8, 8, 4096, 128, 131_072)
"""64 KiB of KV a token: 64 slots of 131,072 tokens are 512 GiB."""


def run(bench: Bench) -> None:
    folder = bench.folder(2 << 30)
    models = _write_models(bench, folder)
    before_gib = _free_gib(bench)
    with workers() as started:
        for role in ("draft", "target"):
            started.append(Worker(role, model=models[role], device=bench.device))
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
        answer = one_answer(target, draft, prompt_ids(models["target"], 1)[0], bench.size(16, 4), num_draft_tokens=2)
    bench.tell("answer", tokens=len(answer.ids), drafted=answer.usage.num_draft_tokens, seconds=answer.seconds)
    if not answer.usage.num_draft_tokens:
        bench.find("the pair on one card answers without drafts")
    bench.sum_up(f"both serve; {before_gib:.1f} GiB free before, {after_gib:.1f} with both")


def _write_models(bench: Bench, folder: Path) -> dict[str, Path]:
    """Write the same random model for both roles: its drafts are then its own words."""
    shape = bench.size(HUNGRY, TINY)
    if bench.rehearse:
        shape = Shape(**{**_fields(shape), "vocab": 4096})
    save(random_llama(shape, bench.device, torch.bfloat16), folder / "model")
    if bench.on_card:
        torch.cuda.empty_cache()
    return {"draft": folder / "model", "target": folder / "model"}


def _fields(shape: Shape) -> dict[str, int]:
    return {name: getattr(shape, name) for name in shape.__slots__}


def _free_gib(bench: Bench) -> float:
    if not bench.on_card:
        return 0.0
    return float(torch.cuda.mem_get_info(0)[0] / 2**30)
