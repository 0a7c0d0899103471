"""Section `served`: an 8B target and a 1B draft, served by plain processes: the demo pair widened on the card.

Widened models say what the demo pair says, at the cost of their size, so that drafts are accepted as a trained pair's
are. Three placements: the draft on the processor's cores, both on the card, and no drafts. One target serves all three,
and each draft is loaded once. Requests say nothing of K: it is `auto`, as users get it.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu.bench import DEMO_DRAFT, DEMO_TARGET, Bench
from benchmarks.gpu.models import WIDE_DRAFT, WIDE_TARGET, WIDE_VOCAB, save, widened
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.services import PLAIN, PROMPTS, Gateway, Worker, gateway, prompt_ids, workers
from gateway.generation import RoundOutput, SpeculationOptions

BOTH_BYTES = 20 << 30
"""Bytes of the two widened models' files, with some to spare."""
CELL_S = 8.0
"""Seconds of a cell, less where loading left too little of the section's time for all of them."""
MIN_CELL_S = 4.0
"""Seconds that a cell has at least."""
ENDING_S = 3.0
"""Seconds of the section for what follows the cells, and for what each takes beside its own time."""
WARM_TOKENS = 16
"""Tokens of a placement's first answer, which is not measured: kernels are loaded and chosen by it."""
WARM_S = 1.5
"""Of these, seconds before tokens count: K is chosen by what was measured."""
MAX_TOKENS = 192
LOADS = ((1, 0.0), (8, 0.0), (8, 1.0))
"""Answers at once, and temperature."""
AUTO = SpeculationOptions(num_draft_tokens="auto")
MIN_CORES = 8
"""Cores from which each process gets its own."""


@dataclass
class Cell:
    """What came in a cell's counted time."""

    counts_from_s: float
    counts_until_s: float
    """Monotonic times."""

    num_tokens: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    first_tokens_s: list[float] = field(default_factory=list)

    def note(self, output: RoundOutput) -> None:
        if self.counts_from_s <= time.monotonic() < self.counts_until_s:
            self.num_tokens += len(output.tokens)
            self.num_rounds += 1
            self.num_drafted += output.num_drafted
            self.num_accepted += output.num_accepted


def run(bench: Bench) -> None:
    ends_s = time.monotonic() + SECTIONS["served"].limit_s - ENDING_S
    folder = _models(bench)
    target_cores, own_cores, draft_cores = _cores()
    if own_cores is not None:
        os.sched_setaffinity(0, own_cores)
    place = {"dtype": "bfloat16", "max_slots": 16, "kv_cache_tokens": 16_384}
    with workers() as started:
        target = Worker("target", model=folder["target"], device=bench.device, **target_cores, **place)
        on_cpu = Worker("draft", model=folder["draft"], device="cpu", **draft_cores, **place)
        started += [target, on_cpu]
        on_card = None
        if not bench.rehearse:
            # The other draft's cores: only one of the two drafts at a time.
            on_card = Worker("draft", model=folder["draft"], device=bench.device, **draft_cores, **place)
            started.append(on_card)
        asyncio.run(_placements(bench, target, on_cpu, on_card, ends_s))
        for worker in started:
            bench.tell("worker", role=worker.role, load_s=worker.load_s, log=worker.log(3))


def _rates(tokens_per_s: dict[str, dict[tuple[int, float], float]], load: tuple[int, float]) -> str:
    """Return the tokens per second of each placement at a load, in words."""
    rates = [f"{name} {of_loads[load]:.0f}" for name, of_loads in tokens_per_s.items() if load in of_loads]
    return f"{load[0]} at T={load[1]:g}: {', '.join(rates)}"


def _models(bench: Bench) -> dict[str, Path]:
    """Return the folders of the widened pair, made here; of the demo pair itself in a rehearsal."""
    if bench.rehearse:
        return {"target": DEMO_TARGET, "draft": DEMO_DRAFT}
    folder, found = bench.folder(BOTH_BYTES), {}
    for role, source, sizes in (("draft", DEMO_DRAFT, WIDE_DRAFT), ("target", DEMO_TARGET, WIDE_TARGET)):
        began_s = time.monotonic()
        model, difference = widened(source, sizes, WIDE_VOCAB, bench.device, torch.bfloat16)
        made_s = time.monotonic() - began_s
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        save(model, folder / role)
        found[role] = folder / role
        bench.tell(
            "widened",
            role=role,
            parameters=num_parameters,
            made_s=made_s,
            saved_s=time.monotonic() - began_s - made_s,
            largest_logit_difference=difference,
            place=str(folder),
        )
        del model
        torch.cuda.empty_cache()
    return found


