"""Tokens per second of a load with speculation and without, and their ratio with its interval."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lab.load.load import RequestOutcome

NUM_RESAMPLES = 2000
"""Resamples of a bootstrap: the ends of an interval change by less than the last digit shown from run to run."""
MIN_TURNS = 5
"""Fewest turns that have an interval: of four there are 35 different resamples, and the outermost is 1 in 35."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of them lies, or NaN where there is none. share: 0 to 1."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Turn:
    """Requests that ran beside one another, all with speculation or all without."""

    asked: tuple[RequestOutcome, ...]
    """The requests, in order of their ends."""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens of the complete outputs."""
        num_tokens = 0
        for outcome in self.asked:
            if outcome.whole:
                num_tokens += outcome.num_tokens
        return num_tokens

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first request to the end of the last."""
        return max(outcome.ended_s for outcome in self.asked) - min(outcome.sent_s for outcome in self.asked)


def tokens_per_s(turns: Sequence[Turn]) -> float:
    """Return the tokens of complete outputs over the time of the turns; 0 where no time passed."""
    elapsed_s = 0.0
    num_tokens = 0
    for turn in turns:
        elapsed_s += turn.elapsed_s
        num_tokens += turn.num_tokens
    if not elapsed_s:
        return 0.0
    return num_tokens / elapsed_s


@dataclass(frozen=True)
class Gain:
    """Tokens per second with speculation over those without, with the 95 % interval of a bootstrap over turns.

    Both sides run each turn with the same requests, one directly after the other. A resample draws whole turns, so that
    a disturbance of the machine is on both sides of the ratio, and requests that ran beside one another count as one
    observation.
    """

    ratio: float
    interval: tuple[float, float] | None
    """Ends of the interval; None for fewer turns than MIN_TURNS."""

    @classmethod
    def of(cls, speculative: Sequence[Turn], plain: Sequence[Turn]) -> Gain | None:
        """Return the gain of these turns, turn i of one side with the requests of turn i of the other.

        None where one side has no complete output.
        """
        if not tokens_per_s(speculative) or not tokens_per_s(plain):
            return None
        ratio = tokens_per_s(speculative) / tokens_per_s(plain)
        if len(plain) < MIN_TURNS:
            return cls(ratio, None)
        rng = random.Random(0)
        pairs = list(zip(speculative, plain, strict=True))
        ratios = list[float]()
        for _ in range(NUM_RESAMPLES):
            resample = zip(*rng.choices(pairs, k=len(pairs)), strict=True)
            drafted_tokens_per_s, plain_tokens_per_s = map(tokens_per_s, resample)
            if plain_tokens_per_s:
                ratios.append(drafted_tokens_per_s / plain_tokens_per_s)
        return cls(ratio, (quantile(ratios, 0.025), quantile(ratios, 0.975)))

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.ratio:.2f}"
        return f"{self.ratio:.2f} ({self.interval[0]:.2f}-{self.interval[1]:.2f})"

    def times(self, factor: float) -> Gain:
        """Return the gain with its ratio and interval multiplied by a factor."""
        if self.interval is None:
            return Gain(factor * self.ratio, None)
        return Gain(factor * self.ratio, (factor * self.interval[0], factor * self.interval[1]))

    @property
    def is_ahead(self) -> bool:
        """Whether speculation makes more tokens per second, beyond noise."""
        return self.interval is not None and self.interval[0] > 1

    @property
    def is_behind(self) -> bool:
        """Whether speculation makes fewer tokens per second, beyond noise."""
        return self.interval is not None and self.interval[1] < 1


@dataclass(frozen=True)
class LoadFigures:
    """Speeds at one concurrency."""

    concurrency: int
    """Requests at a time."""
    plain_tokens_per_s: float
    """Output tokens per second of all requests together, without speculation."""
    gain: Gain | None
    """Speed with speculation over that without; None where one side has no complete output."""

    @classmethod
    def of(cls, concurrency: int, speculative: Sequence[Turn], plain: Sequence[Turn]) -> LoadFigures:
        """Return the figures of the turns of both sides."""
        return cls(concurrency, tokens_per_s(plain), Gain.of(speculative, plain))
