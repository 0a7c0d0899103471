"""What `outrider tune --price` says of three ways to place a pair, of figures whose answer is known."""

import io
import json

import pytest
from rich.console import Console

from outrider.lab.load.figures import LoadFigures, RequestBatch
from outrider.lab.tuning.money import COLOCATED, NGRAM, SPLIT, Money, Price, money_to_json, show_money
from tests.unit.outrider.lab.load.turns import REFUSED, turns

PRICE = Price(target=2.0, draft=0.5)


def rung(concurrency: int, plain_s: list[float], drafted_s: list[float]) -> LoadFigures:
    return LoadFigures.of(concurrency, turns(drafted_s), turns(plain_s))


MONEY = Money(
    {
        SPLIT: [rung(1, [2.0] * 6, [1.0] * 6), rung(4, [1.2] * 6, [1.0] * 6), rung(8, [1.0] * 6, [2.0] * 6)],
        COLOCATED: [rung(1, [1.5] * 6, [1.0] * 6), rung(4, [1.1] * 6, [1.0] * 6), rung(8, [1.0] * 6, [1.1] * 6)],
    },
    PRICE,
)


def test_the_draft_costs_its_own_device_and_none_on_the_targets() -> None:
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


def test_an_unclear_difference_is_no_win_of_plain() -> None:
    few, noisy = rung(1, [2.0] * 4, [1.0] * 4), rung(4, [1.0, 2.0] * 3, [2.0, 1.0] * 3)
    failed = LoadFigures.of(8, [RequestBatch((REFUSED,))], turns([1.0]))
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
