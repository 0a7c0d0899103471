"""The prompts through a running gateway under several settings in turn, one answer at a time, and the clock of each
round.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.client import AsyncClient, GenerateOptions, Round, Speculation
from outrider.wire.errors import OutriderError
from outrider.wire.processes.processes import StopFlag

_LEAD_IN_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    rounds: tuple[Round, ...]
    gaps_s: tuple[float, ...]
    """How long the client waited for each round: the first from its call, the others from the round before."""

    @property
    def num_tokens(self) -> int:
        return sum(len(round_.tokens) for round_ in self.rounds)


@dataclass(frozen=True, slots=True)
class Pass:
    """All prompts once under one setting."""

    answers: tuple[TimedAnswer, ...]

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / sum(sum(answer.gaps_s) for answer in self.answers)


@dataclass(frozen=True)
class Workload:
    """What is asked under every setting."""

    prompts: Sequence[str]
    max_tokens: int
    sampling: Mapping[str, float]
    """temperature, top_p, top_k, min_p."""
    model: str
    timeout_s: float
    stop: StopFlag
    _salt: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def temperature(self) -> float:
        return self.sampling["temperature"]

    def options(
        self, index: int, repeat: int, speculation: Speculation, max_tokens: int, cache: str | None = None
    ) -> GenerateOptions:
        """The seed is the prompt's and the repeat's. Answers of the same `cache` share a cached prompt; without one
        each pays for its own.
        """
        options = GenerateOptions(
            model=self.model,
            max_tokens=max_tokens,
            seed=1_000_003 * repeat + index,
            speculation=speculation,
            cache_salt=f"tune-{self._salt}-{cache or uuid.uuid4().hex}",
            timeout_s=self.timeout_s,
        )
        options.update(self.sampling)  # type: ignore[typeddict-item]
        return options


async def lead_in(client: AsyncClient, load: Workload, speculation: Speculation) -> None:
    """An answer that nobody measures: the gateway learns how long this setting's proposals take."""
    k = speculation.num_draft_tokens
    two_rounds = 2 * (k + 1) if isinstance(k, int) else 0
    num_tokens = min(max(_LEAD_IN_TOKENS, two_rounds), load.max_tokens)
    await _run_answer(client, load, 0, 0, speculation, num_tokens, cache="lead-in")


async def _run_answer(
    client: AsyncClient,
    load: Workload,
    index: int,
    repeat: int,
    speculation: Speculation,
    max_tokens: int,
    cache: str | None = None,
) -> TimedAnswer:
    """Raises StopRequested between two rounds, and the error tree."""
    rounds: list[Round] = []
    gaps_s: list[float] = []
    last_s = time.perf_counter()
    options = load.options(index, repeat, speculation, max_tokens, cache)
    async with client.stream(load.prompts[index], **options) as stream:
        async for round_ in stream:
            load.stop.check()
            now_s = time.perf_counter()
            rounds.append(round_)
            gaps_s.append(now_s - last_s)
            last_s = now_s
    if not rounds or rounds[-1].usage is None:
        raise OutriderError("the gateway ended an answer without its last message")
    return TimedAnswer(tuple(rounds), tuple(gaps_s))


async def run_interleaved(
    client: AsyncClient, load: Workload, settings: Mapping[str, Speculation], repeats: range, done: Callable[[], None]
) -> dict[str, list[Pass]]:
    """By setting a pass for each repeat. Every prompt is answered under all settings before the next one, and from
    answer to answer forwards and backwards: what the machine does besides lasts longer than that, and hits all settings
    alike.

    repeats: the seeds' numbers. done: called after each answer.
    """
    answers: dict[str, list[list[TimedAnswer]]] = {name: [[] for _ in repeats] for name in settings}
    for own, repeat in enumerate(repeats):
        for index in range(len(load.prompts)):
            names = list(settings) if (own + index) % 2 == 0 else list(settings)[::-1]
            for name in names:
                await lead_in(client, load, settings[name])
                answer = await _run_answer(client, load, index, repeat, settings[name], load.max_tokens)
                answers[name][own].append(answer)
                done()
    return {name: [Pass(tuple(own)) for own in each] for name, each in answers.items()}
