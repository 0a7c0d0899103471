"""The runner of the served comparisons: arms x cells x repetitions, and the tables that come of it.

An *arm* is a way to ask: a system and what the request says of speculation. A *cell* is a temperature and a number of
answers at once. A *unit* is as many prompts as a cell has answers at once. Every arm answers a unit before the next
unit, in another order each time, so that a drift of the machine hits all arms alike, and each answer has a cache
salt of its own. A ratio compares two arms on one unit in one repetition.

`benchmarks.suites` has the comparisons as data; `python -m benchmarks NAME` runs one.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.common import Report
from benchmarks.passes import Ratio, Sample, phase_shares, run_pass
from benchmarks.running import running
from outrider.client import AsyncClient, Round, Speculation

PLAIN = "plain"
"""Name of the arm without drafts: the other arms' texts at temperature 0 must be its texts."""
PAIR = "pair"
"""Name of a suite's system where it has only one."""
FIRST_DRAFT_S = 120.0
"""Seconds that a system may take until its first draft: a draft tests its pairing first."""

Value = Callable[[Sample], float]


@dataclass(frozen=True)
class Arm:
    """A way to ask."""

    speculation: Speculation | bool
    """False = plain decoding."""
    system: str = PAIR
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of `run_pass`."""
    predictions: Sequence[str] = ()
    """A predicted output for each prompt; empty = none."""
    is_exact: bool = True
    """Whether the text at temperature 0 must be that of plain decoding."""


@dataclass(frozen=True)
class System:
    """Settings of a pair, as `outrider up` takes them."""

    target: Mapping[str, Any]
    draft: Mapping[str, Any] | None


@dataclass(frozen=True)
class Cell:
    """One row group of the report."""

    temperature: float
    concurrency: int = 1

    def __str__(self) -> str:
        return f"T = {self.temperature:g}, {self.concurrency} at once"


@dataclass(frozen=True)
class Expectation:
    """A ratio that must hold: violated where its whole interval lies below `at_least`."""

    arm: str
    base: str
    value: Value
    at_least: float


@dataclass(frozen=True)
class Suite:
    """One comparison."""

    title: str
    systems: Mapping[str, System]
    arms: Mapping[str, Arm]
    prompts: Sequence[Sequence[int]]
    """Token ids."""
    cells: Sequence[Cell]
    max_tokens: int
    repetitions: int
    bases: Sequence[str] = (PLAIN,)
    """Arms that the others' speeds are compared with."""
    per_pass_bases: Sequence[str] = ()
    """Arms that the others' tokens a pass are compared with."""
    expectations: Sequence[Expectation] = ()
    positions: int = 0
    """Draft positions whose acceptance rate gets a column."""
    note: str = ""
    """What the reader of the report must know beside the title."""


@dataclass(frozen=True)
class Result:
    """Samples of one arm in one cell."""

    name: str
    by_unit: list[list[Sample]]
    """By unit, a sample a repetition."""

    def samples(self) -> list[Sample]:
        """Return all samples, unit by unit."""
        found = list[Sample]()
        for samples in self.by_unit:
            found += samples
        return found

    def rounds(self) -> list[Round]:
        """Return the rounds of all samples."""
        found = list[Round]()
        for sample in self.samples():
            found += sample.rounds
        return found

    def over(self, base: Result, value: Value) -> Ratio:
        """Return the ratio to another arm, sample by sample: the median of speeds, the mean of counts."""
        ratios = list[list[float]]()
        for own, others in zip(self.by_unit, base.by_unit, strict=True):
            ratios.append([value(one) / value(other) for one, other in zip(own, others, strict=True)])
        return Ratio.of(ratios, np.median if value is speed else np.mean)

    def acceptance_at(self, position: int) -> Ratio | None:
        """Return the share of draft tokens at a position, from 1 on, that were accepted where all before them were;
        None where none was drafted.
        """
        by_unit = list[list[float]]()
        for samples in self.by_unit:
            accepted = list[float]()
            for sample in samples:
                for item in sample.rounds:
                    if item.num_drafted >= position and item.num_accepted >= position - 1:
                        accepted.append(float(item.num_accepted >= position))
            if accepted:
                by_unit.append(accepted)
        return Ratio.of(by_unit, np.mean) if by_unit else None

    def cells(self, suite: Suite) -> list[str]:
        """Return the columns that do not compare."""
        rounds = self.rounds()
        drafted = sum(item.num_drafted for item in rounds)
        accepted = sum(item.num_accepted for item in rounds)
        samples = self.samples()
        row = [
            self.name,
            f"{drafted / len(rounds):.1f}",
            f"{100 * accepted / drafted:.0f} %" if drafted else "",
            f"{np.mean([per_pass(sample) for sample in samples]):.3f}",
            f"{100 * phase_shares(rounds)['deliver']:.0f} %",
            f"{np.median([speed(sample) for sample in samples]):.1f}",
        ]
        for position in range(1, suite.positions + 1):
            row.append(str(self.acceptance_at(position) or ""))
        return row


def per_pass(sample: Sample) -> float:
    """Tokens a pass of the target."""
    return sample.num_tokens / len(sample.rounds)


def speed(sample: Sample) -> float:
    """Tokens per second."""
    return sample.tokens_per_s


def per_full_round(sample: Sample) -> float:
    """Mean tokens of the rounds with the most draft tokens: all K of a chain."""
    longest = max(item.num_drafted for item in sample.rounds)
    tokens = [1 + item.num_accepted for item in sample.rounds if item.num_drafted == longest]
    return float(np.mean(tokens))


def in_turn(names: Sequence[str], index: int) -> Sequence[str]:
    """Return the names in the order of a turn: each turn begins with the next name."""
    first = index % len(names)
    return (*names[first:], *names[:first])


