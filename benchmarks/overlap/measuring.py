"""Measures one group: starts what its arms need, tunes those that take turns, and answers every prompt by each arm."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.common import DEMO_DRAFT, widened
from benchmarks.overlap import simulation
from benchmarks.overlap.checkouts import Checkout
from benchmarks.overlap.costs import Costs
from benchmarks.overlap.expected import draft_service_s, service_costs
from benchmarks.overlap.groups import Group, seed_of
from benchmarks.overlap.results import (
    CHAIN,
    CHAIN_BOTH,
    FATES,
    OVERLAP_CHAIN,
    OVERLAP_TREE,
    PARTS,
    PLAIN,
    PLAIN_BOTH,
    PLAIN_LEASE,
    PLAIN_TODAY,
    TODAY,
    TREE,
    GroupResult,
    Measured,
    Tuned,
)
from benchmarks.overlap.shapes import Shape, best_shape
from benchmarks.overlap.systems import Colocated, Counts, Split, ended_with_block, split, told
from benchmarks.overlap.traces import Traces
from benchmarks.passes import run_pass
from outrider.client import Round, Speculation

TRIED_LENGTHS = range(1, 9)
"""K of the chains that are tried."""
TRIED_NODES, TRIED_DEPTHS = (4, 6, 8, 11), (2, 3, 4, 5, 6)
"""Of the trees that are simulated; the best are tried. More than 11 nodes are past a cliff of this target's step."""
NUM_TRIED_TREES = 3
COST_ROUNDS = 24
"""Steps of each width that a cost is the median of."""
FEW_ROUNDS = 3
"""The same where it is measured in each repetition, twice."""
WARM_TOKENS = 16


