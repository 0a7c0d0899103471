"""Generates outputs on a running gateway, one request at a time, under several settings in turn, and measures the time
of each round. For `outrider tune` and `benchmarks/papers`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.client import AsyncClient, GenerateOptions, Round, Speculation
from outrider.wire.errors import OutriderError
from outrider.wire.processes.stop_flag import StopFlag

_LEAD_IN_TOKENS = 16
"""Minimum number of output tokens of the unmeasured request that precedes measured ones."""


@dataclass(frozen=True, slots=True)
class TimedOutput:
    """One output, with the times at which the client received its rounds."""

    rounds: tuple[Round, ...]
    gaps_s: tuple[float, ...]
    """gaps_s[i]: seconds that the client waited for round i, since round i - 1 arrived. For round 0 they count from the
    call."""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens."""
        return sum(len(round_.tokens) for round_ in self.rounds)


@dataclass(frozen=True, slots=True)
class Pass:
    """One output for each prompt, all under one setting of speculation."""

    answers: tuple[TimedOutput, ...]
    """Outputs in the order of the prompts."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all outputs."""
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Number of output tokens divided by the seconds that the client waited for them."""
        waited_s = 0.0
        for answer in self.answers:
            waited_s += sum(answer.gaps_s)
        return self.num_tokens / waited_s


def speeds_of(passes: Sequence[Pass]) -> list[float]:
    """Return the output tokens per second of each pass (one output for every prompt), in the order of `passes`."""
    return [one.tokens_per_s for one in passes]


@dataclass(frozen=True)
class Workload:
    """The prompts and parameters of the requests, which are the same under every setting of speculation."""

    prompts: Sequence[str]
    max_tokens: int
    """Maximum number of output tokens of a request."""
    sampling: Mapping[str, float]
    """Sampling parameters by name. The temperature is always there; top_p, top_k and min_p only if they were given."""
    model: str
    """Id of the served model."""
    timeout_s: float
    """Maximum seconds of a request."""
    stop: StopFlag
    """Flag that is set when the measurement should end."""
    _salt: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def temperature(self) -> float:
        """The sampling temperature."""
        return self.sampling["temperature"]

    def options(
        self, index: int, repeat: int, speculation: Speculation, max_tokens: int, cache: str | None = None
    ) -> GenerateOptions:
        """Return the keyword arguments of `AsyncClient.stream` for one request.

        index: index of the prompt. repeat: number of the repeat; index and repeat determine the seed. cache: a text
        that goes into the cache salt; requests of this workload with the same text can share cached KV blocks of the
        prompt. None = the request shares them with no other request.
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
    """Generate one short output under a setting of speculation without measuring it, so that the gateway learns how
    long proposals take. Raises InvalidRequest if the gateway refuses the setting.
    """
    k = speculation.num_draft_tokens
    num_tokens = _LEAD_IN_TOKENS
    if isinstance(k, int):
        num_tokens = max(num_tokens, 2 * (k + 1))  # two rounds
    await _run_answer(client, load, 0, 0, speculation, min(num_tokens, load.max_tokens), cache="lead-in")


async def _run_answer(
    client: AsyncClient,
    load: Workload,
    index: int,
    repeat: int,
    speculation: Speculation,
    max_tokens: int,
    cache: str | None = None,
) -> TimedOutput:
    """Raises StopRequested between two rounds, and the error tree."""
    rounds = list[Round]()
    gaps_s = list[float]()
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
    return TimedOutput(tuple(rounds), tuple(gaps_s))


async def run_interleaved(
    client: AsyncClient, load: Workload, settings: Mapping[str, Speculation], repeats: range, done: Callable[[], None]
) -> dict[str, list[Pass]]:
    """Generate an output for every prompt, under every setting and in every repeat. Return the passes of each setting
    by name; entry i is the pass of repeat i.

    Each prompt runs under all settings before the next prompt does, and the order of the settings is reversed from
    prompt to prompt. So another load on the machine affects all settings alike. settings: speculation options by name
    of the setting. repeats: numbers of the repeats, which determine the seeds. done: called after each output.
    """
    passes = dict[str, list[Pass]]()
    for name in settings:
        passes[name] = []
    names = list(settings)
    for position, repeat in enumerate(repeats):
        answers = dict[str, list[TimedOutput]]()
        for index in range(len(load.prompts)):
            # positions and prompts (0, 0), (0, 1), (1, 0), (1, 1): forwards, backwards, backwards, forwards
            order = list(names)
            if (position + index) % 2:
                order.reverse()
            for name in order:
                await lead_in(client, load, settings[name])
                answer = await _run_answer(client, load, index, repeat, settings[name], load.max_tokens)
                answers.setdefault(name, []).append(answer)
                done()
        for name in names:
            passes[name].append(Pass(tuple(answers[name])))
    return passes
