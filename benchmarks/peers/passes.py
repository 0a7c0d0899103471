"""Send some prompts through a running Outrider, a number at a time, in one mode, through the SDK: a pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.client import AsyncClient, Round, Speculation

PHASES = ("deliver", "verify", "overhead")
"""Phases of a round in the SDK's timings: waiting for drafts; queue, forward and acceptance in the target; the rest,
which is gateway and control streams."""


@dataclass(frozen=True)
class Sample:
    """The result of one pass."""

    outputs: list[list[int]]
    """Token ids in the order of the prompts."""
    rounds: list[Round]
    elapsed_s: float


async def run_pass(
    client: AsyncClient,
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: int,
    temperature: float,
    max_tokens: int,
    speculation: Speculation | bool,
    seed: int = 0,
    on_round: Callable[[Round], None] = lambda item: None,
) -> Sample:
    """Answer all prompts, given as token ids, once; ends of sequence are ignored.

    speculation: False is plain decoding. on_round: called with each round as it comes.
    """
    places = asyncio.Semaphore(concurrency)
    outputs: list[list[int]] = [[] for _ in prompts]
    rounds: list[Round] = []
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "speculation": speculation}

    async def answer(index: int, prompt: Sequence[int]) -> None:
        async with (
            places,
            client.stream(prompt_ids=list(prompt), seed=seed + index, ignore_eos=True, **options) as stream,
        ):
            async for item in stream:
                rounds.append(item)
                on_round(item)
                outputs[index].extend(token.id for token in item.tokens)

    started = time.perf_counter()
    await asyncio.gather(*(answer(index, prompt) for index, prompt in enumerate(prompts)))
    return Sample(outputs, rounds, time.perf_counter() - started)


def phase_shares(rounds: Sequence[Round]) -> dict[str, float]:
    """Return each phase's share of the rounds' time."""
    total = sum(item.timings.total_s for item in rounds)
    return {name: sum(getattr(item.timings, f"{name}_s") for item in rounds) / total for name in PHASES}
