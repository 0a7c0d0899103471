"""Measures a pair at one temperature: first the draft model at every K, then each drafter at the best K."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.cli.progress import ShowMessage
from outrider.client import AsyncClient, Drafter, Round, Speculation
from outrider.lab.tuning import settings
from outrider.lab.tuning.choice import Ratio, Recommendation, choose, fastest_drafted
from outrider.lab.tuning.costs import Costs, costs_of
from outrider.lab.tuning.runs import Pass, Workload, lead_in, run_interleaved, speeds_of
from outrider.lab.tuning.theory import improvement
from outrider.wire.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Point:
    """Results of the draft model with one K (draft tokens per round)."""

    k: int
    paper_speedup: float
    """Speed relative to plain decoding that theory predicts for this K: Theorem 3.8 of Leviathan et al. 2023, with the
    measured alpha and c of the pair."""
    tokens_per_s: float
    """Measured output tokens per second: the median over the repeats."""
    speedup: Ratio
    """Measured speed relative to plain decoding."""
    tokens_per_round: float | None
    """Mean number of output tokens of a round with draft tokens; None = there was no such round."""


@dataclass(frozen=True)
class Study:
    """Results of all compared settings of speculation at one sampling temperature."""

    temperature: float
    alpha: float
    """Accepted draft tokens over those that the target compared with its own distribution, in rounds with the largest
    K. A round compares none after the first that it rejects."""
    costs: Costs
    points: Sequence[Point]
    """Results of the draft model at each K, in ascending order from K = 0."""
    speeds: Mapping[str, Sequence[float]]
    """speeds[name][i]: tokens per second in repeat i, for each compared setting by name. The simplest setting comes
    first."""
    options: Mapping[str, Speculation]
    """Speculation options of each compared setting, by name."""
    refused: Mapping[str, str]
    """For each setting that the gateway refused, by name, the message of its error."""
    choice: Recommendation


async def study_pair(
    client: AsyncClient, load: Workload, offered: Sequence[Drafter], max_k: int, repeats: int, show_message: ShowMessage
) -> Study:
    """Measure the draft model at every K from 0 to `max_k`, then every available drafter at the best K, and recommend
    one of these settings.

    load: prompts and parameters of the requests. offered: drafters that the gateway reports as available. repeats:
    number of outputs per prompt and setting. show_message: called with lines of text on the progress. Raises
    ConfigError if the outputs are too short for a round with K draft tokens, StopRequested once `load.stop` is set, and
    OutriderError if a request fails.
    """
    ks = range(max_k + 1)
    chains = settings.chains(ks, load.temperature)
    passes = await _run(client, load, chains, range(repeats), show_message, "every K")
    passes_by_k = dict(zip(ks, passes.values(), strict=True))
    costs = costs_of(passes_by_k, load.max_tokens)
    alpha = acceptance_probability(passes_by_k[max_k])
    points = points_of(passes_by_k, alpha, costs.c)

    best_k = _best_k(passes_by_k)
    drafters = settings.compared_drafters(best_k, max_k, load.temperature, offered)
    options, refused = await _offered(client, load, drafters)
    passes = await _run(client, load, options, range(repeats), show_message, "drafters")
    speeds = {name: speeds_of(own) for name, own in passes.items()}
    return Study(load.temperature, alpha, costs, points, speeds, options, refused, choose(speeds))


async def _run(
    client: AsyncClient,
    load: Workload,
    compared: Mapping[str, Speculation],
    repeats: range,
    show_message: ShowMessage,
    stage: str,
) -> dict[str, list[Pass]]:
    num_done = 0
    num_all = len(repeats) * len(load.prompts) * len(compared)

    def done() -> None:
        nonlocal num_done
        num_done += 1
        if num_done % len(compared) == 0:  # a prompt under all of them
            show_message(f"temperature {load.temperature:g}, {stage}: {num_done} of {num_all} answers")

    return await run_interleaved(client, load, compared, repeats, done)


async def _offered(
    client: AsyncClient, load: Workload, compared: Mapping[str, Speculation]
) -> tuple[dict[str, Speculation], dict[str, str]]:
    offered = dict[str, Speculation]()
    refused = dict[str, str]()
    for name, speculation in compared.items():
        try:
            await lead_in(client, load, speculation)
        except InvalidRequest as error:
            refused[name] = error.message
        else:
            offered[name] = speculation
    return offered, refused


def _best_k(passes_by_k: Mapping[int, Sequence[Pass]]) -> int:
    """Return the recommended K, or the fastest above 0 where plain decoding is recommended."""
    k_of = dict[str, int]()
    speeds = dict[str, list[float]]()
    for k, passes in passes_by_k.items():
        name = settings.chain_name(k)
        k_of[name] = k
        speeds[name] = speeds_of(passes)
    chosen = choose(speeds).name
    if chosen == settings.PLAIN:
        chosen = fastest_drafted(speeds)
    return k_of[chosen]


def _rounds_of(passes: Sequence[Pass]) -> Iterator[Round]:
    for one in passes:
        for answer in one.answers:
            yield from answer.rounds


def acceptance_probability(passes: Sequence[Pass]) -> float:
    """Return the number of accepted draft tokens divided by the number that the target compared with its own
    distribution. It is 0 if no draft token was compared.

    A round stops comparing at the first draft token that it rejects: if 2 of 4 draft tokens are accepted, it compares
    3.
    """
    num_compared = num_accepted = 0
    for round_ in _rounds_of(passes):
        num_tokens = len(round_.tokens)  # fewer than were accepted where the output ended among them
        num_compared += min(round_.num_accepted + 1, round_.num_drafted, num_tokens)
        num_accepted += min(round_.num_accepted, num_tokens)
    if not num_compared:
        return 0.0
    return num_accepted / num_compared


def points_of(passes_by_k: Mapping[int, Sequence[Pass]], alpha: float, c: float) -> list[Point]:
    """Return the results at each K. passes_by_k: for each K, 0 included, the passes (one output per prompt each).
    alpha: the pair's acceptance probability. c: time of a draft token divided by that of a target step.
    """
    plain_speeds = speeds_of(passes_by_k[0])
    points = list[Point]()
    for k, passes in passes_by_k.items():
        speeds = speeds_of(passes)
        points.append(
            Point(
                k,
                improvement(alpha, k, c),
                statistics.median(speeds),
                Ratio.of(speeds, plain_speeds),
                _tokens_per_round(passes),
            )
        )
    return points


def _tokens_per_round(passes: Sequence[Pass]) -> float | None:
    num_rounds = num_tokens = 0
    for round_ in _rounds_of(passes):
        if round_.num_drafted:
            num_rounds += 1
            num_tokens += len(round_.tokens)
    if not num_rounds:
        return None
    return num_tokens / num_rounds
