"""What `outrider tune` measures and recommends, of pairs whose speed is known."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import random
from collections.abc import Mapping
from typing import Any, cast

import pytest
from rich.console import Console

from outrider.client import Drafter, Speculation
from outrider.lab.tuning import runs
from outrider.lab.tuning import study as study_module
from outrider.lab.tuning.choice import choose, fastest_drafted
from outrider.lab.tuning.costs import costs_of
from outrider.lab.tuning.report import reason, show, to_json
from outrider.lab.tuning.runs import Pass, TimedOutput, Workload
from outrider.lab.tuning.settings import chain, chain_name, compared_drafters, environment, gateway_settings
from outrider.lab.tuning.study import Study, acceptance_probability, points_of
from outrider.lab.tuning.theory import improvement
from outrider.wire.errors import ConfigError, InvalidRequest
from outrider.wire.processes.stop_flag import StopFlag
from tests.unit.outrider.lab.tuning import simulated_pair
from tests.unit.outrider.lab.tuning.simulated_pair import MAX_TOKENS, PROMPT_S, answer, moods, one_pass, round_s

EVERY_K = range(13)

# ---- from rounds to costs and acceptance


def pair_texts(seed: int, count: int = 8) -> list[list[bool]]:
    draws = random.Random(seed)
    return [moods(draws) for _ in range(count)]


def test_costs_are_those_of_the_rounds_with_all_their_drafts() -> None:
    costs = costs_of({k: [one_pass(k, pair_texts(1))] for k in EVERY_K}, MAX_TOKENS)
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


def test_acceptance_counts_what_the_target_compared() -> None:
    # 1 1 0 | 1 1 1 + | 0 | 1 and the end, behind which nothing counts
    found = acceptance_probability([one_pass(3, [[True, True, False, True, True, True, True, False, True]])])
    assert found == pytest.approx(6 / 8)
    assert acceptance_probability([one_pass(0, [[True] * 3])]) == 0.0


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
    assert fastest_drafted({"plain": [10], "K = 2": [9.5], "K = 4": [7]}) == "K = 2"


# ---- the study and what is said of it


@functools.cache
def studied(*, faster_alone: bool = False, fastest: str = "K = 4, lookup+model") -> Study:
    """At temperature 1, of texts whose drafts are right or never right."""
    texts = [[False] * MAX_TOKENS] * 4 if faster_alone else pair_texts(8, 8)
    passes = {k: [one_pass(k, texts)] * 2 for k in EVERY_K}
    costs = costs_of(passes, MAX_TOKENS)
    alpha = acceptance_probability(passes[12])
    speeds = {chain_name(k): [passes[k][0].tokens_per_s] * 2 for k in (0, 4)}
    speeds[fastest] = [1.1 * speed for speed in speeds["K = 4"]]
    options = compared_drafters(4, 12, 1.0, [Drafter.MODEL, Drafter.NGRAM, Drafter("lookup+model")])
    refused = {"K = 4, unigram": "no such thing"}
    return Study(1.0, alpha, costs, points_of(passes, alpha, costs.c), speeds, options, refused, choose(speeds))


def test_a_study_is_shown_in_80_columns() -> None:
    study = studied()
    console = Console(width=80, file=io.StringIO(), record=True)
    show(study, console)
    text = console.export_text()
    assert "…" not in text
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in text.splitlines() if line.startswith("│")}
    point = study.points[12]
    assert [cell.strip() for cell in rows["12"]][1:3] == [f"{point.paper_speedup:.2f}x", f"{point.speedup.median:.2f}x"]
    assert "K = 4, unigram is not offered: no such thing" in text
    assert "temperature 1: K = 4, lookup+model" in text and "the fastest measured" in text


def test_where_drafts_do_not_pay_it_says_so_and_why() -> None:
    study = studied(faster_alone=True)
    said = reason(study)
    assert said.startswith("do not speculate: the fastest setting with drafts, K = 4, lookup+model, has 0.")
    assert "the draft's alpha 0.00, c 0.10" in said
    found = to_json(study)["recommendation"]
    assert found["speculate"] is False and found["gateway_settings"] == {"num_draft_tokens": "0"}


def test_the_json_has_all_that_the_tables_have() -> None:
    study = studied()
    found = json.loads(json.dumps(to_json(study)))
    assert [point["k"] for point in found["speeds"]] == list(EVERY_K)
    assert found["alpha"] == pytest.approx(study.alpha)
    assert [drafter["name"] for drafter in found["drafters"]] == ["plain", "K = 4", "K = 4, lookup+model"]
    settings = found["recommendation"]["gateway_settings"]
    assert settings["num_draft_tokens"] == "4" and settings["drafter"] == "lookup+model"
    assert found["not_offered"] == {"K = 4, unigram": "no such thing"}


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
    ) -> TimedOutput:
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
    """What is measured beside theory, and the best K's drafters; what the gateway refuses is left out."""
    asked: list[list[str]] = []
    draws = random.Random(11)
    texts = [moods(draws) for _ in range(30)]

    async def measured(
        client: Any, load: Workload, wishes: Mapping[str, Speculation], repeats: range, done: Any
    ) -> dict[str, list[Pass]]:
        asked.append(list(wishes))
        found = {}
        for name, wish in wishes.items():
            k = wish.num_draft_tokens if isinstance(wish.num_draft_tokens, int) and wish.enabled else 0
            found[name] = [one_pass(k, texts) for _ in repeats]
        return found

    async def led_in(client: Any, load: Workload, wish: Speculation) -> None:
        if wish.drafter == Drafter.LOOKUP:
            raise InvalidRequest("no lookup here")

    monkeypatch.setattr(study_module, "run_interleaved", measured)
    monkeypatch.setattr(study_module, "lead_in", led_in)
    load = Workload(["a"], MAX_TOKENS, {"temperature": 0.0}, "model", 1.0, StopFlag())
    offered = [Drafter.MODEL, Drafter.LOOKUP]
    found = asyncio.run(study_module.study_pair(cast(Any, None), load, offered, 12, 2, lambda text: None))
    assert [point.k for point in found.points] == list(EVERY_K) and found.points[0].speedup.median == 1.0
    assert found.points[4].paper_speedup == pytest.approx(improvement(found.alpha, 4, 0.1))
    best = max(found.points, key=lambda point: point.tokens_per_s).k
    assert asked[0] == [chain_name(k) for k in EVERY_K] and asked[1] == ["plain", "K = auto", chain_name(best)]
    assert found.refused == {f"K = {k}, lookup": "no lookup here" for k in {best, 8}}
    assert found.choice.name == chain_name(best)


# ---- settings


def test_a_setting_is_told_to_the_gateway_in_full() -> None:
    assert list(compared_drafters(4, 12, 1.0, [])) == ["plain", "K = auto", "K = 4"]
    sampled = {"num_draft_tokens": "4", "drafter": "model", "acceptance": "rejection", "draft_logprobs": "auto"}
    assert gateway_settings(chain(4, 1.0)) == sampled
    assert gateway_settings(chain(0, 1.0)) == {"num_draft_tokens": "0"}
    greedy = {"num_draft_tokens": "33", "max_draft_tokens": "33", "drafter": "model"}
    assert gateway_settings(chain(33, 0.0)) == greedy
    assert environment({"num_draft_tokens": "4", "acceptance": "coupled"}) == (
        "OUTRIDER_GATEWAY_NUM_DRAFT_TOKENS=4 OUTRIDER_GATEWAY_ACCEPTANCE=coupled"
    )
