"""Section `heads`: one answer of each kind of draft head for the demo target, beside the target's plain answer.

All are started at once: a target, one with Medusa heads of its own, and a draft for each kind. The demo pair's EAGLE-3
and Medusa heads are trained; the others have random weights in the layouts that people hold, so that nearly all they
propose is refused, and the answer is the target's all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import DEMO_EAGLE3, DEMO_MEDUSA, DEMO_TARGET, Bench
from benchmarks.gpu.services import PLAIN, Worker, WorkerFailed, gateway, prompt_ids, workers
from gateway.generation import SpeculationOptions
from outrider.wire.kinds import Drafter

SMALL: dict[str, Any] = {"kv_cache_tokens": 8192, "max_slots": 8}
TRUST: dict[str, Any] = {"trust_draft_config": "true"}
"""For heads of random weights, which no wiring explains."""
CHAIN = SpeculationOptions(num_draft_tokens=3)
NUM_TOKENS = 24


def run(bench: Bench) -> None:
    folder = bench.folder(256 << 20)
    kinds = bench.size(_kinds(folder), {"medusa": lambda: str(DEMO_MEDUSA)})
    place = {"device": bench.device, **SMALL}
    with workers() as started:
        target = Worker("target", model=DEMO_TARGET, **place)
        with_heads = Worker("target", model=DEMO_TARGET, heads=DEMO_MEDUSA, **place)
        started += [target, with_heads]
        drafts = {}
        for kind, make in kinds.items():
            is_trained = kind in ("eagle3", "medusa")
            settings = {"model": make(), "target_model": DEMO_TARGET, **place, **({} if is_trained else TRUST)}
            drafts[kind] = Worker("draft", **settings)
            started.append(drafts[kind])
        num_well = asyncio.run(_answers(bench, target, with_heads, drafts))
    bench.sum_up(f"{num_well} of {len(kinds) + 1} kinds answer as the target does")


def _kinds(folder: Path) -> dict[str, Callable[[], str]]:
    from tests import random_heads as heads

    target = str(DEMO_TARGET)
    return {
        "eagle3": lambda: str(DEMO_EAGLE3),
        "medusa": lambda: str(DEMO_MEDUSA),
        "eagle1": lambda: heads.random_eagle1(target, folder / "eagle1"),
        "mtp": lambda: heads.random_mtp(target, folder / "mtp"),
        "peagle": lambda: heads.random_peagle(target, folder / "peagle"),
        "dflash": lambda: heads.random_dflash(target, folder / "dflash"),
        "dspark": lambda: heads.random_dflash(target, folder / "dspark", markov="gated"),
        "pard": lambda: heads.random_pard(folder / "pard", 4096),
    }


async def _answers(bench: Bench, target: Worker, with_heads: Worker, drafts: dict[str, Worker]) -> int:
    prompt = prompt_ids(DEMO_TARGET, 1)[0]
    num_tokens = bench.size(NUM_TOKENS, 6)
    address = await asyncio.to_thread(target.address)
    async with gateway(address) as served:
        plain = await served.answer(prompt, num_tokens, PLAIN)
    num_well = 0
    for kind, draft in drafts.items():
        num_well += await _one(bench, kind, address, draft, prompt, plain.ids, CHAIN)
    own = SpeculationOptions(num_draft_tokens=3, drafter=Drafter.HEADS)
    num_well += await _one(bench, "heads in the target", with_heads, None, prompt, plain.ids, own)
    return num_well


async def _one(
    bench: Bench,
    kind: str,
    target: str | Worker,
    draft: Worker | None,
    prompt: list[int],
    plain_ids: list[int],
    speculation: SpeculationOptions,
) -> bool:
    """Report one kind's answer; return whether it is the target's own and something was drafted."""
    try:
        address = target if isinstance(target, str) else await asyncio.to_thread(target.address)
        draft_address = None if draft is None else await asyncio.to_thread(draft.address)
        async with gateway(address, draft_address) as served:
            refusals = served.refusals()
            if refusals:
                raise WorkerFailed("; ".join(refusals))
            answer = await served.answer(prompt, len(plain_ids), speculation)
    except Exception as error:  # whatever it is, the other kinds are tried
        bench.find(f"{kind}: {type(error).__name__}: {str(error).splitlines()[-1] if str(error) else ''}")
        bench.tell("head", head=kind, outcome=str(error))
        return False
    is_same = answer.ids == plain_ids
    usage = answer.usage
    bench.tell(
        "head",
        head=kind,
        outcome="the target's answer" if is_same else "ANOTHER ANSWER",
        rounds=usage.num_rounds,
        drafted=usage.num_draft_tokens,
        accepted=usage.num_accepted_tokens,
    )
    if not is_same:
        place = next(i for i, (own, other) in enumerate(zip(answer.ids, plain_ids, strict=False)) if own != other)
        bench.find(f"{kind}: another answer than the target's from token {place} on (a near tie, or wrong)")
    if not usage.num_draft_tokens:
        bench.find(f"{kind}: nothing was drafted")
    return is_same and usage.num_draft_tokens > 0
