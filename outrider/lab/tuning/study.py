"""All that is measured at one temperature, in the order in which it is."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.cli.progress import Tell
from outrider.client import AsyncClient, Drafter, Speculation
from outrider.lab.tuning import settings
from outrider.lab.tuning.choice import Ratio, Recommendation, choose, fastest_of, speeds_of
from outrider.lab.tuning.costs import Costs, costs_of
from outrider.lab.tuning.expected import Acceptance, expected_speed
from outrider.lab.tuning.latency import Latency
from outrider.lab.tuning.runs import Pass, Workload, lead_in, run_interleaved
from outrider.lab.tuning.theory import improvement
from outrider.wire.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Point:
    """One K: what was to be expected, and what came of it."""

    k: int
    paper_speedup: float
    """Theorem 3.8 with one alpha and c."""
    expected_tokens_per_s: float
    """When costs were measured."""
    expected_speedup: float
    tokens_per_s: float
    """Median over the repeats."""
    speedup: Ratio
    tokens_per_round: float | None
    """Of rounds with drafts; None where there were none."""

    @property
    def met(self) -> float:
        """Measured over expected speedup: the paper's Table 4. Both are over plain decoding of their own time: what the
        machine does to all alike from one measurement to the next is no error of the expectation.
        """
        return self.speedup.median / self.expected_speedup

    @property
    def met_in_tokens_per_s(self) -> float:
        """The same without plain decoding: the machine's change from one measurement to the next is in it."""
        return self.tokens_per_s / self.expected_tokens_per_s


@dataclass(frozen=True)
class Study:
    temperature: float
    acceptance: Acceptance
    costs: Costs
    points: Sequence[Point]
    """By K, from 0."""
    speeds: Mapping[str, Sequence[float]]
    """Tokens per second by setting and repeat, of the settings that were compared at last, simplest first."""
    refused: Mapping[str, str]
    """Settings that the deployment does not offer, with what it said."""
    tried: Mapping[str, Speculation]
    tokens_per_pass: Mapping[str, float]
    """Of each of them: tokens over the target's forwards, rounds and plain steps."""
    latencies: Mapping[str, Latency]
    """Of each of them."""
    choice: Recommendation


async def study(
    client: AsyncClient, load: Workload, offered: Sequence[Drafter], max_k: int, repeats: int, tell: Tell
) -> Study:
    """Costs at every K and acceptance at the larger ones, the speeds that follow from them, those that come, and the
    alternatives at the best K.

    What a verification takes is a staircase over the tokens in it, so that the cost of a K cannot be told from those of
    its neighbours. Costs and acceptance are of seeds of their own: at a temperature above 0 the texts whose speed is
    measured are none of those that it was foretold from.

    offered: the deployment's drafters. Raises the error tree; ConfigError when the answers are too short to tell.
    """
    temperature, ks = load.temperature, range(max_k + 1)
    chains = settings.chains(ks, temperature)
    passes = await _run(client, load, chains, range(repeats, 2 * repeats), tell, "costs")
    costs = costs_of({k: passes[settings.chain_name(k)] for k in ks}, load.max_tokens)
    acceptance = Acceptance.of({k: passes[settings.chain_name(k)] for k in ks if 2 * k >= max_k})
    chances = acceptance.chances()
    expected = [expected_speed(chances, costs, k, load.max_tokens) for k in ks]

    measured = range(repeats)
    passes = await _run(client, load, chains, measured, tell, "speeds")
    points = points_of(passes, expected, acceptance.alpha, costs.c)

    name = choose(speeds_of(passes)).name
    best = name if name != settings.PLAIN else fastest_of(speeds_of(passes))
    k = next(k for k in ks if settings.chain_name(k) == best)
    tried, refused = await _offered(client, load, settings.alternatives(k, max_k, temperature, offered))
    passes = await _run(client, load, tried, measured, tell, "alternatives")
    speeds, per_pass = speeds_of(passes), {name: _tokens_per_pass(own) for name, own in passes.items()}
    latencies = {name: Latency.of(own) for name, own in passes.items()}
    return Study(temperature, acceptance, costs, points, speeds, refused, tried, per_pass, latencies, choose(speeds))


async def _run(
    client: AsyncClient, load: Workload, compared: Mapping[str, Speculation], repeats: range, tell: Tell, stage: str
) -> dict[str, list[Pass]]:
    num_done, num_all = 0, len(repeats) * len(load.prompts) * len(compared)

    def done() -> None:
        nonlocal num_done
        num_done += 1
        if not num_done % len(compared):  # a prompt under all of them
            tell(f"temperature {load.temperature:g}, {stage}: {num_done} of {num_all} answers")

    return await run_interleaved(client, load, compared, repeats, done)


def points_of(passes: Mapping[str, Sequence[Pass]], expected: Sequence[float], alpha: float, c: float) -> list[Point]:
    speeds = speeds_of(passes)
    return [
        Point(
            k=k,
            paper_speedup=improvement(alpha, k, c),
            expected_tokens_per_s=tokens_per_s,
            expected_speedup=tokens_per_s / expected[0],
            tokens_per_s=statistics.median(speeds[settings.chain_name(k)]),
            speedup=Ratio.of(speeds[settings.chain_name(k)], speeds[settings.PLAIN]),
            tokens_per_round=_tokens_per_round(passes[settings.chain_name(k)]),
        )
        for k, tokens_per_s in enumerate(expected)
    ]


def _tokens_per_round(passes: Sequence[Pass]) -> float | None:
    rounds = [round_ for one in passes for answer in one.answers for round_ in answer.rounds if round_.num_drafted]
    return statistics.fmean(len(round_.tokens) for round_ in rounds) if rounds else None


def _tokens_per_pass(passes: Sequence[Pass]) -> float:
    return statistics.fmean(len(round_.tokens) for one in passes for answer in one.answers for round_ in answer.rounds)


async def _offered(
    client: AsyncClient, load: Workload, compared: Mapping[str, Speculation]
) -> tuple[dict[str, Speculation], dict[str, str]]:
    """Those that the deployment takes, and what it said to the others."""
    tried, refused = {}, {}
    for name, speculation in compared.items():
        try:
            await lead_in(client, load, speculation)
        except InvalidRequest as error:
            refused[name] = error.message
        else:
            tried[name] = speculation
    return tried, refused
