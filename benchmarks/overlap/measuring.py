"""Measures one group: starts what its arms need, tunes those that take turns, and answers every prompt by each arm."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import widened
from benchmarks.overlap import simulation
from benchmarks.overlap.checkouts import Checkout
from benchmarks.overlap.groups import ROUND_TRIPS, Group
from benchmarks.overlap.shapes import Shape, best_shape
from benchmarks.overlap.simulation import Costs
from benchmarks.overlap.systems import Colocated, Counts, Split, ended_with_block, split, told
from benchmarks.overlap.traces import Traces, traces
from benchmarks.passes import run_pass
from outrider.client import Round, Speculation

PLAIN, PLAIN_BOTH = "plain", "plain, both cores"
CHAIN, TREE, CHAIN_BOTH = "colocated chain", "colocated tree", "colocated chain, both cores"
PLAIN_TODAY, PLAIN_LEASE = "plain, today", "plain, lease"
TODAY, OVERLAP_CHAIN, OVERLAP_TREE = "today", "overlap chain", "overlap tree"
ON_ONE_CORE = (PLAIN, CHAIN, TREE)
"""Arms without a network on the target's own core."""

TRIED_LENGTHS = range(1, 9)
"""K of the chains that are tried."""
TRIED_NODES, TRIED_DEPTHS = (4, 6, 8, 11), (2, 3, 4, 5, 6)
"""Of the trees that are simulated; the best are tried. More than 11 nodes are past a cliff of this target's step."""
NUM_TRIED_TREES = 3
COST_ROUNDS = 12
"""Steps of each width that a cost is the median of."""
WARM_TOKENS = 16


@dataclass
class Measured:
    """One answer of one arm; what is counted begins with its second verdict, but for `counts`, which are of all."""

    arm: str
    round_trip: float | None
    """In steps of the target; None without a network."""
    repetition: int
    prompt: int
    """Its index."""
    ids: list[int]
    num_tokens: int
    seconds: float
    num_steps: int
    num_drafted: int
    num_accepted: int
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass
class Tuned:
    """What the arms that take turns were tuned to."""

    chain: int
    chain_both: int
    tree: Shape | None
    today: dict[float, int]
    """K by round trip."""


@dataclass
class GroupResult:
    """What a group's file holds."""

    group: Group
    step_s: float
    """A plain step of the target: the unit of round trips."""
    costs: dict[str, Any]
    """Fields of `Costs` that were measured without services."""
    round_trips_s: dict[float, float]
    """What each round trip was, as measured, by what it was to be."""
    tuned: Tuned
    answers: list[Measured]
    num_repetitions: int = 0


