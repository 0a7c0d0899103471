"""Output tokens for the money under load, compared between deployments: the target alone (plain or with n-grams), with
its draft on a separate device, and with its draft on the target's device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from outrider.client import Drafter
from outrider.lab.load.figures import Gain, LoadFigures
from outrider.lab.tuning.report import table_of
from outrider.lab.tuning.settings import PLAIN
from outrider.wire.errors import ConfigError

SPLIT = "split"
NGRAM = Drafter.NGRAM.value
COLOCATED = "colocated"
"""Names of the deployments that are compared with plain decoding. SPLIT has the draft on a device of its own, NGRAM is
the target alone with n-grams, and COLOCATED has the draft on the target's device."""
HOUR_S = 3600.0
_FORM = "write --price target=2.5,draft=0.4: what an hour of each one's device costs, above 0, in any currency"


@dataclass(frozen=True, slots=True)
class Price:
    """Price per hour of the target's and of the draft's device, in any currency. Both are greater than 0."""

    target: float
    draft: float

    @classmethod
    def parse(cls, text: str) -> Price:
        """Parse the prices per hour of both devices, such as `target=2.5,draft=0.4`. Raises ConfigError unless both are
        given and above 0.
        """
        prices = dict[str, float]()
        for part in text.split(","):
            role, _, value = part.partition("=")
            try:
                prices[role.strip()] = float(value)
            except ValueError:
                raise ConfigError(f"--price has {part!r}; {_FORM}") from None
        is_complete = text.count(",") == 1 and prices.keys() == {"target", "draft"}
        if not is_complete or not (0 < prices["target"] < math.inf and 0 < prices["draft"] < math.inf):
            raise ConfigError(f"--price is {text!r}; {_FORM}")
        return cls(**prices)

    def of(self, deployment: str) -> float:
        """Return the price per hour of the deployment SPLIT, NGRAM or COLOCATED: of both devices for SPLIT, otherwise
        of the target's device.
        """
        if deployment == SPLIT:
            return self.target + self.draft
        return self.target


@dataclass(frozen=True)
class LoadPrices:
    """Speeds and prices of all deployments at one number of concurrent requests."""

    concurrency: int
    """Number of requests that ran at a time."""
    plain_tokens_per_s: float
    """Output tokens per second of plain decoding."""
    gains: Mapping[str, Gain | None]
    """For each deployment by name, its tokens per second divided by those of plain decoding, which was measured in
    alternation with it. None = no request with speculation, or none without, gave a complete output."""
    price: Price

    def for_money(self, deployment: str) -> Gain | None:
        """Return the tokens that a deployment makes per unit of money, divided by the tokens that plain decoding makes
        per unit of money. None = the deployment's speed is unknown because requests failed.
        """
        gain = self.gains[deployment]
        if gain is None:
            return None
        return gain.times(self.price.target / self.price.of(deployment))

    def tokens_per_money(self, deployment: str) -> float | None:
        """Return the number of tokens that a deployment, or plain decoding (PLAIN), makes per unit of currency; None =
        requests failed.
        """
        plain_tokens = HOUR_S * self.plain_tokens_per_s / self.price.target
        if deployment == PLAIN:
            return plain_tokens
        gain = self.for_money(deployment)
        if gain is None:
            return None
        return gain.ratio * plain_tokens

    @property
    def gains_for_money(self) -> dict[str, Gain]:
        """Tokens per unit of money relative to plain decoding, by deployment; without those whose requests failed."""
        gains = dict[str, Gain]()
        for name in self.gains:
            gain = self.for_money(name)
            if gain is not None:
                gains[name] = gain
        return gains

    @property
    def cheapest(self) -> list[str]:
        """Names of the deployments that make the most tokens for the money, best first: the best that beats plain
        decoding beyond noise, and all whose confidence intervals overlap with its interval.

        [PLAIN] = plain decoding beats every deployment beyond noise. Empty = the noise is too large to tell.
        """
        gains = self.gains_for_money
        ahead = list[Gain]()
        num_behind = 0
        for gain in gains.values():
            num_behind += gain.is_behind
            if gain.is_ahead:
                ahead.append(gain)
        if ahead:
            return _indistinguishable(gains, max(ahead, key=_ratio_of))
        if gains and num_behind == len(gains):
            return [PLAIN]
        return []

    @property
    def fair_draft_price(self) -> float | None:
        """Price per hour of the draft's device at which the pair on two devices makes as many tokens for the money as
        plain decoding.

        0 = the pair is slower than plain decoding, so that no price is low enough. None = the difference is within the
        noise, or requests failed.
        """
        gain = self.gains[SPLIT]
        if gain is None or not (gain.is_ahead or gain.is_behind):
            return None
        return max(0.0, self.price.target * (gain.ratio - 1))


def _ratio_of(gain: Gain) -> float:
    return gain.ratio


def _indistinguishable(gains: Mapping[str, Gain], best: Gain) -> list[str]:
    # best 1.60 (1.52-1.67): 1.50 (1.45-1.55) does not differ clearly, 1.40 (1.38-1.42) is behind
    assert best.interval is not None
    names = list[str]()
    for name, gain in gains.items():
        if gain.interval is not None and gain.interval[1] >= best.interval[0]:
            names.append(name)
    return sorted(names, key=lambda name: -gains[name].ratio)


