"""How a study is shown."""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Sequence

from rich.console import Console

from outrider.client import Drafter
from outrider.lab.tuning.choice import choose
from outrider.lab.tuning.costs import Costs, costs_of
from outrider.lab.tuning.expected import Acceptance, expected_speed
from outrider.lab.tuning.latency import Latency
from outrider.lab.tuning.report import show
from outrider.lab.tuning.settings import (
    alternatives,
    chain_name,
)
from outrider.lab.tuning.study import Study, points_of
from tests.unit.outrider.lab.tuning.simulated_pair import MAX_TOKENS, moods, one_pass

EVERY_K = range(13)


def pair_texts(seed: int, count: int = 8) -> list[list[bool]]:
    draws = random.Random(seed)
    return [moods(draws) for _ in range(count)]


def costs_at(ks: Sequence[int], texts: list[list[bool]]) -> Costs:
    return costs_of({k: [one_pass(k, texts)] for k in ks}, MAX_TOKENS)


@functools.cache
def studied(*, faster_alone: bool = False, fastest: str = "K = 4, coupled") -> Study:
    """At temperature 1, of texts whose drafts are right or never right."""
    texts = [[False] * MAX_TOKENS] * 4 if faster_alone else pair_texts(8, 8)
    costs = costs_at(EVERY_K, pair_texts(1))
    acceptance = Acceptance.of({12: [one_pass(12, texts)]})
    expected = [expected_speed(acceptance.chances(), costs, k, MAX_TOKENS) for k in range(13)]
    passes = {chain_name(k): [one_pass(k, texts)] * 2 for k in range(13)}
    speeds = {name: [own[0].tokens_per_s] * 2 for name, own in passes.items() if name in ("plain", "K = 4")}
    speeds[fastest] = [1.1 * speed for speed in speeds["K = 4"]]
    return Study(
        1.0,
        acceptance,
        costs,
        points_of(passes, expected, acceptance.alpha, costs.c),
        speeds,
        {"K = 4, full": "no such thing"},
        alternatives(4, 12, 1.0, [Drafter.MODEL, Drafter.NGRAM]),
        dict.fromkeys(speeds, 2.5),
        {name: Latency.of([one_pass(0 if name == "plain" else 4, texts)]) for name in speeds},
        choose(speeds),
    )


def test_a_study_is_shown_in_80_columns() -> None:
    study = studied()
    console = Console(width=80, file=io.StringIO(), record=True)
    show(study, console)
    text = console.export_text()
    assert "…" not in text
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in text.splitlines() if line.startswith("│")}
    row = [cell.strip() for cell in rows["12"]]
    point = study.points[12]
    assert row[1:4] == [
        f"{value:.2f}x" for value in (point.paper_speedup, point.expected_speedup, point.speedup.median)
    ]
    assert row[-1] == f"{point.met:.2f}"
    coupled, latency = (
        [cell.strip() for cell in line.split("│")[2:-1]]
        for line in text.splitlines()
        if line.startswith("│ K = 4, coupled ")
    )
    assert coupled[:2] == ["2.50", f"{study.speeds['K = 4, coupled'][0]:.1f}"]
    own = study.latencies["K = 4, coupled"]
    assert latency == [f"{1e3 * own.first_s:.1f}", f"{1e3 * own.token_s:.2f}", "2 tokens"]
    assert "K = 4, full is not offered: no such thing" in text
    assert "temperature 1: K = 4, coupled" in text and "the fastest measured" in text