class Arms:
    """The running processes of a group."""

    def __init__(
        self,
        group: Group,
        prompts: Sequence[list[int]],
        options: argparse.Namespace,
        one: Colocated,
        both: Colocated,
        splits: dict[str, Split],
    ) -> None:
        """splits: by arm; none of them where only costs are wanted."""
        self.group, self.prompts, self.options = group, prompts, options
        self.one, self.both, self.splits = one, both, splits
        self.traces: Traces = traces(group, prompts, options.trace_tokens)
        verify, draft = one.costs(max(prompts, key=len), COST_ROUNDS)
        self.costs = Costs(verify, draft)
        self.step_s = verify[1]
        self.tuned = self._tune()
        self.answers: list[Measured] = []

    # tuning

    def _tune(self) -> Tuned:
        tries = self.prompts[: self.options.tune_prompts]

        def speed(pair: Colocated, shape: int | Shape) -> float:
            made = [self._colocated(pair, prompt, seed, shape) for seed, prompt in enumerate(tries)]
            return sum(each["num_tokens"] for each in made) / sum(each["seconds"] for each in made)

        speed(self.one, 1)  # warms
        speeds = {pair: {k: speed(pair, k) for k in TRIED_LENGTHS} for pair in (self.one, self.both)}
        best = {pair: max(found, key=found.__getitem__) for pair, found in speeds.items()}
        for pair, found in speeds.items():
            print(f"K: {best[pair]} of {', '.join(f'{k}: {rate:.1f}' for k, rate in found.items())}", flush=True)
        self._note_host_costs([self._colocated(self.one, p, i, best[self.one]) for i, p in enumerate(tries)])
        tree = max(self._likely_trees(), key=lambda shape: speed(self.one, shape), default=None)
        return Tuned(best[self.one], best[self.both], tree, {})

    def _likely_trees(self) -> list[Shape]:
        if not self.group.determined:
            return []
        shapes = {best_shape(self.traces.shares.tolist(), n, d) for n in TRIED_NODES for d in TRIED_DEPTHS}
        expected = {shape: simulation.tree(self.traces, self.costs, shape).tokens_per_s for shape in shapes}
        return sorted(shapes, key=expected.__getitem__)[-NUM_TRIED_TREES:]

    def _note_host_costs(self, made: Sequence[dict[str, Any]]) -> None:
        num_steps, num_draft_steps = (sum(each[name] for each in made) for name in ("num_steps", "num_draft_steps"))
        draft_step_s = sum(each["draft_s"] for each in made) / num_draft_steps
        decide_s = sum(each["decide_s"] for each in made) / num_steps
        forwards = self.costs.verify, self.costs.draft
        self.costs = Costs(*forwards, decide_s=decide_s, draw_s=max(0.0, draft_step_s - self.costs.draft[1]))

    def tune_today(self, round_trips_s: dict[float, float]) -> None:
        """Choose K of the round before by simulation: what a token of its draft takes is near that of a bare step."""
        for name, seconds in round_trips_s.items():
            costs = Costs(**{**asdict(self.costs), "round_trip_s": seconds, "gateway_s": 0.06 * self.step_s})
            self.tuned.today[name] = simulation.best_length(self.traces, costs, services=True)

    # answers

    def _colocated(self, pair: Colocated, prompt: list[int], seed: int, shape: int | Shape) -> dict[str, Any]:
        return pair.answer(prompt, self.group, seed, self.options.max_tokens, shape)

    def local_arms(self) -> dict[str, tuple[Colocated, int | Shape]]:
        arms: dict[str, tuple[Colocated, int | Shape]] = {
            PLAIN: (self.one, 0),
            PLAIN_BOTH: (self.both, 0),
            CHAIN: (self.one, self.tuned.chain),
            CHAIN_BOTH: (self.both, self.tuned.chain_both),
        }
        if self.tuned.tree is not None:
            arms[TREE] = (self.one, self.tuned.tree)
        return arms

    def network_arms(self, round_trip: float) -> dict[str, tuple[Split, Speculation | bool]]:
        rule = self.group.acceptance.name.lower()
        auto = Speculation(num_draft_tokens="auto", acceptance=rule)
        k = self.tuned.today.get(round_trip, self.tuned.chain)
        arms: dict[str, tuple[Split, Speculation | bool]] = {
            TODAY: (self.splits[TODAY], Speculation(num_draft_tokens=k, acceptance=rule)),
            OVERLAP_CHAIN: (self.splits[OVERLAP_CHAIN], auto),
        }
        if OVERLAP_TREE in self.splits:
            arms[OVERLAP_TREE] = (self.splits[OVERLAP_TREE], auto)
        if not round_trip:
            arms[PLAIN_TODAY] = (self.splits[TODAY], False)
            arms[PLAIN_LEASE] = (self.splits[OVERLAP_CHAIN], False)
        return arms

    def answer_locally(self, arm: str, repetition: int, index: int) -> None:
        pair, shape = self.local_arms()[arm]
        made = self._colocated(pair, self.prompts[index], 1000 * repetition + index, shape)
        names = ("ids", "num_tokens", "seconds", "num_steps", "num_drafted", "num_accepted")
        busy = {"elapsed": made["seconds"], "target_busy": made["forward_s"] + made["decide_s"]}
        counts = busy | {"draft_busy": made["draft_s"], "draft_steps": made["num_draft_steps"]}
        self.answers.append(Measured(arm, None, repetition, index, *(made[name] for name in names), counts))

    async def answer_split(self, arm: str, round_trip: float, repetition: int, index: int, max_tokens: int) -> Measured:
        system, speculation = self.network_arms(round_trip)[arm]
        front = system.front(round_trip * self.step_s, self.options.bandwidth)
        before, arrived = front.counts(), list[tuple[float, Round]]()
        sample = await run_pass(
            front.client,
            [self.prompts[index]],
            concurrency=1,
            temperature=self.group.temperature,
            max_tokens=max_tokens,
            speculation=speculation,
            seed=1000 * repetition + index,
            on_round=lambda _, item: arrived.append((time.perf_counter(), item)),
        )
        counts = counted(front.counts(), before) | {"elapsed": sample.elapsed_s}
        arrived = [each for each in arrived if each[1].tokens]
        later = [item for _, item in arrived[1:]]
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
                        self.answers.append(made)
            self._say(repetition, round_trip, [*local, *network])

    def _say(self, repetition: int, round_trip: float, arms: Sequence[str]) -> None:
        for arm in arms:
            of_arm = [each for each in self.answers if (each.arm, each.repetition) == (arm, repetition)]
            of_arm = [each for each in of_arm if each.round_trip in (None, round_trip)]
            rate = sum(each.num_tokens for each in of_arm) / sum(each.seconds for each in of_arm)
            print(f"repetition {repetition}, round trip {round_trip:g}, {arm}: {rate:.1f} tokens/s", flush=True)


