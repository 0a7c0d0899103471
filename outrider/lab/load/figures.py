"""Tokens per second under load with speculation and without, and their ratio with a confidence interval."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lab.load.load import RequestOutcome

NUM_RESAMPLES = 2000
"""Number of resamples of a bootstrap. With so many, the ends of an interval change from run to run by less than the
last digit that is shown."""
MIN_BATCHES = 5
"""Minimum number of turns for an interval. Four turns have only 35 different resamples, too few for a 95 % interval."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of the values: the value below which the fraction `share` (0 to 1) of them lies. NaN = there
    are no values.
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Batch:
    """A batch of requests that ran concurrently, either all with speculation or all without."""

    outcomes: tuple[RequestOutcome, ...]
    """The requests and their outcomes, in the order in which they ended."""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens in all complete outputs of the turn."""
        num_tokens = 0
        for outcome in self.outcomes:
            if outcome.is_complete:
                num_tokens += outcome.num_tokens
        return num_tokens

    @property
    def elapsed_s(self) -> float:
        """Seconds from the sending of the first request to the end of the last."""
        return max(outcome.ended_s for outcome in self.outcomes) - min(outcome.sent_s for outcome in self.outcomes)


def tokens_per_s(batches: Sequence[Batch]) -> float:
    """Return the number of tokens in complete outputs divided by the seconds of the turns; 0 if no time passed."""
    elapsed_s = 0.0
    num_tokens = 0
    for batch in batches:
        elapsed_s += batch.elapsed_s
        num_tokens += batch.num_tokens
    if not elapsed_s:
        return 0.0
    return num_tokens / elapsed_s


@dataclass(frozen=True)
class Gain:
    """Ratio of tokens per second with speculation to those without, with a 95 % interval by a bootstrap over turns.

    Each turn is run with speculation and without, with the same requests, one directly after the other. A resample
    draws such pairs of turns as a whole. So a disturbance of the machine affects both sides of the ratio, and requests
    that ran concurrently count as one observation.
    """

    ratio: float
    interval: tuple[float, float] | None
    """(lower, upper) end of the 95 % interval of the ratio; None = there were fewer turns than MIN_TURNS."""

    @classmethod
    def of(cls, speculative: Sequence[Batch], plain: Sequence[Batch]) -> Gain | None:
        """Return the gain of the turns with speculation over the plain turns. Batch i of both lists must have the same
        requests.

        None = one side has no complete output.
        """
        if not tokens_per_s(speculative) or not tokens_per_s(plain):
            return None
        ratio = tokens_per_s(speculative) / tokens_per_s(plain)
        if len(plain) < MIN_BATCHES:
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
        """Return a gain whose ratio and interval are multiplied by a factor."""
        if self.interval is None:
            return Gain(factor * self.ratio, None)
        return Gain(factor * self.ratio, (factor * self.interval[0], factor * self.interval[1]))

    @property
    def is_ahead(self) -> bool:
        """Whether speculation makes more tokens per second: the whole interval is above 1."""
        return self.interval is not None and self.interval[0] > 1

    @property
    def is_behind(self) -> bool:
        """Whether speculation makes fewer tokens per second: the whole interval is below 1."""
        return self.interval is not None and self.interval[1] < 1


@dataclass(frozen=True)
class LoadFigures:
    """Speeds that were measured at one concurrency."""

    concurrency: int
    """Number of requests that ran at a time."""
    plain_tokens_per_s: float
    """Output tokens per second of all requests together, without speculation."""
    gain: Gain | None
    """Speed with speculation relative to that without; None = one side has no complete output."""

    @classmethod
    def of(cls, concurrency: int, speculative: Sequence[Batch], plain: Sequence[Batch]) -> LoadFigures:
        """Return the figures for the turns with speculation and the plain turns at one concurrency."""
        return cls(concurrency, tokens_per_s(plain), Gain.of(speculative, plain))