class Arms:
    """The running processes of a group."""

    def __init__(
        self,
        group: Group,
        prompts: Sequence[list[int]],
        options: argparse.Namespace,
        one: Colocated,
        both: Colocated,
        other: Colocated,
        splits: dict[str, Split],
        traced: Traces,
        base: str,
        costs: Costs,
    ) -> None:
        """other: on the draft's core. splits: by arm. base: what the round before is."""
        self.group, self.prompts, self.options = group, prompts, options
        self.one, self.both, self.other, self.splits = one, both, other, splits
        self.traces = traced
        self.result = GroupResult(group, base, options.max_tokens, costs, Tuned(1, 1))
        self._tune()

    # tuning

    def _tune(self) -> None:
        """Try chains of every length, and the trees that the simulation likes best, in one process."""
        tries = self.prompts[: self.options.tune_prompts]

        def speed(pair: Colocated, shape: int | Shape) -> float:
            made = [self._colocated(pair, prompt, seed, shape) for seed, prompt in enumerate(tries)]
            return float(sum(each["num_tokens"] for each in made) / sum(each["seconds"] for each in made))

        speed(self.one, 1)  # warms
        speeds = {pair: {k: speed(pair, k) for k in TRIED_LENGTHS} for pair in (self.one, self.both)}
        best = {pair: max(found, key=found.__getitem__) for pair, found in speeds.items()}
        for pair, found in speeds.items():
            print(f"K: {best[pair]} of {', '.join(f'{k}: {rate:.1f}' for k, rate in found.items())}", flush=True)
        self._note_host_costs([self._colocated(self.one, p, i, best[self.one]) for i, p in enumerate(tries)])
        tree = max(self._likely_trees(), key=lambda shape: speed(self.one, shape), default=None)
        self.result.tuned = Tuned(best[self.one], best[self.both], tree)

    def _likely_trees(self) -> list[Shape]:
        if not self.group.determined:
            return []
        shapes = {best_shape(self.traces.shares.tolist(), n, d) for n in TRIED_NODES for d in TRIED_DEPTHS}
        expected = {shape: simulation.tree(self.traces, self.result.costs, shape).tokens_per_s for shape in shapes}
        return sorted(shapes, key=expected.__getitem__)[-NUM_TRIED_TREES:]

    def _note_host_costs(self, made: Sequence[dict[str, Any]]) -> None:
        num_steps, num_draft_steps = (sum(each[name] for each in made) for name in ("num_steps", "num_draft_steps"))
        draft_step_s = sum(each["draft_s"] for each in made) / num_draft_steps
        decide_s = sum(each["decide_s"] for each in made) / num_steps
        draw_s = max(0.0, draft_step_s - self.result.costs.draft[1])
        self.result.costs = replace(self.result.costs, decide_s=decide_s, draw_s=draw_s)

    async def tune_split(self) -> None:
        """Measure round trips, and choose K of the round before by what a few answers show of its services."""
        system, unit = self.splits[OVERLAP_CHAIN], self.result.step_s
        for each in self.options.round_trips:
            front = system.front(each * unit, self.options.bandwidth)
            self.result.round_trips_s[each] = await system.measured_round_trip_s() if front is system.far else 0.0
            print(f"round trip {each:g}: {1e3 * self.result.round_trips_s[each]:.2f} ms", flush=True)
        pilot = replace(self.result, answers=list[Measured]())
        for index in range(self.options.tune_prompts):
            made = self._colocated(self.one, self.prompts[index], index, 0)
            pilot.answers.append(measured_locally(PLAIN, 0, index, made))
            for arm in (PLAIN_TODAY, PLAIN_LEASE, TODAY):
                pilot.answers.append(await self.answer_split(arm, 0.0, 0, index, self.options.max_tokens))
        today = pilot.cell(TODAY, 0.0)
        assert today is not None
        costs = replace(service_costs(pilot), draft_service_s=draft_service_s(pilot, today))
        for each, seconds in self.result.round_trips_s.items():
            at = replace(costs, round_trip_s=seconds)
            self.result.tuned.today[each] = simulation.best_length(self.traces, at, services=True)

    # answers

    def _colocated(self, pair: Colocated, prompt: list[int], seed: int, shape: int | Shape) -> dict[str, Any]:
        return pair.answer(prompt, self.group, seed, self.options.max_tokens, shape)

    def local_arms(self) -> dict[str, tuple[Colocated, int | Shape]]:
        tuned = self.result.tuned
        arms: dict[str, tuple[Colocated, int | Shape]] = {
            PLAIN: (self.one, 0),
            PLAIN_BOTH: (self.both, 0),
            CHAIN: (self.one, tuned.chain),
            CHAIN_BOTH: (self.both, tuned.chain_both),
        }
        if tuned.tree is not None:
            arms[TREE] = (self.one, tuned.tree)
        return arms

    def network_arms(self, round_trip: float) -> dict[str, tuple[Split, Speculation]]:
        rule = self.group.acceptance.name.lower()
        auto = Speculation(num_draft_tokens="auto", acceptance=rule)
        k = self.result.tuned.today.get(round_trip, self.result.tuned.chain)
        arms: dict[str, tuple[Split, Speculation]] = {
            TODAY: (self.splits[TODAY], Speculation(num_draft_tokens=k, acceptance=rule)),
            OVERLAP_CHAIN: (self.splits[OVERLAP_CHAIN], auto),
        }
        if OVERLAP_TREE in self.splits:
            arms[OVERLAP_TREE] = (self.splits[OVERLAP_TREE], auto)
        if not round_trip:
            plain = Speculation(enabled=False, acceptance=rule)
            arms[PLAIN_TODAY] = (self.splits[TODAY], plain)
            arms[PLAIN_LEASE] = (self.splits[OVERLAP_CHAIN], plain)
        return arms

    def answer_locally(self, arm: str, repetition: int, index: int) -> None:
        pair, shape = self.local_arms()[arm]
        made = self._colocated(pair, self.prompts[index], seed_of(repetition, index), shape)
        self.result.answers.append(measured_locally(arm, repetition, index, made))

    async def answer_split(self, arm: str, round_trip: float, repetition: int, index: int, max_tokens: int) -> Measured:
        system, speculation = self.network_arms(round_trip)[arm]
        front = system.front(round_trip * self.result.step_s, self.options.bandwidth)
        before, arrived = front.counts(), list[tuple[float, Round]]()
        sample = await run_pass(
            front.client,
            [self.prompts[index]],
            concurrency=1,
            temperature=self.group.temperature,
            max_tokens=max_tokens,
            speculation=speculation,
            seed=seed_of(repetition, index),
            on_round=lambda _, item: arrived.append((time.perf_counter(), item)),
        )
        arrived = [each for each in arrived if each[1].tokens]
        later = [item for _, item in arrived[1:]]
        counts = counted(front.counts(), before) | {"elapsed": sample.elapsed_s}
        counts["verify"] = sum(item.timings.verify_s for item in later)
        return Measured(
            arm,
            round_trip,
            repetition,
            index,
            sample.outputs[0],
            sum(len(item.tokens) for item in later),
            arrived[-1][0] - arrived[0][0],
            len(later),
            sum(item.num_drafted for item in later),
            sum(item.num_accepted for item in later),
            counts,
        )

    def note_contention(self) -> None:
        """Measure what a forward of the target takes beside forwards of the draft on the other core, over alone."""
        prompt = max(self.prompts, key=len)
        alone, _ = self.one.costs(prompt, FEW_ROUNDS)
        with self.other.drafting(prompt, 2.5 * FEW_ROUNDS * sum(alone.values())):
            beside, _ = self.one.costs(prompt, FEW_ROUNDS)
        self.result.contention.append(statistics.median(beside[rows] / alone[rows] for rows in alone))

    async def repeat(self, repetition: int) -> None:
        """Answer every prompt by every arm, those without a network between those of the first round trip."""
        trips = list(self.options.round_trips)
        first = repetition % len(trips)
        for round_trip in (*trips[first:], *trips[:first]):
            network = list(self.network_arms(round_trip))
            for arm in network:
                await self.answer_split(arm, round_trip, repetition, 0, WARM_TOKENS)
            local = list(self.local_arms()) if round_trip == trips[0] else []
            for index in range(len(self.prompts)):
                arms = [*local, *network]
                turn = (repetition + index) % len(arms)
                for arm in (*arms[turn:], *arms[:turn]):
                    if arm in local:
                        self.answer_locally(arm, repetition, index)
                    else:
                        made = await self.answer_split(arm, round_trip, repetition, index, self.options.max_tokens)
                        self.result.answers.append(made)
            self._say(repetition, round_trip, [*local, *network])

    def _say(self, repetition: int, round_trip: float, arms: Sequence[str]) -> None:
        for arm in arms:
            cell = self.result.cell(arm, round_trip) or self.result.cell(arm, None)
            assert cell is not None
            now = replace(cell, answers=[each for each in cell.answers if each.repetition == repetition])
            print(
                f"repetition {repetition}, round trip {round_trip:g}, {arm}: {now.tokens_per_s:.1f} tok/s", flush=True
            )


