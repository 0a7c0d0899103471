"""What a round costs, by K, as a client measures it. For `outrider tune` and `benchmarks/papers`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from outrider.client import Round
from outrider.lab.tuning.runs import Pass, TimedOutput
from outrider.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cost:
    """Mean seconds of a round with K draft tokens."""

    first_s: float
    """Seconds from the call to the first round's tokens, the prompt's prefill included."""
    round_s: float
    """Seconds of a later round, as the client sees it: the sum of the three that follow."""
    wait_s: float
    """Seconds that the target waits for draft tokens: what its own steps do not hide of drafting and of the network."""
    verify_s: float
    """Seconds in the target: queue, forward and acceptance."""
    rest_s: float
    """Seconds in the gateway, the control streams, and on the way to the client."""
    plain_share: float
    """Share of the rounds that had no draft token where K were due: late, refused or paused drafting."""


@dataclass(frozen=True)
class Costs:
    """Costs of several K of one pair."""

    by_k: Mapping[int, Cost]
    """Cost by K, ascending from 0."""

    @property
    def step_s(self) -> float:
        """Seconds of a plain step of the target."""
        return self.by_k[0].verify_s

    @property
    def draft_token_s(self) -> float:
        """Seconds that the target waits for a draft token, at the largest K."""
        k = max(self.by_k)
        return self.by_k[k].wait_s / k

    @property
    def c(self) -> float:
        """Time of a draft token over that of a target step (Leviathan et al. 2023, definition 3.7), as far as no step
        of the target hides it.
        """
        return self.draft_token_s / self.step_s


def costs_of(passes: Mapping[int, Sequence[Pass]], max_tokens: int) -> Costs:
    """Return the costs by K: of each value the median over passes of a pass's mean, so that a hiccup counts once.

    Raises ConfigError where no round had all K draft tokens.
    """
    by_k = dict[int, Cost]()
    for k in sorted(passes):
        costs = [_cost_of_pass(k, one, max_tokens) for one in passes[k]]
        by_k[k] = _median_cost(costs)
    return Costs(by_k)


def _median_cost(costs: Sequence[Cost]) -> Cost:
    columns = zip(*map(astuple, costs), strict=True)  # the values of one field after the other
    return Cost(*map(statistics.median, columns))


def _cost_of_pass(k: int, one: Pass, max_tokens: int) -> Cost:
    firsts_s, gaps_s, workers_s = list[float](), list[float](), list[float]()
    waits_s, verifies_s = list[float](), list[float]()
    for answer in one.answers:
        firsts_s.append(answer.gaps_s[0])
        for round_, gap_s in _later_rounds(k, answer, max_tokens):
            gaps_s.append(gap_s)
            workers_s.append(round_.timings.deliver_s + round_.timings.verify_s)
            if round_.num_drafted == k:
                waits_s.append(round_.timings.deliver_s)
                verifies_s.append(round_.timings.verify_s)
    if not waits_s:
        raise ConfigError(
            f"no round had all drafts of K = {k} in {len(one.answers)} answers of {one.num_tokens} tokens in all; give "
            "more --max-tokens, more prompts or a smaller --max-k, and see that the draft keeps up"
        )
    round_s = statistics.fmean(gaps_s)
    return Cost(
        first_s=statistics.fmean(firsts_s),
        round_s=round_s,
        wait_s=statistics.fmean(waits_s),
        verify_s=statistics.fmean(verifies_s),
        rest_s=round_s - statistics.fmean(workers_s),
        plain_share=1.0 - len(waits_s) / len(gaps_s),
    )


def _later_rounds(k: int, answer: TimedOutput, max_tokens: int) -> list[tuple[Round, float]]:
    """Return the rounds after the first, with their waits, that had K draft tokens or none where K still fitted.

    At max_tokens 10 and K = 4 a round that starts after 6 tokens is left out: it may have 3 draft tokens at most.
    """
    later = list[tuple[Round, float]]()
    num_tokens = 0
    for index, (round_, gap_s) in enumerate(zip(answer.rounds, answer.gaps_s, strict=True)):
        if index and max_tokens - num_tokens - 1 >= k and round_.num_drafted in (0, k):
            later.append((round_, gap_s))
        num_tokens += len(round_.tokens)
    return later
