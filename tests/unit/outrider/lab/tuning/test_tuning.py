"""What `outrider tune` expects and recommends: the paper's own numbers, and pairs whose speed is known."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from rich.console import Console

from outrider.client import Drafter, Speculation, TokenKind
from outrider.lab.tuning import runs
from outrider.lab.tuning import study as study_module
from outrider.lab.tuning.choice import choose, fastest_of
from outrider.lab.tuning.costs import Costs, costs_of
from outrider.lab.tuning.expected import Acceptance, expected_speed
from outrider.lab.tuning.latency import Latency, break_even
from outrider.lab.tuning.report import reason, show, to_json, unsteady
from outrider.lab.tuning.runs import Pass, TimedAnswer, Workload
from outrider.lab.tuning.settings import (
    alternatives,
    chain,
    chain_name,
    environment,
    gateway_settings,
    max_draft_tokens,
)
from outrider.lab.tuning.study import Study, points_of
from outrider.wire.errors import ConfigError
from outrider.wire.processes.processes import StopFlag
from outrider.wire.requests.tree_shape import TreeShape
from tests.unit.outrider.lab.tuning import simulated_pair
from tests.unit.outrider.lab.tuning.simulated_pair import MAX_TOKENS, PROMPT_S, answer, moods, one_pass, round_s

EVERY_K = range(13)

# ---- from rounds to costs and acceptance


def pair_texts(seed: int, count: int = 8) -> list[list[bool]]:
    draws = random.Random(seed)
    return [moods(draws) for _ in range(count)]


def costs_at(ks: Sequence[int], texts: list[list[bool]]) -> Costs:
    return costs_of({k: [one_pass(k, texts)] for k in ks}, MAX_TOKENS)


def test_costs_are_those_of_the_rounds_with_all_their_drafts() -> None:
    costs = costs_at(EVERY_K, pair_texts(1))
    for k, cost in costs.by_k.items():
        assert cost.round_s == pytest.approx(round_s(k))
        assert cost.wait_s == pytest.approx(0.002 * k)
        assert cost.verify_s == pytest.approx(simulated_pair.verify_s(k))
        assert cost.rest_s == pytest.approx(0.002)
        assert cost.first_s == pytest.approx(PROMPT_S + round_s(k))
        assert cost.plain_share == 0.0
    assert costs.c == pytest.approx(0.002 / 0.020)


def test_answers_too_short_to_tell_are_refused() -> None:
    with pytest.raises(ConfigError, match="no round had all drafts of K = 12 in 1 answers of 3 tokens"):
        costs_of({12: [one_pass(12, [[True] * 3])]}, MAX_TOKENS)


def test_acceptance_by_position_counts_what_was_looked_at() -> None:
    found = Acceptance.of({3: [one_pass(3, [[True, True, False, True, True, True, True, False, True]])]})
    # 1 1 0 | 1 1 1 + | 0 | 1 and the end, behind which nothing counts
    assert found.reached == (4, 2, 2)
    assert found.accepted == (3, 2, 1)
    assert found.alpha == pytest.approx(6 / 8)
    assert found.by_position == [3 / 4, 1.0, 1 / 2]
    assert found.answers[0][:7] == (TokenKind.ACCEPTED,) * 2 + (TokenKind.RECOVERED,) + (TokenKind.ACCEPTED,) * 3 + (
        TokenKind.BONUS,
    )
    assert found.chances()[0] == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1 / 2, 0.0, 1.0]


# ---- expected against what comes


def test_the_expected_speed_is_what_comes() -> None:
    """Costs from every K, drafts from the largest: the speed at each, on other text, within a few per cent."""
    costs = costs_at(EVERY_K, pair_texts(1))
    chances = Acceptance.of({12: [one_pass(12, pair_texts(2, 40))]}).chances()
    texts = pair_texts(3, 40)
    for k in range(13):
        measured = one_pass(k, texts).tokens_per_s
        assert expected_speed(chances, costs, k, MAX_TOKENS) == pytest.approx(measured, rel=0.06), k


# ---- what is recommended


def test_a_tie_goes_to_what_is_simpler() -> None:
    speeds = {"plain": [10, 10, 10], "K = 2": [19.9, 21, 20], "K = 4": [20, 20.5, 20.2]}
    choice = choose(speeds)
    assert (choice.name, choice.fastest) == ("K = 2", "K = 4")


@pytest.mark.parametrize("speeds", [[19.9, 20.4, 20.1], [18, 21, 19]], ids=["never ahead", "too far behind"])
def test_what_is_slower_beyond_noise_is_not_a_tie(speeds: list[float]) -> None:
    assert choose({"plain": [10, 10, 10], "K = 2": speeds, "K = 4": [20, 20.5, 20.2]}).name == "K = 4"


def test_no_drafts_where_they_do_not_pay() -> None:
    worse = choose({"plain": [10, 10, 10], "K = 2": [9, 9.5, 9], "K = 4": [7, 7, 7]})
    assert worse.name == worse.fastest == "plain" and worse.speedup.median == 1.0
    same = choose({"plain": [10, 10, 10], "K = 2": [10.1, 9.9, 10.2]})
    assert (same.name, same.fastest) == ("plain", "K = 2")
    assert fastest_of({"plain": [10], "K = 2": [9.5], "K = 4": [7]}) == "K = 2"


# ---- the study and what is said of it


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


@pytest.mark.parametrize(
    ("drafted", "tokens"),
    [
        (Latency(0.5, 1.0, 0.125), 1),  # as soon, and faster
        (Latency(0.875, 1.0, 0.125), 4),  # 3/8 s later, and 1/8 s faster for each of 3 further ones
        (Latency(1.0, 3.0, 0.125), 3),  # with the first two of them
        (Latency(1.0, 8.0, 0.125), 3),  # plain decoding has three by then, and would have more before the eighth
        (Latency(0.25, 8.0, 0.125), 1),  # sooner from the first on
        (Latency(0.25, 1.0, 0.25), None),
        (Latency(0.5, 1.0, math.nan), None),
    ],
)
def test_drafts_pay_from_the_length_that_makes_good_their_first_token(drafted: Latency, tokens: int | None) -> None:
    plain = Latency(0.5, 1.0, 0.25)
    assert break_even(plain, drafted) == tokens
    if tokens is not None:
        assert drafted.answer_s(tokens) <= plain.answer_s(tokens)


def test_where_drafts_do_not_pay_it_says_so_and_why() -> None:
    study = studied(faster_alone=True)
    said = reason(study)
    assert said.startswith("do not speculate: the fastest setting with drafts, K = 4, coupled, has 0.")
    assert "the draft's alpha 0.00, c 0.10" in said
    found = to_json(study)["recommendation"]
    assert found["speculate"] is False and found["gateway_settings"] == {"num_draft_tokens": "0"}


def test_the_json_has_all_that_the_tables_have() -> None:
    study = studied()
    found = json.loads(json.dumps(to_json(study)))
    assert [each["k"] for each in found["speeds"]] == list(range(13))
    assert [each["k"] for each in found["costs"]] == list(range(13))
    assert found["alpha"] == pytest.approx(study.acceptance.alpha) and len(found["alpha_by_position"]) == 12
    assert [each["name"] for each in found["alternatives"]] == ["plain", "K = 4", "K = 4, coupled"]
    settings = {"num_draft_tokens": "4", "drafter": "model", "acceptance": "coupled"}
    assert found["recommendation"]["gateway_settings"] == settings
    assert found["not_offered"] == {"K = 4, full": "no such thing"}


# ---- how it is measured


def test_every_prompt_is_answered_under_all_settings_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is slow for a while is slow for all; backwards for the next prompt, for the first of them,
    too. Before each answer comes one that is not counted, whose prompt is cached for no other.
    """
    asked: list[tuple[int, int, int]] = []
    num_led = 0

    async def answered(
        client: Any,
        load: Workload,
        index: int,
        repeat: int,
        wish: Speculation,
        max_tokens: int,
        cache: str | None = None,
    ) -> TimedAnswer:
        nonlocal num_led
        k = cast(int, wish.num_draft_tokens)
        if cache is None:
            asked.append((repeat, index, k))
        else:
            assert max_tokens == max(2 * (k + 1), 16)
            num_led += 1
        assert num_led == len(asked) + (cache is not None)
        return answer(k, [True] * max_tokens)

    monkeypatch.setattr(runs, "_run_answer", answered)
    load = Workload(["a", "b"], 90, {"temperature": 0.0}, "model", 1.0, StopFlag())
    wishes = {str(k): Speculation(num_draft_tokens=k) for k in (1, 2, 12)}
    num_done: list[int] = []
    passes = asyncio.run(
        runs.run_interleaved(cast(Any, None), load, wishes, range(5, 7), lambda: num_done.append(len(asked)))
    )
    up, down = [1, 2, 12], [12, 2, 1]
    assert [k for _, _, k in asked] == [*up, *down, *down, *up]
    assert [(repeat, index) for repeat, index, _ in asked[::3]] == [(5, 0), (5, 1), (6, 0), (6, 1)]
    assert num_done == list(range(1, 13))
    assert {name: [len(own.answers) for own in each] for name, each in passes.items()} == {
        name: [2, 2] for name in wishes
    }
    assert all(one.num_tokens == 180 for each in passes.values() for one in each)
    salts = [load.options(0, 0, Speculation(), 1, cache)["cache_salt"] for cache in ("lead-in", "lead-in", None, None)]
    assert salts[0] == salts[1] and len(set(salts)) == 3