@dataclass(frozen=True)
class Money:
    """Speeds of all deployments under load, and the prices of their devices."""

    ladders: Mapping[str, Sequence[LoadFigures]]
    """ladders[name][i]: figures of the deployment `name` at the i-th concurrency. All deployments have the same
    concurrencies."""
    price: Price

    @property
    def rows(self) -> list[LoadPrices]:
        """Speeds and prices of all deployments, one entry per concurrency."""
        rows = list[LoadPrices]()
        for figures in zip(*self.ladders.values(), strict=True):
            gains = dict[str, Gain | None]()
            for name, own in zip(self.ladders, figures, strict=True):
                gains[name] = own.gain
            rows.append(LoadPrices(figures[0].concurrency, figures[0].plain_tokens_per_s, gains, self.price))
        return rows


def tables(rows: Sequence[LoadPrices]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield (title, column names, lines of cells) of two tables: speeds, and tokens for the money."""
    names = list(rows[0].gains)
    speeds = list[list[str]]()
    tokens = list[list[str]]()
    for row in rows:
        speed_line = [str(row.concurrency), f"{row.plain_tokens_per_s:.1f}"]
        token_line = [str(row.concurrency), _tokens_cell(row, PLAIN)]
        for name in names:
            speed_line.append(_gain_cell(row.gains[name]))
            token_line.append(_tokens_cell(row, name))
        speeds.append(speed_line)
        tokens.append([*token_line, _fair_price_cell(row)])
    yield "Tokens/s of plain decoding, and those over it (95 %)", ["at once", PLAIN, *names], speeds
    yield "Thousands of tokens for 1 of money", ["at once", PLAIN, *names, "draft's fair price"], tokens


def _gain_cell(gain: Gain | None) -> str:
    return str(gain or "failed")


def _tokens_cell(row: LoadPrices, deployment: str) -> str:
    tokens = row.tokens_per_money(deployment)
    if tokens is None:
        return "failed"
    return f"{1e-3 * tokens:.0f}"


def _fair_price_cell(row: LoadPrices) -> str:
    if row.gains[SPLIT] is None:
        return "failed"
    if row.fair_draft_price is None:
        return "unknown"
    if row.fair_draft_price == 0:
        return "none"
    return f"{row.fair_draft_price:.2f}"


def show_money(money: Money, commands: Mapping[str, str], console: Console) -> None:
    """Print the tables and the cheapest deployments at each concurrency, then the commands that start these
    deployments.

    commands: command that starts a deployment, by the deployment's name.
    """
    for title, columns, lines in tables(money.rows):
        table = table_of(title, *columns)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    console.print(
        "plain: the target without any drafts; split: its draft on a device of its own; ngram: n-grams of the target's "
        "own, without a draft worker; colocated: the draft on the target's device; K auto in all. Fair price: of an "
        "hour of the draft's device, at which the split is as cheap as plain.",
        style="dim",
    )
    cheapest = set[str]()
    for row in money.rows:
        console.print(conclusion(row), markup=False, soft_wrap=not console.is_terminal)
        cheapest.update(row.cheapest)
    for name, command in commands.items():
        if name in cheapest:
            console.print(f"{name}: {command}", markup=False, soft_wrap=not console.is_terminal)


def conclusion(row: LoadPrices) -> str:
    """Return a sentence that names the cheapest deployments at one concurrency, or says that none can be named."""
    gains = row.gains_for_money
    cheapest = row.cheapest
    at_once = f"{row.concurrency} at once"
    if not gains:
        return f"{at_once}: no answer was whole, with speculation or without"
    best = max(gains, key=lambda name: gains[name].ratio)
    if not cheapest:
        return (
            f"{at_once}: plain and {best} do not differ clearly, {gains[best]} times plain's tokens; "
            "give more --seconds"
        )
    if cheapest == [PLAIN]:
        return f"{at_once}: plain wins; {best} makes {gains[best]} times its tokens for the money"
    ratios = ", ".join(str(gains[name]) for name in cheapest)
    win = "wins"
    if len(cheapest) > 1:
        win = "do not differ clearly and win"
    return f"{at_once}: {' and '.join(cheapest)} {win} with {ratios} times plain's tokens for the money"


def money_to_json(money: Money) -> dict[str, Any]:
    """Return prices, speeds and the conclusions from them as a JSON object."""
    return {"price": asdict(money.price), "loads": list(map(_row_to_json, money.rows))}


def _row_to_json(row: LoadPrices) -> dict[str, Any]:
    gains = dict[str, Any]()
    tokens_per_money = {PLAIN: row.tokens_per_money(PLAIN)}
    for name, gain in row.gains.items():
        gains[name] = gain and asdict(gain)
        tokens_per_money[name] = row.tokens_per_money(name)
    return {
        "concurrency": row.concurrency,
        "plain_tokens_per_s": row.plain_tokens_per_s,
        "gains": gains,
        "tokens_per_money": tokens_per_money,
        "cheapest": row.cheapest,
        "fair_draft_price": row.fair_draft_price,
    }
