"""Measure what one caller's requests do to another's stream: six attackers, each beside the same victim.

    make bench-fairness                               # or: python -m benchmarks fairness --only ngram

The victim is a caller with an API key of its own and one stream, K left to the system; an answer is followed by the
next. The attacker is another caller, with a key of the same weight. In each repetition and for each attacker the victim
runs alone and then beside it: its time between tokens and its time to the first token beside over alone, one pair a
repetition, are what is reported, the mean of the pairs with its 95 % interval. The target, the demo target widened, has
one core, the demo draft another; attackers send from a process of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import DEMO_DRAFT, DTYPE, SIZE, Option, Report, dev_prompts, widened, with_interval
from benchmarks.runner import Benchmark, Found, take_turns
from benchmarks.running import running
from outrider.wire.settings.api_keys import ApiKey, digest_of, write_keys

MAX_TIMES_SLOWER = 2.0
"""What docs/engine.md promises a caller with one stream beside another: at most twice as slow as alone."""
VICTIM, ATTACKER = "victim", "attacker"
"""API keys, and their names."""
NUM_CHOICES = 48
NUM_DRAFT_TOKENS = 32
NUM_AT_ONCE = 16
"""Requests that the attackers without choices have open at the same time."""
PROMPT_WORDS = 1200
"""Of a long prompt: most of the demo target's context."""
NUM_PROPERTIES = 200
ANSWER_TOKENS = 96
"""Of one answer of the victim: a few begin in every window."""
CONTEXT = 2048
BEGIN_S = 120.0
_INDEX = re.compile(rb'"index":(\d+)')
"""Of the choice that an event is about."""

Json = dict[str, Any]


def _choices(**speculation: Any) -> Json:
    """Return a request of many choices that goes on as long as the context lets it."""
    body = {"prompt": dev_prompts(1)[0], "max_tokens": 1600, "ignore_eos": True, "n": NUM_CHOICES, "temperature": 1.0}
    return {**body, "speculation": speculation}


def _long_prompt(number: int) -> Json:
    words = random.Random(number).choices(dev_prompts(1)[0].split(), k=PROMPT_WORDS)
    return {"prompt": " ".join([str(number), *words]), "max_tokens": 1, "truncate_prompt_tokens": CONTEXT - 8}