def measured_locally(arm: str, repetition: int, index: int, made: dict[str, Any]) -> Measured:
    names = ("ids", "num_tokens", "seconds", "num_steps", "num_drafted", "num_accepted")
    busy = {"elapsed": made["seconds"], "target_busy": made["forward_s"] + made["decide_s"]}
    counts = busy | {"draft_busy": made["draft_s"], "draft_steps": made["num_draft_steps"]}
    return Measured(arm, None, repetition, index, **{name: made[name] for name in names}, counts=counts)


def counted(after: Counts, before: Counts) -> dict[str, float]:
    """Return what the parts counted during an answer."""

    def grown(part: str, name: str, **labels: str) -> float:
        return after.since(before, part, name, **labels)

    worker = "outrider_worker_"
    found = {f"{part}_busy": grown(part, f"{worker}busy_seconds_total") for part in ("target", "draft")}
    found |= {f"{part}_steps": grown(part, f"{worker}batch_size_count") for part in ("target", "draft")}
    found |= {f"{part}_cpu": grown(part, "process_cpu_seconds_total") for part in PARTS}
    found["draft_nodes"] = grown("draft", f"{worker}steps_total", kind="grow")
    found["hits"] = grown("gateway", "spec_lookup_total", result="hit")
    found["misses"] = grown("gateway", "spec_lookup_total", result="miss")
    found["held"] = grown("gateway", "spec_hold_seconds_sum")
    found["draft_bytes"] = grown("draft", f"{worker}delivered_bytes_total")
    found["gateway_bytes"] = grown("gateway", "spec_wire_bytes_total")
    for fate in FATES:
        found[f"parked_{fate}"] = grown("target", "spec_parked_tokens_total", fate=fate)
    return found


@contextlib.asynccontextmanager
async def running_arms(
    group: Group,
    prompts: Sequence[list[int]],
    traced: Traces,
    options: argparse.Namespace,
    here: Checkout,
    base: Checkout,
) -> AsyncIterator[Arms]:
    target, draft = widened(options.size), group.draft(options.size)
    async with contextlib.AsyncExitStack() as stack:
        children = stack.enter_context(ended_with_block([]))
        one, both, other = (Colocated(here, target, draft, cores) for cores in ((1,), (0, 1), (0,)))
        for pair in (one, both, other):
            children.append(pair.child)
        for pair in (one, both, other):
            told(pair.child)
        arms = {TODAY: (base, "target_service"), OVERLAP_CHAIN: (here, "target_service")}
        if group.determined:
            arms[OVERLAP_CHAIN] = (here, "benchmarks.overlap.chain_target")
            arms[OVERLAP_TREE] = (here, "target_service")
        costs = Costs(*one.costs(max(prompts, key=len), COST_ROUNDS))
        splits = dict[str, Split]()
        for arm, (checkout, module) in arms.items():
            slept_s = costs.draft if options.apart and arm != TODAY else None
            drafting = draft if slept_s is None else DEMO_DRAFT
            splits[arm] = await stack.enter_async_context(split(checkout, target, drafting, module, slept_s))
        yield Arms(group, prompts, options, one, both, other, splits, traced, f"{options.base}, {base.note}", costs)


async def measure(
    group: Group,
    prompts: Sequence[list[int]],
    traced: Traces,
    options: argparse.Namespace,
    here: Checkout,
    base: Checkout,
) -> GroupResult:
    """Measure a group: repetitions until all are done, or the next would not end in time."""
    started_s, load = time.monotonic(), os.getloadavg()[0]
    async with running_arms(group, prompts, traced, options, here, base) as arms:
        await arms.tune_split()
        result, took_s = arms.result, 0.0
        while result.num_repetitions < options.repetitions:
            began = time.monotonic()
            if result.num_repetitions and began + took_s - started_s > 60 * options.most_minutes:
                break
            if not options.apart:
                arms.note_contention()
            await arms.repeat(result.num_repetitions)
            took_s = time.monotonic() - began
            result.num_repetitions += 1
    result.load_at_start = load
    result.minutes = (time.monotonic() - started_s) / 60
    return result