def counted(after: Counts, before: Counts) -> dict[str, float]:
    """Return what the parts counted during an answer."""

    def grown(part: str, name: str, **labels: str) -> float:
        return after.since(before, part, name, **labels)

    worker = "outrider_worker_"
    found = {f"{part}_busy": grown(part, f"{worker}busy_seconds_total") for part in ("target", "draft")}
    found |= {f"{part}_steps": grown(part, f"{worker}batch_size_count") for part in ("target", "draft")}
    found["draft_nodes"] = grown("draft", f"{worker}steps_total", kind="grow")
    found["hits"] = grown("gateway", "spec_lookup_total", result="hit")
    found["misses"] = grown("gateway", "spec_lookup_total", result="miss")
    found["held"] = grown("gateway", "spec_hold_seconds_sum")
    found["draft_bytes"] = grown("draft", f"{worker}delivered_bytes_total")
    found["gateway_bytes"] = grown("gateway", "spec_wire_bytes_total")
    for fate in ("verified", "late", "pruned", "refused", "expired"):
        found[f"parked_{fate}"] = grown("target", f"{worker}parked_tokens_total", fate=fate)
    return found


@contextlib.asynccontextmanager
async def running_arms(
    group: Group, prompts: Sequence[list[int]], options: argparse.Namespace, here: Checkout, base: Checkout
) -> AsyncIterator[Arms]:
    target, draft = widened(options.size), group.draft()
    async with contextlib.AsyncExitStack() as stack:
        children = stack.enter_context(ended_with_block([]))
        pairs = [Colocated(here, target, draft, cores) for cores in ((1,), (0, 1))]
        for pair in pairs:
            children.append(pair.child)
        for pair in pairs:
            told(pair.child)
        arms = {TODAY: (base, "target_service"), OVERLAP_CHAIN: (here, "target_service")}
        if group.determined:
            arms[OVERLAP_CHAIN] = (here, "benchmarks.overlap.chain_target")
            arms[OVERLAP_TREE] = (here, "target_service")
        splits = {
            arm: await stack.enter_async_context(split(checkout, target, draft, module))
            for arm, (checkout, module) in arms.items()
        }
        yield Arms(group, prompts, options, *pairs, splits)


async def measure(
    group: Group, prompts: Sequence[list[int]], options: argparse.Namespace, here: Checkout, base: Checkout
) -> GroupResult:
    """Measure a group: repetitions until all are done, or the next would not end in time."""
    stop_s = time.monotonic() + 60 * options.most_minutes
    async with running_arms(group, prompts, options, here, base) as arms:
        round_trips_s = {0.0: 0.0}
        for each in filter(None, options.round_trips):
            system = arms.splits[OVERLAP_CHAIN]
            system.front(each * arms.step_s, options.bandwidth)
            round_trips_s[each] = await system.measured_round_trip_s()
            print(f"round trip {each:g}: {1e3 * round_trips_s[each]:.2f} ms", flush=True)
        arms.tune_today(round_trips_s)
        took_s, done = 0.0, 0
        while done < options.repetitions and time.monotonic() + took_s < stop_s:
            began = time.monotonic()
            await arms.repeat(done)
            took_s, done = time.monotonic() - began, done + 1
        costs = {name: value for name, value in asdict(arms.costs).items() if value}
        return GroupResult(group, arms.step_s, costs, round_trips_s, arms.tuned, arms.answers, done)


