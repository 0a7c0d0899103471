"""Compare the default, a request that says nothing of speculation, with plain decoding and with each drafter by name.

    make bench-default                                # or: python -m benchmarks default --help

Whole answers over HTTP, greedy and sampled, alone and several at once, to texts of four kinds. A unit is as many
answers as run at once. The answers of a cell and arm have one cache salt, as those of one caller. The arms share one
running system, and what its target learns of a drafter from one holds for all. In brackets the interval of 95 % from a
bootstrap over units. The best arm of a cell is the one that was fastest in it, which is chosen after the fact: noise
alone makes the ratio to it a little less than 1. What is measured is written, also where the run ends early.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.common import (
    DEMO_DRAFT,
    DEMO_TARGET,
    HELD_OUT,
    QUESTIONS,
    REPETITIVE,
    SIZE,
    Option,
    Report,
    read_prompts,
    widened,
)
from benchmarks.runner import Benchmark, Found, Ratio, take_turns
from benchmarks.running import running
from models.chat.fetch import NotFetched, fetch
from outrider.cli.monitor.series import Scrape

PLAIN, DEFAULT = "plain", "default"
ARMS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {"speculation": {"enabled": False}},
    "ngram": {"speculation": {"drafter": "ngram"}},
    "model": {"speculation": {"drafter": "model"}},
    "ngram+model": {"speculation": {"drafter": "ngram+model"}},
    DEFAULT: {},
}
"""By name, what a request says of speculation."""
WIDENED, CHAT_MODEL = "widened", "chat-model"
TARGETS: Mapping[str, Callable[[str], Path]] = {
    "demo": lambda size: DEMO_TARGET,
    WIDENED: widened,
    CHAT_MODEL: lambda size: fetch(),
}
"""Folders of the systems' targets, by the size of the widened one."""
CHAT, REPETITION = "chat", "repetition"
TEXTS = ("code", "prose", CHAT, REPETITION)
MIN_BEST = 0.95
"""Geometric mean over cells of the speed of the default over that of the best arm that is wanted at least."""
MIN_CELL_BEST = 0.90
"""The same of each cell, wanted of the upper bound."""
MIN_PLAIN = 0.97
"""Speed of the default over plain of each cell, wanted of the upper bound."""
PROMPT_CHARS = 500
"""Characters of a prompt at most, its last ones: prefill of a longer one would take longer than the answer."""
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Cell:
    """One system, temperature, number of answers at once and kind of text."""

    system: str
    temperature: float
    concurrency: int
    text: str
    arms: Sequence[str]
    max_tokens: int
    """Of each answer."""
    seconds: Found[float] = field(default_factory=dict)
    """What each unit took, once."""
    steps: Counter[str] = field(default_factory=Counter)
    """Of the default's answers, as `count_steps` names them."""

    @property
    def name(self) -> str:
        return f"{self.system}, T = {self.temperature:g}, {self.concurrency} at once, {self.text}"

    def rate(self, arm: str) -> float:
        """Return the median tokens a second of all answers of a unit together."""
        return float(self.concurrency * self.max_tokens / np.median(self.seconds[arm]))

    @property
    def best(self) -> str:
        """The arm that was fastest over all units, without the default."""
        named = [arm for arm in self.arms if arm != DEFAULT]
        return min(named, key=lambda arm: statistics.geometric_mean(np.concatenate(self.seconds[arm])))

    def over(self, arm: str) -> Ratio:
        """Return the speed of the default over that of an arm, the geometric mean over units."""
        return Ratio.between(self.seconds[arm], self.seconds[DEFAULT], float, statistics.geometric_mean)

    @property
    def drafted(self) -> str:
        """Who drafted for the default, and why nobody did, in shares of its steps."""
        return ", ".join(f"{name} {num / self.steps.total():.0%}" for name, num in self.steps.most_common())


