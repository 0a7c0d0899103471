"""Send some prompts through a running Outrider, a number at a time, in one mode, through the SDK: a pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    num_draft_passes: float = 0.0
    """Where they are counted."""

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


async def in_turn(
    address: str,
    prompts: Sequence[Sequence[int]],
    arms: Mapping[str, Speculation],
    *,
    temperature: float,
    max_tokens: int,
    repetitions: int,
    predictions: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, list[list[Sample]]]:
    """As `in_turn_at`, with all arms at one gateway."""
    async with AsyncClient(address) as client:
        return await in_turn_at(
            dict.fromkeys(arms, client),
            prompts,
            arms,
            temperature=temperature,
            max_tokens=max_tokens,
            repetitions=repetitions,
            predictions=predictions,
        )


async def in_turn_at(
    clients: Mapping[str, AsyncClient],
    prompts: Sequence[Sequence[int]],
    arms: Mapping[str, Speculation],
    *,
    temperature: float,
    max_tokens: int,
    repetitions: int,
    predictions: Mapping[str, Sequence[str]] | None = None,
    draft_passes: Mapping[str, Callable[[], float]] | None = None,
) -> dict[str, list[list[Sample]]]:
    """Return samples by arm and prompt, one a repetition.

    clients: by arm. predictions: by arm, of each prompt's answer. draft_passes: by arm, counts the passes of its draft
    up to now.

    Each prompt is answered by every arm before the next one, in another order each time, so that a drift of the machine
    hits all alike; each answer has a cache salt of its own.
    """
    found: dict[str, list[list[Sample]]] = {name: [[] for _ in prompts] for name in arms}
    names = list(arms)
    for repetition in range(repetitions):
        for index, prompt in enumerate(prompts):
            first = (repetition + index) % len(names)
            for name in (*names[first:], *names[:first]):
                predicted = (predictions or {}).get(name)
                num_passes = (draft_passes or {}).get(name, float)
                before = num_passes()
                sample = await run_pass(
                    clients[name],
                    [prompt],
                    concurrency=1,
                    temperature=temperature,
                    max_tokens=max_tokens,
                    speculation=arms[name],
                    seed=1000 * repetition + index,
                    cache_salt=f"{repetition} {index} {name} {temperature}",
                    prediction="" if predicted is None else predicted[index],
                )
                found[name][index].append(replace(sample, num_draft_passes=num_passes() - before))
    return found


async def take_turns(
    client: AsyncClient,
    prompts: Sequence[str | Sequence[int]],
    arms: Mapping[str, Speculation | bool],
    found: dict[str, list[Sample]],
    repetitions: Iterable[int],
    **options: Any,
) -> None:
    """Append a pass of every arm to `found` each repetition, in another order each time. options: as of `run_pass`."""
    for repetition in repetitions:
        for name in list(arms) if repetition % 2 else reversed(list(arms)):
            sample = await run_pass(client, prompts, speculation=arms[name], **options)
            found.setdefault(name, []).append(sample)
            print(f"{options['concurrency']} at once, {name}: {sample.tokens_per_s:.1f} tokens/s", flush=True)


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