@contextlib.contextmanager
def serving(systems: Mapping[str, System]) -> Iterator[dict[str, str]]:
    """Run all systems, of which only one works at a time, and yield the gRPC address of each."""
    addresses = dict[str, str]()
    with contextlib.ExitStack() as stack:
        for name, system in systems.items():
            addresses[name] = stack.enter_context(running(system.target, system.draft)).grpc
        yield addresses


async def warm(client: AsyncClient, name: str, arm: Arm, prompt: Sequence[int]) -> None:
    """Return once an arm has drafted. Ends this process where it drafts nothing."""
    give_up_s = time.monotonic() + FIRST_DRAFT_S
    speculation = arm.speculation
    if isinstance(speculation, Speculation) and not speculation.tree:
        speculation = replace(speculation, num_draft_tokens=2)
    while time.monotonic() < give_up_s:
        sample = await run_pass(
            client,
            [prompt],
            concurrency=1,
            temperature=0.0,
            max_tokens=32,
            speculation=speculation,
            prediction=arm.predictions[0] if arm.predictions else "",
        )
        if any(item.num_drafted for item in sample.rounds):
            return
        await asyncio.sleep(0.5)
    print(f"{name} drafted nothing in {FIRST_DRAFT_S:.0f} s; its row says so too", file=sys.stderr)


async def measure(suite: Suite, clients: Mapping[str, AsyncClient], cell: Cell) -> dict[str, Result]:
    """Let every arm answer every unit of a cell; return the results by arm."""
    size = cell.concurrency
    starts = range(0, len(suite.prompts), size)
    results = {name: Result(name, [[] for _ in starts]) for name in suite.arms}
    for repetition in range(suite.repetitions):
        for index, start in enumerate(starts):
            unit = suite.prompts[start : start + size]
            for name in in_turn(list(suite.arms), repetition + index):
                arm = suite.arms[name]
                sample = await run_pass(
                    clients[arm.system],
                    unit,
                    concurrency=size,
                    temperature=cell.temperature,
                    max_tokens=suite.max_tokens,
                    speculation=arm.speculation,
                    seed=1000 * repetition + start,
                    cache_salt=f"{cell} {repetition} {index} {name}",
                    prediction=arm.predictions[index] if arm.predictions else "",
                    **arm.options,
                )
                results[name].by_unit[index].append(sample)
    return results


def add_table(report: Report, suite: Suite, cell: Cell, results: Mapping[str, Result]) -> None:
    """Add the table of a cell, and its speeds and tokens a pass to the data."""
    columns = ["arm", "drafted a pass", "accepted", "tokens a pass", "waited", "tok/s"]
    columns += [f"accepted at {position}" for position in range(1, suite.positions + 1)]
    compared = [(base, speed, f"speed over {base}") for base in suite.bases]
    compared += [(base, per_pass, f"tokens a pass over {base}") for base in suite.per_pass_bases]
    columns += [title for _, _, title in compared]
    rows = list[list[str]]()
    for name, result in results.items():
        row = result.cells(suite)
        for base, value, _ in compared:
            row.append("" if name == base else str(result.over(results[base], value)))
        rows.append(row)
    report.table(str(cell), columns, rows)
    report.data[str(cell)] = {name: data_of(result) for name, result in results.items()}


def data_of(result: Result) -> dict[str, list[list[float]]]:
    """Return what is kept of an arm: values by unit and repetition."""
    kept = dict[str, list[list[float]]]()
    for value in (per_pass, speed):
        kept[value.__name__] = [[value(sample) for sample in samples] for samples in result.by_unit]
    return kept


def find_violations(suite: Suite, cell: Cell, results: Mapping[str, Result]) -> list[str]:
    """Return the expectations that do not hold, and the exact arms whose text at temperature 0 is not plain's."""
    wrong = list[str]()
    for expected in suite.expectations:
        ratio = results[expected.arm].over(results[expected.base], expected.value)
        if ratio.high < expected.at_least:
            what = expected.value.__name__.replace("_", " ")
            wrong.append(
                f"{cell}: {what} of {expected.arm} is {ratio} of {expected.base}, {expected.at_least:g} wanted"
            )
    if cell.temperature or PLAIN not in results:
        return wrong
    plain = [sample.outputs for sample in results[PLAIN].samples()]
    for name, result in results.items():
        if suite.arms[name].is_exact and [sample.outputs for sample in result.samples()] != plain:
            wrong.append(f"{cell}: {name} changes the text")
    return wrong


async def compare(report: Report, suite: Suite, addresses: Mapping[str, str]) -> list[str]:
    """Measure all cells of a suite and add their tables. Returns the violations."""
    wrong = list[str]()
    async with contextlib.AsyncExitStack() as stack:
        clients = dict[str, AsyncClient]()
        for name, address in addresses.items():
            clients[name] = await stack.enter_async_context(AsyncClient(address))
        for name, arm in suite.arms.items():
            if arm.speculation is not False:
                await warm(clients[arm.system], name, arm, suite.prompts[0])
        for cell in suite.cells:
            results = await measure(suite, clients, cell)
            add_table(report, suite, cell, results)
            wrong += find_violations(suite, cell, results)
    return wrong


def run(suite: Suite, report: Report) -> int:
    """Run a suite and fill its report. Returns the exit code: 1 where something that was expected does not hold."""
    report.text(
        f"{suite.note} {len(suite.prompts)} prompts, {suite.max_tokens} tokens each, {suite.repetitions} repetitions. "
        "Waited: share of a round's time in which the target waits for drafts. In brackets the interval of 95 % from a "
        "bootstrap over units."
    )
    with serving(suite.systems) as addresses:
        wrong = asyncio.run(compare(report, suite, addresses))
    report.verdict(wrong)
    return 1 if wrong else 0
