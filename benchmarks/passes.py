"""Send some prompts through a running Outrider, a number at a time, in one mode, through the SDK: a pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.client import AsyncClient, Round, Speculation, StructuredOutputs

NUM_RESAMPLES = 2000
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

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s


async def run_pass(
    client: AsyncClient,
    prompts: Sequence[str | Sequence[int]],
    *,
    concurrency: int,
    temperature: float,
    max_tokens: int,
    speculation: Speculation | bool,
    seed: int = 0,
    cache_salt: str | None = None,
    prediction: str = "",
    structured_outputs: StructuredOutputs | None = None,
    on_round: Callable[[int, Round], None] = lambda index, item: None,
) -> Sample:
    """Answer all prompts once, as text or token ids; ends of sequence are ignored, but under structured_outputs.

    speculation: False is plain decoding. on_round: called with each round as it comes and the index of its prompt.
    """
    places = asyncio.Semaphore(concurrency)
    outputs: list[list[int]] = [[] for _ in prompts]
    rounds: list[Round] = []

    async def run(index: int, prompt: str | Sequence[int]) -> None:
        options: dict[str, Any] = {} if isinstance(prompt, str) else {"prompt_ids": list(prompt)}
        options |= {} if cache_salt is None else {"cache_salt": cache_salt}
        options |= {} if structured_outputs is None else {"structured_outputs": structured_outputs}
        async with (
            places,
            client.stream(
                prompt if isinstance(prompt, str) else None,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed + index,
                ignore_eos=structured_outputs is None,
                speculation=speculation,
                prediction=prediction,
                **options,  # type: ignore[arg-type]
            ) as stream,
        ):
            async for item in stream:
                rounds.append(item)
                on_round(index, item)
                outputs[index].extend(token.id for token in item.tokens)

    started = time.perf_counter()
    await asyncio.gather(*(run(index, prompt) for index, prompt in enumerate(prompts)))
    return Sample(outputs, rounds, time.perf_counter() - started)


@dataclass(frozen=True)
class Ratio:
    """A median, or another middle, and the interval of 95 % from a bootstrap that draws whole prompts."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, by_prompt: Sequence[Sequence[Any]], middle: Callable[[Any], Any] = np.median) -> Ratio:
        """Return the ratio of the values by prompt, at least one each: numbers, or rows for `middle`."""
        rng = np.random.default_rng(0)
        picks = rng.integers(len(by_prompt), size=(NUM_RESAMPLES, len(by_prompt)))
        middles = [float(middle(np.concatenate([by_prompt[i] for i in row]))) for row in picks]
        low, high = np.quantile(middles, (0.025, 0.975))
        return cls(float(middle(np.concatenate([*by_prompt]))), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.3f}-{self.high:.3f})"


def phase_shares(rounds: Sequence[Round]) -> dict[str, float]:
    """Return each phase's share of the rounds' time."""
    total = sum(item.timings.total_s for item in rounds)
    return {name: sum(getattr(item.timings, f"{name}_s") for item in rounds) / total for name in PHASES}
