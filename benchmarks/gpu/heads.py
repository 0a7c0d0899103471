"""Section `heads`: one answer of each kind of draft head for the demo target, beside transformers' own.

All are started at once: a target, one with Medusa heads of its own, and a draft for each kind. The demo pair's EAGLE-3
and Medusa heads are trained; the others have random weights in the layouts that people hold, so that nearly all they
propose is refused, and the answer is the target's all the same.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import DEMO_EAGLE3, DEMO_MEDUSA, DEMO_TARGET, Bench
from benchmarks.gpu.load import difference, is_well
from benchmarks.gpu.services import PROMPTS, Worker, WorkerFailed, gateway, workers
from gateway.generation import SpeculationOptions
from outrider.lab.models.reference_generate import Generated, Reference
from outrider.wire.requests.drafters import Drafter

SMALL: dict[str, Any] = {"kv_cache_tokens": 8192, "max_slots": 8}
TRAINED = ("eagle3", "medusa")
TRUST: dict[str, Any] = {"trust_draft_config": True}
"""For heads of random weights, which no wiring explains."""
CHAIN = SpeculationOptions(num_draft_tokens=3)
NUM_TOKENS = 24


def run(bench: Bench) -> None:
    folder = bench.folder(256 << 20)
    target_model, kinds = (str(DEMO_TARGET), {"medusa": str(DEMO_MEDUSA)}) if bench.rehearse else _kinds(folder)
    place = {"device": bench.device, **SMALL}
    with workers() as started:
        target = Worker("target", model=target_model, **place)
        with_heads = Worker("target", model=DEMO_TARGET, heads=DEMO_MEDUSA, **place)
        started += [target, with_heads]
        drafts = {}
        for kind, model in kinds.items():
            settings = {"model": model, "target_model": target_model, **place}
            if kind not in TRAINED:
                settings |= TRUST
            drafts[kind] = Worker("draft", **settings)
            started.append(drafts[kind])
        num_well = asyncio.run(_answers(bench, target, with_heads, drafts))
    bench.sum_up(f"{num_well} of {len(kinds) + 1} kinds answer as the target does")


def _kinds(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the target's folder, the demo target with an MTP head behind its layers, and a draft's for each kind."""
    from tests import random_heads as heads

    target = str(DEMO_TARGET)
    with_mtp = heads.random_mtp(target, folder / "mtp")
    pard = heads.random_pard(folder / "pard", 4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_TARGET / name, pard)
    return with_mtp, {
        "eagle3": str(DEMO_EAGLE3),
        "medusa": str(DEMO_MEDUSA),
        "eagle1": heads.random_eagle1(target, folder / "eagle1"),
        "mtp": with_mtp,
        "peagle": heads.random_peagle(target, folder / "peagle"),
        "dflash": heads.random_dflash(target, folder / "dflash"),
        "dspark": heads.random_dflash(target, folder / "dspark", markov="gated"),
        "pard": pard,
    }


async def _answers(bench: Bench, target: Worker, with_heads: Worker, drafts: dict[str, Worker]) -> int:
    expected = Reference(str(DEMO_TARGET)).generate(PROMPTS[0], bench.size(NUM_TOKENS, 6))
    address = await asyncio.to_thread(target.address)
    num_well = 0
    for kind, draft in drafts.items():
        num_well += await _one(bench, kind, address, draft, expected, CHAIN)
    own = SpeculationOptions(num_draft_tokens=3, drafter=Drafter.HEADS)
    num_well += await _one(bench, "heads in the target", with_heads, None, expected, own)
    return num_well


async def _one(
    bench: Bench,
    kind: str,
    target: str | Worker,
    draft: Worker | None,
    expected: Generated,
    speculation: SpeculationOptions,
) -> bool:
    """Report one kind's answer; return whether it is the target's and something was drafted."""
    try:
        address = target if isinstance(target, str) else await asyncio.to_thread(target.address)
        draft_address = None if draft is None else await asyncio.to_thread(draft.address)
        async with gateway(address, draft_address) as served:
            refusals = served.refusals()
            if refusals:
                raise WorkerFailed("; ".join(refusals))
            answer = await served.answer(expected.prompt_ids, len(expected.ids), speculation)
    except Exception as error:  # whatever it is, the other kinds are tried
        bench.find(f"{kind}: {type(error).__name__}: {str(error).splitlines()[-1] if str(error) else ''}")
        bench.tell("head", head=kind, outcome=str(error))
        return False
    usage = answer.usage
    bench.tell(
        "head",
        head=kind,
        outcome=difference(answer.ids, expected) or "the target's answer",
        rounds=usage.num_rounds,
        drafted=usage.num_draft_tokens,
        accepted=usage.num_accepted_tokens,
    )
    return is_well(bench, kind, answer, expected, needs_drafts=True)
