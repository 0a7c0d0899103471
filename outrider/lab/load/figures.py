"""Tokens per second under load with speculation and without, and their ratio with a confidence interval."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lab.load.load import RequestOutcome

NUM_RESAMPLES = 2000
"""Number of resamples of the bootstrap that gives the interval of a Gain. With this many, chance changes the ends of
the interval by less than the last digit that is shown."""
MIN_BATCHES = 5
"""Minimum number of pairs of batches (one with speculation, one without) for which a Gain has an interval. Four pairs
have only 35 different resamples, too few for a 95 % interval."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which the fraction `share` (0 to 1) of `values` lies. It is NaN if there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class RequestBatch:
    """A batch of requests that ran concurrently, either all with speculation or all without."""

    outcomes: tuple[RequestOutcome, ...]
    """Outcomes of the requests of this batch, in the order in which the requests ended."""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens of the batch. Only complete outputs count."""
        num_tokens = 0
        for outcome in self.outcomes:
            if outcome.is_complete:
                num_tokens += outcome.num_tokens
        return num_tokens

    @property
    def elapsed_s(self) -> float:
        """Seconds from the moment at which the first request was sent to the end of the last request."""
        return max(outcome.ended_s for outcome in self.outcomes) - min(outcome.sent_s for outcome in self.outcomes)


def tokens_per_s(batches: Sequence[RequestBatch]) -> float:
    """Return the output tokens per second over all batches: the tokens of complete outputs, divided by the sum of the
    batches' times. It is 0 if no time passed.
    """
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
    """Ratio of the tokens per second with speculation to those without, with a 95 % interval by a bootstrap.

    The same requests run once with speculation and once without, one batch directly after the other. The bootstrap
    resamples these pairs of batches. So a disturbance of the machine affects both sides of the ratio, and requests that
    ran concurrently count as one observation.
    """

    ratio: float
    interval: tuple[float, float] | None
    """95 % confidence interval (lower, upper) of the ratio. None if there were fewer than MIN_BATCHES pairs of
    batches."""

    @classmethod
    def of(cls, speculative: Sequence[RequestBatch], plain: Sequence[RequestBatch]) -> Gain | None:
        """Return the gain of the batches with speculation over the plain batches. Batch i of both lists must have the
        same requests.

        None = one of the two lists has no complete output.
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
        """Return a gain whose ratio and interval are those of this gain, multiplied by a factor."""
        if self.interval is None:
            return Gain(factor * self.ratio, None)
        return Gain(factor * self.ratio, (factor * self.interval[0], factor * self.interval[1]))

    @property
    def is_ahead(self) -> bool:
        """Whether speculation is faster beyond noise: the whole interval is above 1. False if there is no interval."""
        return self.interval is not None and self.interval[0] > 1

    @property
    def is_behind(self) -> bool:
        """Whether speculation is slower beyond noise: the whole interval is below 1. False if there is no interval."""
        return self.interval is not None and self.interval[1] < 1


@dataclass(frozen=True)
class LoadFigures:
    """Output tokens per second with and without speculation, measured at one number of concurrent requests."""

    concurrency: int
    """Number of requests that ran at a time."""
    plain_tokens_per_s: float
    """Output tokens per second of all requests together, without speculation."""
    gain: Gain | None
    """Tokens per second with speculation divided by `plain_tokens_per_s`. None if no output with speculation, or none
    without, was complete."""

    @classmethod
    def of(cls, concurrency: int, speculative: Sequence[RequestBatch], plain: Sequence[RequestBatch]) -> LoadFigures:
        """Return the figures of one concurrency. speculative, plain: the batches with speculation and without; batch i
        of both has the same requests.
        """
        return cls(concurrency, tokens_per_s(plain), Gain.of(speculative, plain))
