"""What a rung of the ladder comes to: tokens per second, latencies, what speculation did, and what it gained."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.lab.load.load import Asked

NUM_RESAMPLES = 2000
"""Resamples of a bootstrap. Doubling it moves an interval's ends by less than their last digit shown."""
LEAST_TURNS = 5
"""Fewest turns that have an interval: of four there are 35 different resamples, and the outermost is 1 in 35."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, or NaN without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


@dataclass(frozen=True)
class Turn:
    """Requests that one arm answered."""

    asked: tuple[Asked, ...]

    @property
    def whole(self) -> list[Asked]:
        return [each for each in self.asked if each.whole]

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.whole)

    @property
    def elapsed_s(self) -> float:
        return max(each.ended_s for each in self.asked) - min(each.sent_s for each in self.asked)


@dataclass(frozen=True)
class Percentiles:
    """Seconds; None where nothing was measured."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Percentiles:
        found = [quantile(values_s, share) if values_s else None for share in (0.5, 0.95, 0.99)]
        return cls(*found)


@dataclass(frozen=True)
class ArmFigures:
    """All turns of one arm of a rung."""

    num_requests: int
    num_failed: int
    faults: dict[str, int]
    tokens_per_s: float
    """Tokens of whole answers over the time of the turns."""
    tokens_per_s_per_user: float | None
    """1 over the median time per output token."""
    first_token_s: Percentiles
    token_s: Percentiles
    """Of each answer: the time from its first token to its end, over its tokens but the first."""
    answer_s: Percentiles
    acceptance_rate: float | None
    tokens_per_target_pass: float | None

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> ArmFigures:
        asked, whole = [each for turn in turns for each in turn.asked], [each for turn in turns for each in turn.whole]
        failed = [each for each in asked if not each.whole]
        faults = Counter(each.fault or "refused (429)" for each in failed)
        gaps_s = [(each.total_s - each.first_token_s) / (each.num_tokens - 1) for each in whole if each.num_tokens > 1]
        token_s = Percentiles.of(gaps_s)
        told = [each.usage["speculation"] for each in whole if each.usage and each.usage.get("speculation")]
        drafted = sum(usage["num_draft_tokens"] for usage in told)
        passes = sum(usage["num_rounds"] + usage["num_plain_steps"] for usage in told)
        return cls(
            num_requests=len(asked),
            num_failed=len(failed),
            faults=dict(faults.most_common()),
            tokens_per_s=_tokens_per_s(turns),
            tokens_per_s_per_user=1 / token_s.p50 if token_s.p50 else None,
            first_token_s=Percentiles.of([each.first_token_s for each in whole]),
            token_s=token_s,
            answer_s=Percentiles.of([each.total_s for each in whole]),
            acceptance_rate=sum(usage["num_accepted_tokens"] for usage in told) / drafted if drafted else None,
            tokens_per_target_pass=sum(each.num_tokens for each in whole) / passes if passes else None,
        )


@dataclass(frozen=True)
class Gain:
    """Tokens per second with speculation over those without, and the 95 % interval of a bootstrap over turns.

    Both arms take each turn with the same requests, one directly after the other: a resample draws whole turns, so
    that what befell a turn befalls both sides of the ratio, and requests that ran beside one another count as one fact.
    """

    ratio: float
    interval: tuple[float, float] | None
    """None of fewer turns than LEAST_TURNS."""

    @classmethod
    def of(cls, speculative: Sequence[Turn], plain: Sequence[Turn]) -> Gain | None:
        """None where an arm has no whole answer."""
        if not _tokens_per_s(speculative) or not _tokens_per_s(plain):
            return None
        ratio = _tokens_per_s(speculative) / _tokens_per_s(plain)
        if len(plain) < LEAST_TURNS:
            return cls(ratio, None)
        dice, ratios = random.Random(0), []
        for _ in range(NUM_RESAMPLES):
            drawn = dice.choices(range(len(plain)), k=len(plain))
            if below := _tokens_per_s([plain[index] for index in drawn]):
                ratios.append(_tokens_per_s([speculative[index] for index in drawn]) / below)
        return cls(ratio, (quantile(ratios, 0.025), quantile(ratios, 0.975)))

    def __str__(self) -> str:
        return f"{self.ratio:.2f}{self.bounds}"

    @property
    def bounds(self) -> str:
        """Return the interval as it stands behind the ratio, empty where there is none."""
        return f" ({self.interval[0]:.2f}-{self.interval[1]:.2f})" if self.interval else ""

    def times(self, factor: float) -> Gain:
        """Return what is gained where all that speculation makes counts so many times."""
        low_high = self.interval
        return Gain(factor * self.ratio, None if low_high is None else (factor * low_high[0], factor * low_high[1]))

    @property
    def pays(self) -> bool | None:
        """Whether there are more tokens per second with speculation; None where the interval says neither."""
        if self.interval is None or self.interval[0] <= 1 <= self.interval[1]:
            return None
        return self.ratio > 1


@dataclass(frozen=True)
class RungFigures:
    """One concurrency."""

    concurrency: int
    num_turns: int
    speculative: ArmFigures
    """With speculation; of a server that cannot be asked to leave it: as it answers."""
    plain: ArmFigures | None
    gain: Gain | None

    @classmethod
    def of(cls, concurrency: int, speculative: Sequence[Turn], plain: Sequence[Turn]) -> RungFigures:
        both = bool(plain)
        return cls(
            concurrency,
            len(speculative),
            ArmFigures.of(speculative),
            ArmFigures.of(plain) if both else None,
            Gain.of(speculative, plain) if both else None,
        )

    @property
    def pays(self) -> bool | None:
        """Whether speculation makes more tokens per second; None where nobody can say, or nothing was drafted."""
        drafted = self.speculative.acceptance_rate is not None
        return self.gain.pays if self.gain is not None and drafted else None

    @property
    def arms(self) -> dict[str, ArmFigures]:
        """By name, as tables call them."""
        if self.plain is None:
            return {"as it is": self.speculative}
        return {"with": self.speculative, "without": self.plain}


def _tokens_per_s(turns: Sequence[Turn]) -> float:
    elapsed_s = sum(turn.elapsed_s for turn in turns)
    return sum(turn.num_tokens for turn in turns) / elapsed_s if elapsed_s else 0.0


def faults_of(rungs: Sequence[RungFigures]) -> Counter[str]:
    """Return how often each fault came."""
    found: Counter[str] = Counter()
    for rung in rungs:
        for arm in rung.arms.values():
            found.update(arm.faults)
    return found


def all_failed(rungs: Sequence[RungFigures]) -> bool:
    arms: list[Any] = [arm for rung in rungs for arm in rung.arms.values()]
    return all(arm.num_failed == arm.num_requests for arm in arms)