def _cores() -> tuple[dict[str, str], set[int] | None, dict[str, str]]:
    """Return the cores of the target, of this process, and of the drafts, which take turns."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < MIN_CORES:
        return {}, None, {}
    card, own, draft = cores[:2], cores[2:4], cores[4:]
    return {"cpu_cores": ",".join(map(str, card))}, set(own), {"cpu_cores": ",".join(map(str, draft))}


async def _placements(bench: Bench, target: Worker, on_cpu: Worker, on_card: Worker | None, ends_s: float) -> None:
    """Measure all cells; sum them up after each placement. ends_s: monotonic time at which the last one is over."""
    placements: list[tuple[str, Worker | None, SpeculationOptions]] = [("draft on the CPU", on_cpu, AUTO)]
    if on_card is not None:
        placements.append(("both on the card", on_card, AUTO))
    placements.append(("plain", None, PLAIN))
    loads = bench.size(LOADS, LOADS[:1])
    num_left = len(placements) * len(loads)
    address = await asyncio.to_thread(target.address)
    found: dict[str, dict[tuple[int, float], float]] = {}
    for name, draft, speculation in placements:
        found[name] = {}
        try:
            draft_address = None if draft is None else await asyncio.to_thread(draft.address)
            async with AsyncExitStack() as stack:
                served = await stack.enter_async_context(gateway(address, draft_address))
                for why in served.refusals():
                    bench.find(f"{name}: {why}")
                await served.answer(prompt_ids(DEMO_TARGET, 1)[0], WARM_TOKENS, speculation)
                for index, load in enumerate(loads):
                    cell_s = (ends_s - time.monotonic()) / (num_left - index)
                    cell_s = min(bench.size(CELL_S, 1.5), max(MIN_CELL_S, cell_s))
                    at_once, temperature = load
                    found[name][load] = await _cell(bench, served, name, speculation, at_once, temperature, cell_s)
        except Exception as error:  # one placement that fails leaves the others
            bench.find(f"{name}: {_told(error)}")
        num_left -= len(loads)
        bench.sum_up("tok/s, " + "; ".join(_rates(found, load) for load in loads))


def _told(error: BaseException) -> str:
    """Return what an error says; of a group, what its first one says."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


async def _cell(
    bench: Bench,
    served: Gateway,
    name: str,
    speculation: SpeculationOptions,
    at_once: int,
    temperature: float,
    cell_s: float,
) -> float:
    """Keep so many answers running for a cell's time; report and return the tokens per second."""
    prompts = prompt_ids(DEMO_TARGET, len(PROMPTS))
    warm_s = bench.size(WARM_S, 0.3)
    began_s = time.monotonic()
    cell = Cell(began_s + warm_s, began_s + cell_s)

    async def caller(number: int) -> None:
        while True:
            prompt = prompts[number % len(prompts)]
            answer = await served.answer(
                prompt, MAX_TOKENS, speculation, temperature=temperature, seed=number, on_output=cell.note
            )
            cell.first_tokens_s.append(answer.first_token_s)
            number += at_once

    try:
        async with asyncio.timeout(cell_s):
            async with asyncio.TaskGroup() as tasks:
                for number in range(at_once):
                    tasks.create_task(caller(number))
    except TimeoutError:
        pass
    counted_s = cell_s - warm_s
    rate = cell.num_tokens / counted_s
    rounds = max(1, cell.num_rounds)
    bench.tell(
        "cell",
        placement=name,
        at_once=at_once,
        temperature=temperature,
        tokens_per_s=rate,
        tokens_a_round=cell.num_tokens / rounds,
        drafted_a_round=cell.num_drafted / rounds,
        accepted_of_drafted=cell.num_accepted / max(1, cell.num_drafted),
        ms_a_round=1e3 * counted_s * at_once / rounds,
        first_token_ms=1e3 * min(cell.first_tokens_s) if cell.first_tokens_s else None,
    )
    return rate
