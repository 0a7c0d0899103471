"""Section `parity`: greedy answers of the demo pair, each path beside plain, chain, named tree and growing tree.

All workers are started at once: one draft, and a target for each path. An answer may leave that of transformers in
float32 on the CPU only where the two best tokens are nearly equally likely.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from benchmarks.gpu.bench import DEMO_DRAFT, DEMO_TARGET, Bench
from benchmarks.gpu.load import ON_CARD_PATHS, difference, is_well
from benchmarks.gpu.services import PLAIN, PROMPTS, Worker, WorkerFailed, gateway, workers
from gateway.generation import SpeculationOptions
from outrider.engine.attention.varlen_attention import torch_refusal
from outrider.lab.models.reference_generate import Generated, Reference
from outrider.wire.requests.tree_shape import TreeShape

MODES = {
    "plain": PLAIN,
    "chain": SpeculationOptions(num_draft_tokens=4),
    "named tree": SpeculationOptions(tree=TreeShape.parse("2x2x1")),
    "growing tree": SpeculationOptions(tree=TreeShape.parse("best:12x4")),
    "auto": SpeculationOptions(num_draft_tokens="auto"),
}
SMALL: dict[str, Any] = {"kv_cache_tokens": 8192, "max_slots": 8}


def run(bench: Bench) -> None:
    paths = ON_CARD_PATHS if bench.on_card else ("paged",)
    prompts = PROMPTS[: bench.size(2, 1)]
    with workers() as started:
        started.append(Worker("draft", model=DEMO_DRAFT, device=bench.device, **SMALL))
        for path in paths:
            settings = {"model": DEMO_TARGET, "device": bench.device, "attention_path": path, **SMALL}
            started.append(Worker("target", **settings))
        reference = Reference(str(DEMO_TARGET))
        expected = [reference.generate(prompt, bench.size(48, 12)) for prompt in prompts]
        draft, *targets = started
        address = draft.address()
        tally = {"cells": 0, "wrong": 0}
        for path, target in zip(paths, targets, strict=True):
            try:
                asyncio.run(_cells(bench, path, target.address(), address, expected, tally))
            except WorkerFailed as error:
                bench.tell("cell", path=path, mode="all", outcome=str(error).splitlines()[-1])
                if path != "flash" or torch_refusal(torch.__version__) is None:
                    bench.find(f"{path}: {error}")
            except Exception as error:  # one path that fails leaves the others
                bench.find(f"{path}: {type(error).__name__}: {error}")
    bench.sum_up(f"{tally['cells']} cells, {tally['wrong']} differ from transformers or lack drafts")


async def _cells(
    bench: Bench, path: str, target: str, draft: str, expected: list[Generated], tally: dict[str, int]
) -> None:
    async with gateway(target, draft) as served:
        for why in served.refusals():
            bench.find(f"{path}: {why}")
        for mode, speculation in MODES.items():
            for number, own in enumerate(expected):
                answer = await served.answer(own.prompt_ids, len(own.ids), speculation)
                tally["cells"] += 1
                bench.tell(
                    "cell",
                    path=path,
                    mode=mode,
                    prompt=number,
                    outcome=difference(answer.ids, own) or "the same",
                    rounds=answer.usage.num_rounds,
                    drafted=answer.usage.num_draft_tokens,
                    accepted=answer.usage.num_accepted_tokens,
                    ms_a_token=1e3 * answer.seconds / max(1, len(answer.ids)),
                )
                needs_drafts = mode not in ("plain", "auto")
                if not is_well(bench, f"{path}, {mode}", answer, own, needs_drafts=needs_drafts):
                    tally["wrong"] += 1