@contextlib.contextmanager
def serving(system: str, size: str) -> Iterator[str]:
    """Run a system with its defaults, as `outrider up` places it. Yields the address of its HTTP server. Raises
    NotFetched.
    """
    draft = None if system == CHAT_MODEL else {"model": str(DEMO_DRAFT)}
    with running({"model": str(TARGETS[system](size))}, draft) as endpoints:
        yield endpoints.http


def bodies(text: str, count: int) -> list[dict[str, Any]]:
    """Return `count` requests of a kind of text, the prompts from the first again when there are fewer."""
    if text == CHAT:
        found = [{"messages": [{"role": "user", "content": prompt.text}]} for prompt in read_prompts(QUESTIONS)]
    else:
        if text == REPETITION:
            prompts = [prompt for prompt in read_prompts(REPETITIVE) if prompt.kind != "question"]
        else:
            prompts = [prompt for prompt in read_prompts(HELD_OUT) if prompt.kind == text]
        found = [{"prompt": prompt.text[-PROMPT_CHARS:]} for prompt in prompts]
    return [found[index % len(found)] for index in range(count)]


async def answer_unit(client: httpx.AsyncClient, unit: Sequence[Mapping[str, Any]], rest: Mapping[str, Any]) -> float:
    """Send all requests of a unit at once; return the seconds until the last has its whole answer. Raises
    RuntimeError for an answer of another length than was asked for.
    """

    async def answer(index: int, request: Mapping[str, Any]) -> None:
        path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
        body = {**request, **rest, "seed": index}
        reply = await client.post(path, json=body)
        reply.raise_for_status()
        num_tokens = reply.json()["usage"]["completion_tokens"]
        if num_tokens != rest["max_tokens"]:
            raise RuntimeError(f"an answer of {num_tokens} tokens, {rest['max_tokens']} were asked for")

    started_s = time.perf_counter()
    await asyncio.gather(*(answer(index, request) for index, request in enumerate(unit)))
    return time.perf_counter() - started_s


async def count_steps(client: httpx.AsyncClient) -> Counter[str]:
    """Return the steps of all answers so far: those with drafts by drafter, those without by the reason."""
    scrape = Scrape.parse((await client.get("/metrics")).text, time.monotonic())
    steps = Counter[str]()
    for labels, num_steps in scrape.find("spec_rounds_total"):
        steps[labels["draft"]] += int(num_steps)
    for labels, num_steps in scrape.find("spec_plain_steps_total"):
        steps[f"{PLAIN}: {labels['reason']}"] += int(num_steps)
    return steps


