"""What an hour's money buys: the target alone, plain and with n-grams, its draft on the same device, and on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from outrider.client import Drafter
from outrider.lab.load.figures import ArmFigures, Gain, RungFigures
from outrider.lab.load.plot import Arms
from outrider.lab.tuning.report import table_of
from outrider.lab.tuning.settings import PLAIN
from outrider.wire.errors import ConfigError

SPLIT, NGRAM, COLOCATED = "split", Drafter.NGRAM.value, "colocated"
HOUR_S = 3600.0
_FORM = "write --price target=2.5,draft=0.4: what an hour of each one's device costs, above 0, in any currency"


@dataclass(frozen=True, slots=True)
class Price:
    """Of an hour of each role's device, in any currency; greater than 0."""

    target: float
    draft: float

    @classmethod
    def read(cls, text: str) -> Price:
        """Raises ConfigError."""
        found = dict[str, float]()
        for part in text.split(","):
            role, _, value = part.partition("=")
            try:
                found[role.strip()] = float(value)
            except ValueError:
                raise ConfigError(f"--price has {part!r}; {_FORM}") from None
        once = text.count(",") == 1 and found.keys() == {"target", "draft"}
        if not once or not all(0 < each < float("inf") for each in found.values()):
            raise ConfigError(f"--price is {text!r}; {_FORM}")
        return cls(**found)

    def of(self, deployment: str) -> float:
        return self.target + self.draft if deployment == SPLIT else self.target


@dataclass(frozen=True)
class Bought:
    """What each deployment makes at one concurrency."""

    concurrency: int
    plain_tokens_per_s: float
    gains: Mapping[str, Gain | None]
    """By deployment: its tokens per second over those of plain decoding, in turns of the same run."""
    price: Price

    def for_money(self, deployment: str) -> Gain | None:
        """Return its tokens for the same money over those of plain decoding; None where something failed."""
        gain = self.gains[deployment]
        return None if gain is None else gain.times(self.price.target / self.price.of(deployment))

    def tokens_per_money(self, deployment: str) -> float | None:
        """Return the tokens for 1 of money; None where something failed."""
        gain = Gain(1.0, None) if deployment == PLAIN else self.for_money(deployment)
        return None if gain is None else gain.ratio * HOUR_S * self.plain_tokens_per_s / self.price.target

    @property
    def worth(self) -> dict[str, Gain]:
        """Return what each deployment makes for the money, but for those where something failed."""
        return {name: each for name in self.gains if (each := self.for_money(name)) is not None}

    @property
    def cheapest(self) -> list[str]:
        """Return what makes the most tokens for the money, ahead of plain decoding beyond noise, and with it each whose
        interval reaches into its own; plain decoding where it is itself ahead of all others; nothing where nobody can
        say.
        """
        worth = self.worth
        ahead = [(gain.ratio, gain.interval[0]) for gain in worth.values() if gain.pays and gain.interval]
        if not ahead:
            return [PLAIN] if worth and all(gain.pays is False for gain in worth.values()) else []
        _, least = max(ahead)
        found = [name for name, gain in worth.items() if gain.interval and gain.interval[1] >= least]
        return sorted(found, key=lambda name: -worth[name].ratio)

    @property
    def fair_draft_price(self) -> float | None:
        """Return up to which price of the draft's device the split makes as many tokens for the money as plain
        decoding, 0 where it does at none; None where nobody can say, or something failed.
        """
        gain = self.gains[SPLIT]
        return None if gain is None or gain.pays is None else max(0.0, self.price.target * (gain.ratio - 1))


