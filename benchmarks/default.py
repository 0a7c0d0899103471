"""Check that a request that names no drafter is as fast as the best drafter at hand, and never slower than plain.

    make bench-default                                # or: python -m benchmarks.default --help

Whole answers over HTTP, greedy and sampled, alone and several at once, to texts of four kinds. A unit is as many
answers as run at once. Every arm answers a unit in turn before the next unit, in another order each time, so that a
drift of the machine hits all alike; each answer has a cache salt of its own. A ratio is that of two arms' times for one
unit; in brackets the interval of 95 % from a bootstrap over units. The best arm of a cell is the one that was fastest
in it, which is chosen after the fact: noise alone makes the ratio to it a little less than 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, HELD_OUT, REPETITIVE, Report, parser, read_prompts, widened
from benchmarks.passes import Ratio
from benchmarks.running import running
from models.chat.fetch import NotFetched, fetch

PLAIN, AUTO = "plain", "auto"
ARMS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {"speculation": {"enabled": False}},
    "ngram": {"speculation": {"drafter": "ngram"}},
    "model": {"speculation": {"drafter": "model"}},
    "ngram+model": {"speculation": {"drafter": "ngram+model"}},
    AUTO: {},
}
"""By name, what a request says of speculation."""
DEMO, WIDENED, CHAT_MODEL = SYSTEMS = "demo", "widened", "chat-model"
CODE, PROSE, CHAT, REPETITION = TEXTS = "code", "prose", "chat", "repetition"
MIN_BEST = 0.95
"""Geometric mean over cells of the speed of `auto` over that of the best arm that is wanted at least."""
MIN_CELL_BEST = 0.90
"""The same of each cell, wanted of the upper bound."""
MIN_PLAIN = 0.97
"""Speed of `auto` over plain of each cell, wanted of the upper bound."""
PROMPT_CHARS = 1200
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Cell:
    """One system, temperature, number of answers at once and kind of text."""

    system: str
    temperature: float
    concurrency: int
    text: str
    arms: Sequence[str]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """What each unit took, by arm."""
    num_tokens: int = 0
    """Of one unit."""

    @property
    def name(self) -> str:
        return f"{self.system}, T = {self.temperature:g}, {self.concurrency} at once, {self.text}"

    def rate(self, arm: str) -> float:
        """Return the median tokens a second of all answers of a unit together."""
        return self.num_tokens / statistics.median(self.seconds[arm])

    @property
    def best(self) -> str:
        """The arm that was fastest over all units, without `auto`."""
        return max((arm for arm in self.arms if arm != AUTO), key=lambda arm: -_mean_log(self.seconds[arm]))

    def over(self, arm: str) -> Ratio:
        """Return the speed of `auto` over that of an arm, the geometric mean over units."""
        pairs = zip(self.seconds[arm], self.seconds[AUTO], strict=True)
        return Ratio.of([[other / auto] for other, auto in pairs], lambda ratios: np.exp(np.mean(np.log(ratios))))


def _mean_log(values: Sequence[float]) -> float:
    return float(np.mean(np.log(values)))


@contextlib.contextmanager
def serving(system: str, options: argparse.Namespace) -> Iterator[str]:
    """Run a system with its defaults, as `outrider up` places it. Yields the address of its HTTP server."""
    target = {DEMO: str(DEMO_TARGET), WIDENED: str(widened(options.size))}.get(system) or str(fetch())
    draft = None if system == CHAT_MODEL else {"model": str(DEMO_DRAFT)}
    with running({"model": target}, draft) as endpoints:
        yield endpoints.http


def bodies(text: str, count: int) -> list[dict[str, Any]]:
    """Return `count` requests of a kind of text, the prompts from the first again when there are fewer."""
    if text in (CODE, PROSE):
        prompts = [prompt.text for prompt in read_prompts(HELD_OUT) if prompt.kind == text]
    else:
        is_question = text == CHAT
        prompts = [prompt.text for prompt in read_prompts(REPETITIVE) if (prompt.kind == "question") == is_question]
    found = list[dict[str, Any]]()
    for index in range(count):
        prompt = prompts[index % len(prompts)][-PROMPT_CHARS:]
        if text == CHAT:
            found.append({"messages": [{"role": "user", "content": prompt}]})
        else:
            found.append({"prompt": prompt})
    return found


async def answer_unit(client: httpx.AsyncClient, unit: Sequence[Mapping[str, Any]], rest: Mapping[str, Any]) -> float:
    """Send all requests of a unit at once; return the seconds until the last has its whole answer. Raises
    RuntimeError for an answer of another length than was asked for.
    """

    async def answer(index: int, request: Mapping[str, Any]) -> None:
        path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
        body = {**request, **rest, "seed": index, "cache_salt": f"{rest['cache_salt']} {index}"}
        reply = await client.post(path, json=body)
        reply.raise_for_status()
        num_tokens = reply.json()["usage"]["completion_tokens"]
        if num_tokens != rest["max_tokens"]:
            raise RuntimeError(f"an answer of {num_tokens} tokens, {rest['max_tokens']} were asked for")

    started_s = time.perf_counter()
    await asyncio.gather(*(answer(index, request) for index, request in enumerate(unit)))
    return time.perf_counter() - started_s


async def measure(client: httpx.AsyncClient, cell: Cell, model: str, options: argparse.Namespace) -> None:
    """Fill a cell. Each arm first answers one unit that does not count."""
    num_units = max(options.units, -(-options.answers // cell.concurrency))
    requests = bodies(cell.text, num_units * cell.concurrency)
    for index in range(-1, num_units):
        start = max(0, index) * cell.concurrency
        unit = requests[start : start + cell.concurrency]
        first = index % len(cell.arms)
        for arm in (*cell.arms[first:], *cell.arms[:first]):
            rest = {"model": model, "max_tokens": options.max_tokens, "temperature": cell.temperature}
            rest |= {"ignore_eos": True, "cache_salt": f"{cell.name} {index} {arm}", **ARMS[arm]}
            seconds = await answer_unit(client, unit, rest)
            if index >= 0:
                cell.seconds.setdefault(arm, []).append(seconds)


async def measure_system(system: str, address: str, options: argparse.Namespace) -> list[Cell]:
    """Return the cells of a running system."""
    cells = list[Cell]()
    arms = [arm for arm in ARMS if system != CHAT_MODEL or "model" not in arm]
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=TIMEOUT_S) as client:
        model = str((await client.get("/v1/models")).json()["data"][0]["id"])
        for temperature in options.temperatures:
            for concurrency in options.concurrency:
                for text in options.texts:
                    num_tokens = options.max_tokens * concurrency
                    cell = Cell(system, temperature, concurrency, text, arms, num_tokens=num_tokens)
                    await measure(client, cell, model, options)
                    cells.append(cell)
                    rates = ", ".join(f"{arm} {cell.rate(arm):.0f}" for arm in arms)
                    print(f"{cell.name}: {rates} tokens/s; best {cell.best}, {cell.over(cell.best)}", flush=True)
    return cells


def add_cells(report: Report, cells: Sequence[Cell]) -> list[str]:
    """Add the tables of all systems; return what is not as it is wanted."""
    wrong = list[str]()
    for system in dict.fromkeys(cell.system for cell in cells):
        rows = list[list[str]]()
        own = [cell for cell in cells if cell.system == system]
        for cell in own:
            best, plain = cell.over(cell.best), cell.over(PLAIN)
            where = [f"{cell.temperature:g}", str(cell.concurrency), cell.text]
            rows.append([*where, *(f"{cell.rate(arm):.0f}" for arm in cell.arms), cell.best, str(best), str(plain)])
            if best.high < MIN_CELL_BEST:
                wrong.append(f"{cell.name}: {best} of {cell.best}, an upper bound of {MIN_CELL_BEST:g} wanted")
            if plain.high < MIN_PLAIN:
                wrong.append(f"{cell.name}: {plain} of plain, an upper bound of {MIN_PLAIN:g} wanted")
        columns = ["T", "at once", "text", *(f"{arm}, tok/s" for arm in own[0].arms), "best", "auto / best"]
        report.table(system.capitalize(), [*columns, "auto / plain"], rows)
    mean = float(np.exp(np.mean([np.log(cell.over(cell.best).middle) for cell in cells])))
    report.text(f"Geometric mean over {len(cells)} cells of auto over the best arm: {mean:.3f}.")
    if mean < MIN_BEST:
        wrong.append(f"auto is {mean:.3f} times as fast as the best arms, at least {MIN_BEST:g} wanted")
    report.data["seconds of units"] = {cell.name: cell.seconds for cell in cells}
    return wrong


def main() -> int:
    made = parser(
        __doc__,
        size="94M",
        temperatures=[0.0, 0.7, 1.0],
        concurrency=[1, 8],
        answers=16,
        units=6,
        max_tokens=96,
    )
    made.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    made.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    options = made.parse_args()
    report = Report("default", "The default beside the drafters that it chooses from")
    report.text(
        f"The demo pair, its target WIDENED to {options.size}, and a chat model without a draft, each as `outrider up` "
        f"starts it; whole answers of {options.max_tokens} tokens, at least {options.answers} answers and "
        f"{options.units} units a cell."
    )
    cells = list[Cell]()
    for system in options.systems:
        try:
            with serving(system, options) as address:
                cells += asyncio.run(measure_system(system, address, options))
        except NotFetched as error:
            sys.exit(f"{system}: {error}; or leave it out with --systems")
    wrong = add_cells(report, cells)
    report.verdict(wrong)
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