def test_a_study_of_a_pair_whose_speed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is half as fast when every K is measured as when costs were: that does not make `met` wrong. No seed
    of the one is one of the other's.
    """
    stages, seeds = iter((1.0, 2.0, 2.0)), list[range]()
    draws = random.Random(11)

    async def measured(
        client: Any, load: Workload, wishes: Mapping[str, Speculation], repeats: range, done: Any
    ) -> dict[str, list[Pass]]:
        seeds.append(repeats)
        slowness, found = next(stages), {}
        for name, wish in wishes.items():
            k = wish.num_draft_tokens if isinstance(wish.num_draft_tokens, int) and wish.enabled else 0
            found[name] = [slower(one_pass(k, [moods(draws) for _ in range(15)]), slowness) for _ in repeats]
        return found

    async def nothing(*args: Any) -> None: ...

    monkeypatch.setattr(study_module, "run_interleaved", measured)
    monkeypatch.setattr(study_module, "lead_in", nothing)
    load = Workload(["a"], MAX_TOKENS, {"temperature": 0.0}, "model", 1.0, StopFlag())
    found = asyncio.run(study_module.study(cast(Any, None), load, [Drafter.MODEL], 12, 2, lambda text: None))
    assert found.acceptance.shortest == 6 and len(found.acceptance.answers) == 7 * 2 * 15
    assert [point.k for point in found.points] == list(range(13))
    assert seeds == [range(2, 4), range(2), range(2)]
    assert all(point.met == pytest.approx(1.0, abs=0.1) for point in found.points)
    assert all(point.met_in_tokens_per_s == pytest.approx(0.5, abs=0.05) for point in found.points)
    assert found.points[6].tokens_per_s == pytest.approx(found.points[6].expected_tokens_per_s / 2, rel=0.1)
    assert "when costs were measured" in str(unsteady(found))


def slower(one: Pass, times: float) -> Pass:
    return Pass(tuple(TimedAnswer(each.rounds, tuple(times * gap_s for gap_s in each.gaps_s)) for each in one.answers))


# ---- settings


def test_a_setting_is_told_to_the_gateway_in_full() -> None:
    found = alternatives(4, 12, 1.0, [])
    assert list(found)[:6] == ["plain", "K = auto", "K = 4", "K = 4, full", "K = 4, topk:128", "K = 4, coupled"]
    assert gateway_settings(found["K = 4, topk:128"]) == {
        "num_draft_tokens": "4",
        "drafter": "model",
        "acceptance": "rejection",
        "draft_logprobs": "topk:128",
    }
    coupled = {"num_draft_tokens": "4", "drafter": "model", "acceptance": "coupled"}
    assert gateway_settings(found["K = 4, coupled"]) == coupled
    assert gateway_settings(found["plain"]) == {"num_draft_tokens": "0"}
    assert gateway_settings(chain(33, 0.0)) == {
        "num_draft_tokens": "33",
        "max_draft_tokens": "33",
        "drafter": "model",
    }
    assert environment({"num_draft_tokens": "4", "acceptance": "coupled"}) == (
        "OUTRIDER_GATEWAY_NUM_DRAFT_TOKENS=4 OUTRIDER_GATEWAY_ACCEPTANCE=coupled"
    )


@pytest.mark.parametrize(
    ("k", "shapes"),
    [
        (1, ("3", "2x2", "best:8x2")),
        (2, ("3x1", "best:6x2", "2x2", "best:8x2")),
        (4, ("3x1x1x1", "best:12x4", "2x2x1x1", "best:16x4")),
        (12, ("3x1x1x1", "best:12x4", "2x2x1x1x1x1x1x1", "best:32x8")),
    ],
)
def test_trees_are_small_or_as_deep_as_the_chain_and_no_larger_than_a_step(k: int, shapes: tuple[str, ...]) -> None:
    found = {name: wish for name, wish in alternatives(k, 12, 1.0, []).items() if wish.tree}
    assert list(found) == [f"tree {shape}{rule}" for shape in shapes for rule in ("", ", coupled")]
    for wish in found.values():
        assert wish.tree is not None and wish.num_draft_tokens is None
        assert TreeShape.parse(wish.tree).most_nodes <= max_draft_tokens(k)
    assert gateway_settings(found[f"tree {shapes[0]}, coupled"]) == {
        "tree": shapes[0],
        "drafter": "model",
        "acceptance": "coupled",
    }