@dataclass(frozen=True)
class Money:
    """All that was measured for it."""

    ladders: Mapping[str, Sequence[RungFigures]]
    """By deployment, of the same concurrencies."""
    price: Price

    @property
    def rows(self) -> list[Bought]:
        """Return one of each concurrency."""
        return [
            Bought(
                own[0].concurrency,
                own[0].arms["without"].tokens_per_s,
                {name: rung.gain for name, rung in zip(self.ladders, own, strict=True)},
                self.price,
            )
            for own in zip(*self.ladders.values(), strict=True)
        ]

    @property
    def concurrencies(self) -> list[int]:
        return [row.concurrency for row in self.rows]

    @property
    def arms(self) -> Arms:
        """Return the figures of each deployment, and of plain decoding in turn with it."""
        found = dict[str, list[ArmFigures]]()
        for name, rungs in self.ladders.items():
            found[name] = [rung.arms["with"] for rung in rungs]
            found[f"{PLAIN}, {name}"] = [rung.arms["without"] for rung in rungs]
        return found


def tables(rows: Sequence[Bought]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, columns and lines of both tables."""
    names = list(rows[0].gains)
    speeds = [
        [str(row.concurrency), f"{row.plain_tokens_per_s:.1f}", *(_shown(gain) for gain in row.gains.values())]
        for row in rows
    ]
    yield "Tokens/s of plain decoding, and those over it (95 %)", ["at once", PLAIN, *names], speeds
    tokens = [[str(row.concurrency), *(_bought(row, name) for name in (PLAIN, *names)), _fair(row)] for row in rows]
    yield "Thousands of tokens for 1 of money", ["at once", PLAIN, *names, "draft's fair price"], tokens


def show_money(money: Money, commands: Mapping[str, str], console: Console) -> None:
    """Print tables, what is the cheapest at each concurrency, and what to type for it. commands: by deployment."""
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
    for sentence in verdicts(money.rows):
        console.print(sentence, markup=False, soft_wrap=not console.is_terminal)
    cheapest = {name for row in money.rows for name in row.cheapest}
    for name in (each for each in commands if each in cheapest):
        console.print(f"{name}: {commands[name]}", markup=False, soft_wrap=not console.is_terminal)


def verdicts(rows: Sequence[Bought]) -> Iterator[str]:
    """Yield what is the cheapest at each concurrency, in sentences."""
    for row in rows:
        worth, cheapest, count = row.worth, row.cheapest, f"{row.concurrency} at once"
        best = max(worth, key=lambda name: worth[name].ratio, default=None)
        if best is None:
            yield f"{count}: no answer was whole, with speculation or without"
        elif not cheapest:
            made = f"{worth[best]} times plain's tokens"
            yield f"{count}: plain and {best} are not told apart, {made}; give more --seconds"
        elif cheapest == [PLAIN]:
            yield f"{count}: plain wins; {best} makes {worth[best]} times its tokens for the money"
        else:
            win = "wins" if len(cheapest) == 1 else "are not told apart and win"
            each = ", ".join(str(worth[name]) for name in cheapest)
            yield f"{count}: {' and '.join(cheapest)} {win} with {each} times plain's tokens for the money"


def money_to_json(money: Money) -> dict[str, Any]:
    """Return all of it, times in seconds."""
    return {
        "price": asdict(money.price),
        "loads": [
            {
                "concurrency": row.concurrency,
                "plain_tokens_per_s": row.plain_tokens_per_s,
                "gains": {name: None if gain is None else asdict(gain) for name, gain in row.gains.items()},
                "tokens_per_money": {name: row.tokens_per_money(name) for name in (PLAIN, *row.gains)},
                "cheapest": row.cheapest,
                "fair_draft_price": row.fair_draft_price,
            }
            for row in money.rows
        ],
        "arms": {name: [asdict(arm) for arm in arms] for name, arms in money.arms.items()},
    }


def _shown(gain: Gain | None) -> str:
    return "failed" if gain is None else str(gain)


def _bought(row: Bought, deployment: str) -> str:
    tokens = row.tokens_per_money(deployment)
    return "failed" if tokens is None else f"{1e-3 * tokens:.0f}"


def _fair(row: Bought) -> str:
    if row.fair_draft_price is None:
        return "failed" if row.gains[SPLIT] is None else "unknown"
    return f"{row.fair_draft_price:.2f}" if row.fair_draft_price else "none"