async def measure_cell(
    client: httpx.AsyncClient, cell: Cell, requests: Sequence[Mapping[str, Any]], rest: Mapping[str, Any]
) -> None:
    """Have every arm answer these requests, a unit of which is as many as run at once. rest: fields of all requests."""

    async def answer(arm: str, unit: int, repetition: int) -> float:
        own = {"temperature": cell.temperature, "cache_salt": f"{cell.name} {arm}", **ARMS[arm]}
        before = await count_steps(client)
        first = unit * cell.concurrency
        seconds = await answer_unit(client, requests[first : first + cell.concurrency], {**rest, **own})
        if arm == DEFAULT:
            cell.steps.update(await count_steps(client) - before)
        return seconds

    cell.seconds.update(await take_turns(cell.arms, len(requests) // cell.concurrency, 1, answer))


async def measure_system(system: str, address: str, options: argparse.Namespace, cells: list[Cell]) -> None:
    """Append the cells of a running system, each when it is measured."""
    arms = [arm for arm in ARMS if system != CHAT_MODEL or "model" not in arm]
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=TIMEOUT_S) as client:
        model = str((await client.get("/v1/models")).json()["data"][0]["id"])
        rest = {"model": model, "max_tokens": options.max_tokens, "ignore_eos": True}
        for temperature, concurrency in itertools.product(options.temperatures, options.concurrency):
            num_units = max(options.units, math.ceil(options.answers / concurrency))
            of_text = partial(Cell, system, temperature, concurrency, arms=arms, max_tokens=options.max_tokens)
            # The first answers under another load teach the workers what it takes; they do not count.
            first = bodies(options.texts[0], (num_units + 1) * concurrency)[-concurrency:]
            await measure_cell(client, of_text(options.texts[0]), first, rest)
            for text in options.texts:
                cell = of_text(text)
                await measure_cell(client, cell, bodies(text, num_units * concurrency), rest)
                cells.append(cell)
                rates = ", ".join(f"{arm} {cell.rate(arm):.0f}" for arm in arms)
                print(f"{cell.name}: {rates} tokens/s; best {cell.best}, {cell.over(cell.best)}", flush=True)


def mean_over_best(cells: Sequence[Cell]) -> float:
    """Return the geometric mean over cells of the speed of the default over that of the best arm."""
    return statistics.geometric_mean([cell.over(cell.best).middle for cell in cells])


def find_slow(cells: Sequence[Cell]) -> list[str]:
    """Return what is not as it is wanted: of all cells together, then those behind their best arm, then those behind
    plain.
    """
    mean = mean_over_best(cells)
    wrong = [f"{mean:.3f} of the best arms over all cells, {MIN_BEST:g} wanted"] if mean < MIN_BEST else []
    compared = [(cell, cell.best, MIN_CELL_BEST) for cell in cells]
    compared += [(cell, PLAIN, MIN_PLAIN) for cell in cells]
    for cell, arm, min_high in compared:
        ratio = cell.over(arm)
        if ratio.high < min_high:
            wrong.append(f"{cell.name}: {ratio} of {arm}, an upper bound of {min_high:g} wanted")
    return wrong


def add_cells(report: Report, cells: Sequence[Cell]) -> None:
    """Add the tables of all systems."""
    seconds = dict[str, dict[str, list[float]]]()
    for system in dict.fromkeys(cell.system for cell in cells):
        own = [cell for cell in cells if cell.system == system]
        rows = list[list[str]]()
        for cell in own:
            row = [f"{cell.temperature:g}", str(cell.concurrency), cell.text]
            row += [f"{cell.rate(arm):.0f}" for arm in cell.arms]
            rows.append([*row, cell.best, str(cell.over(cell.best)), str(cell.over(PLAIN)), cell.drafted])
        columns = ["T", "at once", "text", *(f"{arm}, tok/s" for arm in own[0].arms)]
        columns += ["best", "default / best", "default / plain", "steps of the default"]
        report.table(system.capitalize(), columns, rows)
    report.text(f"Geometric mean over {len(cells)} cells of default / best: {mean_over_best(cells):.3f}.")
    for cell in cells:
        seconds[cell.name] = {arm: [unit[0] for unit in units] for arm, units in cell.seconds.items()}
    report.data["seconds of units"] = seconds
    report.data["steps of the default"] = {cell.name: cell.steps for cell in cells}


def measure(report: Report, options: argparse.Namespace) -> list[str]:
    """Measure all systems. Returns what is not as it is wanted."""
    report.text(
        f"The demo pair, its target WIDENED to {options.size}, and a chat model without a draft, each as `outrider up` "
        f"starts it; whole answers of {options.max_tokens} tokens, at least {options.answers} answers and "
        f"{options.units} units a cell. Steps of the default: with drafts by drafter, without by the reason."
    )
    cells = list[Cell]()
    try:
        for system in options.systems:
            with serving(system, options.size) as address:
                asyncio.run(measure_system(system, address, options, cells))
    except NotFetched as error:
        sys.exit(f"{CHAT_MODEL}: {error}; or leave it out with --systems")
    finally:
        if cells:
            add_cells(report, cells)
    return find_slow(cells)


BENCHMARK = Benchmark(
    "The default beside the drafters that it chooses from",
    measure,
    {
        "size": SIZE,
        "temperatures": [0.0, 0.7, 1.0],
        "concurrency": [1, 8],
        "answers": 16,
        "units": 4,
        "max_tokens": 32,
        "systems": Option(list(TARGETS), choices=tuple(TARGETS)),
        "texts": Option(list(TEXTS), choices=TEXTS),
    },
)
