"""Compares a drafter's distributions with the target's, token by token, and estimates means. Used by `alpha`.

alpha = E[sum of min(target, draft)] is the expected acceptance probability of a draft token (Leviathan et al. 2023,
Corollary 3.6).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from outrider.engine.sampling.coupled import coupled_id
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.wire.requests.params import SamplingParams

DRAFT_TEMPERATURES = (1.0, 0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0)
"""Temperatures at which a draft model's alpha is measured, as multiples of the target's temperature. If the target's
temperature is 0, the entries are the temperatures themselves. Each entry takes one more softmax of the draft's logits
per token."""
ESTIMATES = ("alpha", "bound", "coupled", "greedy", "drafted")
"""Names of the fields of `Tally` that a row of the report summarises by an `Estimate`."""

DistributionAt = Callable[[SamplingParams], TokenDistribution | None]
"""Function that returns a drafter's distribution at one position, given sampling parameters; None = the drafter
proposes nothing there."""


@dataclass(frozen=True)
class Estimate:
    """A mean over the tokens of several prompts, with its 95 % confidence interval. For the interval, prompts rather
    than tokens count as independent samples.
    """

    mean: float | None
    """Mean of all values; None = there are no values."""
    error: float | None
    """Half the width of the 95 % confidence interval; None = fewer than two prompts have values."""

    @classmethod
    def of(cls, by_prompt: Sequence[Sequence[float]]) -> Estimate:
        """Estimate the mean of all values. by_prompt[i]: the values of prompt i, one per token."""
        prompts = list(filter(None, by_prompt))
        num = sum(map(len, prompts))
        if not num:
            return cls(None, None)
        mean = sum(map(sum, prompts)) / num
        if len(prompts) < 2:
            return cls(mean, None)
        return cls(mean, half_width(influences(prompts, mean)))


def influences(by_prompt: Sequence[Sequence[float]], mean: float) -> list[float]:
    """Return the influence of each prompt on the mean of all values: (sum of the prompt's values - mean * number of the
    prompt's values) / number of all values.

    by_prompt[i]: the values of prompt i, one per token. mean: the mean of all values.
    """
    num = sum(map(len, by_prompt))
    influences = []
    for values in by_prompt:
        influences.append((sum(values) - mean * len(values)) / num)
    return influences


def half_width(influences: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of a mean over the tokens of several prompts. influences:
    what the function `influences` returns for these prompts, of which there must be at least two.

    The variance is the linearised variance of a ratio of sums, or of a difference of such ratios (Cochran, "Sampling
    techniques", section 6.4).
    """
    num = len(influences)
    return 1.96 * math.sqrt(sum(each * each for each in influences) * num / (num - 1))


@dataclass(frozen=True)
class TargetToken:
    """A token of the target's output, with the target's distributions at its position."""

    id: int
    position: int
    """Index of the token in the sequence of prompt and output."""
    distribution: TokenDistribution
    """The target's distribution from which the token was drawn."""
    unfiltered: TokenDistribution
    """The target's distribution at this position at temperature 1, without top-k, top-p and min-p."""

    def keeps(self, token_id: int, lenience: float) -> bool:
        """Return whether the draft token `token_id` would be accepted at this position at temperature 0.

        It is accepted if the target gives it at least `lenience` times the probability of the most likely token
        (Leviathan et al. 2023, A.5).
        """
        return self.unfiltered.score(token_id) >= float(self.unfiltered.scores.max()) + math.log(lenience)


@dataclass
class Tally:
    """Measured values of one drafter under one sampling setting. In each list of lists, entry [i][j] belongs to the
    output of prompt i and to the j-th of its tokens for which the drafter proposed a token. (`drafted` has an entry for
    every token.)
    """

    temperatures: Sequence[float]
    """Temperatures of the draft at which alpha is measured. The first is the target's temperature."""
    leniences: Sequence[float] = ()
    alpha: list[list[float]] = field(default_factory=list)
    """alpha[i][j]: acceptance probability under the rejection rule, in the output to prompt i, at the j-th of its
    tokens for which the drafter has a proposal."""
    bound: list[list[float]] = field(default_factory=list)
    """bound[i][j]: lower bound of the acceptance probability under the coupled rule, in the output to prompt i, at the
    j-th of its tokens for which the drafter has a proposal."""
    coupled: list[list[float]] = field(default_factory=list)
    """coupled[i][j]: 1 if the coupled rule accepts the draft token, otherwise 0, in the output to prompt i, at the j-th
    of its tokens for which the drafter has a proposal."""
    greedy: list[list[float]] = field(default_factory=list)
    """greedy[i][j]: 1 if draft and target have the same most likely token, otherwise 0, in the output to prompt i, at
    the j-th of its tokens for which the drafter has a proposal."""
    drafted: list[list[float]] = field(default_factory=list)
    """drafted[i][j]: 1 if the drafter proposes a token for prompt i at output position j, otherwise 0."""
    at_temperature: list[list[list[float]]] = field(init=False)
    """at_temperature[t][i][j]: acceptance probability under the rejection rule with the draft at temperatures[t], in
    the output to prompt i, at the j-th of its tokens for which the drafter has a proposal."""
    lenient: list[list[list[float]]] = field(init=False)
    """lenient[n][i][j]: acceptance probability with the lenience leniences[n], in the output to prompt i, at the j-th
    of its tokens for which the drafter has a proposal."""

    def __post_init__(self) -> None:
        self.at_temperature = [[] for _ in self.temperatures]
        self.lenient = [[] for _ in self.leniences]

    def begin(self) -> None:
        """Begin the next prompt: each list of values gets an empty list for its output."""
        for name in ESTIMATES:
            getattr(self, name).append([])
        for values in (*self.at_temperature, *self.lenient):
            values.append([])

    def add(self, token: TargetToken, draft: DistributionAt, params: SamplingParams) -> None:
        """Compare the drafter's distribution with the target's at one token of the output, and append the results to
        the lists of the current prompt. If the drafter proposes nothing there, only `drafted` gets a value.

        token: the target's token. draft: function that returns the drafter's distribution at the token's position.
        params: the sampling parameters by which the token was drawn.
        """
        distribution = draft(params)
        self.drafted[-1].append(float(distribution is not None))
        if distribution is None:
            return
        alpha = overlap(token.distribution, distribution)
        self.alpha[-1].append(alpha)
        self.bound[-1].append(alpha / (2.0 - alpha))  # (1 - TV) / (1 + TV), TV = 1 - alpha
        self.coupled[-1].append(float(coupled_id(distribution, params, token.position) == token.id))
        self.greedy[-1].append(float(best_id(token.distribution) == best_id(distribution)))
        for values, temperature in zip(self.at_temperature, self.temperatures, strict=True):
            other = draft(replace(params, temperature=temperature))
            assert other is not None, "a temperature bans no token"
            values[-1].append(overlap(token.distribution, other))
        for values, lenience in zip(self.lenient, self.leniences, strict=True):
            if params.greedy:
                accepted = float(token.keeps(best_id(distribution), lenience))
            else:
                accepted = overlap(token.distribution, distribution, lenience)
            values[-1].append(accepted)

    def row(self, drafter: str, setting: dict[str, float]) -> dict[str, Any]:
        """Return this drafter's row of the report for a sampling setting: an `Estimate` of each quantity in ESTIMATES,
        the draft temperature with the largest alpha, and for each lenience the estimated acceptance probability.

        drafter: name of the drafter. setting: the sampling parameters.
        """
        row: dict[str, Any] = {"drafter": drafter, "setting": setting, "num_tokens": sum(map(len, self.drafted))}
        for name in ESTIMATES:
            row[name] = asdict(Estimate.of(getattr(self, name)))
        row["draft_temperature"] = self._best_temperature()
        if self.leniences:
            row["lenient"] = self._lenient_rows()
        return row

    def _lenient_rows(self) -> list[dict[str, Any]]:
        rows = []
        for lenience, values in zip(self.leniences, self.lenient, strict=True):
            rows.append({"lenience": lenience, **asdict(Estimate.of(values))})
        return rows

    def _best_temperature(self) -> dict[str, Any] | None:
        # the draft's temperature with the largest alpha, and its gain over the target's temperature on the same tokens
        estimates = [Estimate.of(values) for values in self.at_temperature]
        best = 0
        best_mean = estimates[0].mean
        if best_mean is None:
            return None
        for index, estimate in enumerate(estimates):
            if estimate.mean is not None and estimate.mean > best_mean:
                best = index
                best_mean = estimate.mean
        gains = []
        for best_values, values in zip(self.at_temperature[best], self.at_temperature[0], strict=True):
            gains.append(list(map(operator.sub, best_values, values)))
        return {
            "temperature": self.temperatures[best],
            "alpha": asdict(estimates[best]),
            "gain": asdict(Estimate.of(gains)),
        }


def draft_temperatures(temperature: float) -> list[float]:
    """Return the temperatures of a draft to compare for a target at `temperature`. The first of them is
    `temperature`.
    """
    if temperature == 0.0:
        return sorted(DRAFT_TEMPERATURES)
    return [temperature * factor for factor in DRAFT_TEMPERATURES]


def overlap(target: TokenDistribution, draft: TokenDistribution, lenience: float = 1.0) -> float:
    """Return the probability that the rejection rule accepts a token drawn from `draft`.

    It is the sum of min(target / lenience, draft) (Leviathan et al. 2023, Corollary 3.6 and, below a lenience of 1,
    A.5).
    """
    return float(np.minimum(target.probs() / lenience, draft.probs_at(target)).sum())


def best_id(distribution: TokenDistribution) -> int:
    """Return the most likely token id of a distribution."""
    return distribution.id_of(int(distribution.scores.argmax()))