def _grammar(number: int) -> Json:
    names = {f"p{number}_{index}": {"type": "string", "maxLength": 40} for index in range(NUM_PROPERTIES)}
    schema = {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
    return {"prompt": "JSON:", "max_tokens": 32, "structured_outputs": {"json": schema}}


@dataclass(frozen=True)
class Attack:
    """What an attacker sends, again and again."""

    what: str
    body: Callable[[int], Json]
    """The request of a number."""
    num_at_once: int = 1
    leaves: bool = False
    """Whether its clients leave at the first event."""


ATTACKS = {
    "plain": Attack(f"n = {NUM_CHOICES}, without drafts", lambda number: _choices(enabled=False)),
    "model": Attack(
        f"n = {NUM_CHOICES}, {NUM_DRAFT_TOKENS} tokens of the draft model each",
        lambda number: _choices(num_draft_tokens=NUM_DRAFT_TOKENS, drafter="model"),
    ),
    "ngram": Attack(
        f"n = {NUM_CHOICES}, {NUM_DRAFT_TOKENS} tokens by n-grams each",
        lambda number: _choices(num_draft_tokens=NUM_DRAFT_TOKENS, drafter="ngram"),
    ),
    "prompts": Attack(f"{NUM_AT_ONCE} long prompts at once", _long_prompt, NUM_AT_ONCE),
    "grammars": Attack(f"{NUM_AT_ONCE} schemas of {NUM_PROPERTIES} properties at once", _grammar, NUM_AT_ONCE),
    "streams": Attack(
        f"{NUM_AT_ONCE} streams at once, left at the first token",
        lambda number: {"prompt": f"{number}: once", "max_tokens": 500, "ignore_eos": True},
        NUM_AT_ONCE,
        leaves=True,
    ),
}


def _client(url: str, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits, trust_env=False)


async def _attack(url: str, attack: Attack, first_number: int, has_begun: Event) -> None:
    """Send without an end. has_begun: set once every answer that runs at once has its first token."""
    numbers = itertools.count(first_number)
    begun: set[tuple[int, int]] = set()
    num_answers = attack.num_at_once * attack.body(0).get("n", 1)

    async def keep_sending(client: httpx.AsyncClient, place: int) -> None:
        while True:
            body = {**attack.body(next(numbers)), "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code == 429:
                    await asyncio.sleep(0.1)
                    continue
                answer.raise_for_status()
                async for data in answer.aiter_raw():
                    if not has_begun.is_set():
                        begun.update((place, int(index)) for index in _INDEX.findall(data))
                        if len(begun) >= num_answers:
                            has_begun.set()
                    if attack.leaves:
                        break

    async with _client(url, ATTACKER) as client:
        await asyncio.gather(*(keep_sending(client, place) for place in range(attack.num_at_once)))


def _run_attack(url: str, name: str, first_number: int, has_begun: Event) -> None:
    asyncio.run(_attack(url, ATTACKS[name], first_number, has_begun))


@contextlib.contextmanager
def attacked(url: str, name: str, first_number: int) -> Iterator[None]:
    """Let the attacker send while the block runs, which begins when all its answers have. Raises RuntimeError when it
    fails.
    """
    context = multiprocessing.get_context("spawn")
    has_begun = context.Event()
    process = context.Process(target=_run_attack, args=(url, name, first_number, has_begun))
    process.start()
    try:
        if not has_begun.wait(BEGIN_S):
            raise RuntimeError(f"the attacker {name} did not begin within {BEGIN_S:g} s")
        yield
        if process.exitcode is not None:
            raise RuntimeError(f"the attacker {name} ended with {process.exitcode}")
    finally:
        process.terminate()
        process.join()


@dataclass
class Window:
    """What the victim saw in some seconds."""

    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds between two events, and the tokens of the second."""
    first_s: list[float] = field(default_factory=list)
    """To the first token of each answer that had one."""
    pending_s: float = 0.0
    """Since the last event, at the window's end."""

    @property
    def tpot_s(self) -> float:
        """Mean seconds between tokens; where none came, what was waited."""
        num_tokens = sum(count for _, count in self.gaps)
        return sum(gap for gap, _ in self.gaps) / num_tokens if num_tokens else self.pending_s

    @property
    def num_tokens_a_step(self) -> float:
        """Mean tokens of an event, which is a step of the target; NaN where none came."""
        return sum(count for _, count in self.gaps) / len(self.gaps) if self.gaps else math.nan

    @property
    def ttft_s(self) -> float:
        return statistics.median(self.first_s) if self.first_s else self.pending_s

    def __str__(self) -> str:
        tpot_ms, ttft_ms = 1e3 * self.tpot_s, 1e3 * self.ttft_s
        return f"{tpot_ms:.1f} ms a token, {self.num_tokens_a_step:.2f} tokens a step, first token {ttft_ms:.0f} ms"


@dataclass(frozen=True)
class Pair:
    """The victim's windows of one repetition."""

    alone: Window
    beside: Window

    @property
    def times_slower(self) -> float:
        return self.beside.tpot_s / self.alone.tpot_s

    @property
    def times_later(self) -> float:
        return self.beside.ttft_s / self.alone.ttft_s


async def watch(url: str, seconds: float) -> Window:
    """Run the victim's stream for so long."""
    window, numbers = Window(), itertools.count()
    prompts = dev_prompts(16)
    last_s = time.perf_counter()

    async def stream(client: httpx.AsyncClient) -> None:
        nonlocal last_s
        while True:
            body = {"prompt": prompts[next(numbers) % len(prompts)], "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
            body |= {"temperature": 0.0, "stream": True, "return_token_ids": True}
            sent_s = last_s = time.perf_counter()
            is_first = True
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now_s = time.perf_counter()
                    num_tokens = len(json.loads(line[6:])["choices"][0]["token_ids"] or ())
                    if is_first:
                        window.first_s.append(now_s - sent_s)
                    elif num_tokens:
                        window.gaps.append((now_s - last_s, num_tokens))
                    is_first, last_s = False, now_s

    async with _client(url, VICTIM) as client:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stream(client), seconds)
    window.pending_s = time.perf_counter() - last_s
    return window


async def measure_pairs(url: str, options: argparse.Namespace) -> Found[Pair]:
    """Return, by attacker, the victim's windows, a pair a repetition."""

    async def measure_pair(name: str, unit: int, repetition: int) -> Pair:
        alone = await watch(url, options.seconds)
        with attacked(url, name, 1000 * repetition):
            await asyncio.sleep(options.warm_seconds)
            beside = await watch(url, 2 * options.seconds)
        await asyncio.sleep(1.0)  # its answers end
        print(f"{name}: alone {alone}, beside it {beside}", flush=True)
        return Pair(alone, beside)

    await watch(url, options.warm_seconds)
    return await take_turns(options.only, 1, options.repetitions, measure_pair)


@contextlib.contextmanager
def system(options: argparse.Namespace) -> Iterator[str]:
    """Run target, draft and gateway; yield the gateway's URL."""
    cores = sorted(os.sched_getaffinity(0))
    cache = {"kv_cache_tokens": (NUM_CHOICES + 2) * CONTEXT, "prefix_caching": False, "dtype": options.dtype}
    target = {"model": str(widened(options.size, options.dtype)), "cpu_cores": str(cores[-1]), **cache}
    draft = {"model": str(DEMO_DRAFT), "cpu_cores": str(cores[0]), **cache}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.yaml"
        write_keys(file, tuple(ApiKey(name=key, sha256=digest_of(key)) for key in (VICTIM, ATTACKER)))
        with running(target, draft, {"max_draft_tokens": NUM_DRAFT_TOKENS, "api_keys": str(file)}) as endpoints:
            yield f"http://{endpoints.http}"


def add_pairs(report: Report, found: Found[Pair]) -> list[str]:
    """Add the table; return where the promise is not kept: where the whole interval is above it."""
    rows, violations = list[list[str]](), list[str]()
    for name, (pairs,) in found.items():
        slower = [pair.times_slower for pair in pairs]
        later = [pair.times_later for pair in pairs]
        row = [ATTACKS[name].what]
        row += [median_ms(pair.alone.tpot_s for pair in pairs), median_ms(pair.beside.tpot_s for pair in pairs)]
        row.append("{:.2f} ({:.2f}-{:.2f})".format(*with_interval(slower)))
        row.append(f"{statistics.median(pair.alone.num_tokens_a_step for pair in pairs):.2f}")
        row.append(f"{statistics.median(pair.beside.num_tokens_a_step for pair in pairs):.2f}")
        row += [median_ms(pair.alone.ttft_s for pair in pairs), median_ms(pair.beside.ttft_s for pair in pairs)]
        row.append("{:.2f} ({:.2f}-{:.2f})".format(*with_interval(later)))
        rows.append(row)
        report.data[name] = {"times_slower": slower, "times_later": later}
        mean, low, _ = with_interval(slower)
        if low > MAX_TIMES_SLOWER:
            violations.append(
                f"beside {name} the victim is {mean:.2f} times as slow as alone, above {MAX_TIMES_SLOWER:g}"
            )
    columns = ["beside another caller's", "between tokens, alone, ms", "beside it, ms", "times as slow"]
    columns += ["tokens a step, alone", "beside it", "first token, alone, ms", "beside it, ms", "times as late"]
    report.table("One caller's stream beside another caller", columns, rows)
    return violations


def median_ms(seconds: Iterable[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f}"


def measure(report: Report, options: argparse.Namespace) -> list[str]:
    """Measure the pairs of all attackers. Returns where the promise is not kept."""
    with system(options) as url:
        found = asyncio.run(measure_pairs(url, options))
    return add_pairs(report, found)


BENCHMARK = Benchmark(
    "One caller beside another",
    measure,
    {
        "size": SIZE,
        "dtype": DTYPE,
        "seconds": 4.0,
        "warm_seconds": 2.0,
        "repetitions": 6,
        "only": Option(list(ATTACKS), "attackers; default: all", tuple(ATTACKS)),
    },
)
