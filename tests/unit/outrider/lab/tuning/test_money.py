"""What `outrider tune --price` says of three ways to place a pair, of figures whose answer is known."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from outrider.lab.load.figures import Gain, LoadFigures, Turn
from outrider.lab.load.load import RequestOutcome
from outrider.lab.tuning.deployments import deployments_of, settings_of, with_cache
from outrider.lab.tuning.money import COLOCATED, NGRAM, SPLIT, Money, Price, money_to_json, show_money

ROLES = list(enumerate(("target", "draft")))
PRICE = Price(target=2.0, draft=0.5)


REFUSED = RequestOutcome(0.0, None, 0.1, 429, "1")


def turns(seconds: list[float]) -> list[Turn]:
    return [Turn((RequestOutcome(0.0, 0.1, each, 200, None, None, {"completion_tokens": 10}),)) for each in seconds]


def rung(concurrency: int, plain_s: list[float], drafted_s: list[float]) -> LoadFigures:
    return LoadFigures.of(concurrency, turns(drafted_s), turns(plain_s))


def test_the_gain_is_of_the_same_turns() -> None:
    """The machine is three times as slow in some turns: it is so on both sides, and no noise of the ratio."""
    plain = [3.0, 1.0, 3.0, 1.0, 1.0, 3.0]
    gain = Gain.of(turns([each / 2 for each in plain]), turns(plain))
    assert gain is not None and gain.interval is not None and gain.is_ahead
    assert (gain.ratio, *gain.interval) == pytest.approx((2.0, 2.0, 2.0))


def test_an_interval_on_both_sides_of_one_is_neither_ahead_nor_behind() -> None:
    gain = Gain.of(turns([1.0, 2.0, 1.0, 2.0, 1.0, 2.0]), turns([2.0, 1.0, 2.0, 1.0, 2.0, 1.0]))
    assert gain is not None and gain.interval is not None
    assert gain.interval[0] < gain.ratio == 1.0 < gain.interval[1] and not gain.is_ahead and not gain.is_behind


def test_few_turns_have_no_interval_and_no_answers_no_ratio() -> None:
    few = Gain.of(turns([1.0] * 4), turns([2.0] * 4))
    assert few == Gain(2.0, None) and not few.is_ahead
    assert Gain.of(turns([1.0]), [Turn((REFUSED,))]) is None


MONEY = Money(
    {
        SPLIT: [
            rung(1, [2.0] * 6, [1.0] * 6),
            rung(4, [1.2] * 6, [1.0] * 6),
            rung(8, [1.0] * 6, [2.0] * 6),
        ],
        COLOCATED: [
            rung(1, [1.5] * 6, [1.0] * 6),
            rung(4, [1.1] * 6, [1.0] * 6),
            rung(8, [1.0] * 6, [1.1] * 6),
        ],
    },
    PRICE,
)


def test_the_draft_costs_its_own_device_and_none_beside_the_target() -> None:
    one, four, eight = MONEY.rows
    gains = [one.for_money(name) for name in (SPLIT, COLOCATED)]
    assert [gain and gain.ratio for gain in gains] == pytest.approx([2.0 * 2.0 / 2.5, 1.5])
    assert [row.cheapest for row in (one, four, eight)] == [[SPLIT], [COLOCATED], ["plain"]]
    assert one.tokens_per_money("plain") == pytest.approx(one.plain_tokens_per_s * 3600 / 2.0)
    assert one.tokens_per_money(SPLIT) == pytest.approx(2.0 * one.plain_tokens_per_s * 3600 / 2.5)
    assert one.fair_draft_price == pytest.approx(2.0) and four.fair_draft_price == pytest.approx(0.4)
    assert eight.fair_draft_price == 0


def test_tables_fit_80_columns_and_what_wins_is_there_to_type() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    commands = {"plain": "outrider up --no-draft", SPLIT: "outrider up", NGRAM: "n-grams", COLOCATED: "outrider up"}
    show_money(Money({**MONEY.ladders, NGRAM: [rung(1, [0.5, 1.0] * 3, [1.0] * 6)] * 3}, PRICE), commands, console)
    text = console.export_text()
    assert "\nplain: outrider up --no-draft\n" in text and "n-grams\n" not in text
    assert "…" not in text and all(len(line) <= 80 for line in text.splitlines() if "│" in line)


def test_what_is_not_told_apart_is_no_win_of_plain() -> None:
    few, noisy = rung(1, [2.0] * 4, [1.0] * 4), rung(4, [1.0, 2.0] * 3, [2.0, 1.0] * 3)
    failed = LoadFigures.of(8, [Turn((REFUSED,))], turns([1.0]))
    rows = Money({SPLIT: [few, noisy, failed]}, PRICE).rows
    assert [(row.cheapest, row.fair_draft_price) for row in rows] == [([], None)] * 3


def test_of_two_that_pay_the_better_wins_beyond_noise_alone() -> None:
    steady, noisy = rung(1, [1.5] * 6, [1.0] * 6), rung(1, [2.0] * 6, [1.0, 1.1] * 3)
    (row,) = Money({SPLIT: [noisy], NGRAM: [steady], COLOCATED: [rung(1, [1.2] * 6, [1.0] * 6)]}, PRICE).rows
    assert row.cheapest == [SPLIT, NGRAM]
    wide = rung(1, [0.5, 2.0] * 3, [1.0] * 6)  # may be behind plain, and far ahead of the split
    assert Money({SPLIT: [rung(1, [1.4] * 6, [1.0] * 6)], NGRAM: [wide]}, PRICE).rows[0].cheapest == [NGRAM, SPLIT]


def test_the_json_has_what_wins() -> None:
    found = json.loads(json.dumps(money_to_json(MONEY)))
    assert [load["cheapest"] for load in found["loads"]] == [[SPLIT], [COLOCATED], ["plain"]]


def test_both_caches_hold_all_requests_wherever_the_pair_is() -> None:
    """Without it the worker that loads first on one GPU would take nine tenths of what is free."""
    asked = {role: {"model": "a", "device": f"cuda:{index}", "dtype": None, "cpu_cores": None} for index, role in ROLES}
    found = deployments_of(with_cache(asked, ["four", "größer"], 96, 16))
    sizes = {each.worker.kv_cache_tokens for own in found.values() for each in settings_of(own).pools}
    assert sizes == {16 * (8 + 96 + 512)}


def test_the_draft_is_put_on_the_targets_cores() -> None:
    asked = {
        "target": {"model": "a", "device": "cpu", "dtype": None, "cpu_cores": "0"},
        "draft": {"model": "b", "device": None, "dtype": None, "cpu_cores": "1"},
    }
    found = deployments_of(asked)
    assert found[SPLIT] == asked
    assert {role: own["cpu_cores"] for role, own in found[COLOCATED].items()} == {"target": "0", "draft": "0"}
    assert found[COLOCATED]["draft"]["device"] == "cpu"
