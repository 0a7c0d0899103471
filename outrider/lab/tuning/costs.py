"""The time of a round and of its parts for each K, measured by a client. For `outrider tune` and
`benchmarks/papers`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from outrider.client import Round
from outrider.lab.tuning.runs import Pass, TimedOutput
from outrider.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cost:
    """Average times of a round with K draft tokens, over many rounds."""

    first_s: float
    """Seconds from the client's call until the tokens of the first round arrive, which includes the prefill of the
    prompt."""
    round_s: float
    """Seconds of a round after the first, as the client sees it: the time between the arrival of two rounds' tokens. It
    is the sum of `wait_s`, `verify_s` and `rest_s` if all rounds have draft tokens."""
    wait_s: float
    """Seconds of a round in which the target waits for draft tokens: the part of drafting and network time that does
    not overlap with the target's own steps."""
    verify_s: float
    """Seconds that a round spends in the target: queue, forward and acceptance."""
    rest_s: float
    """Seconds of a round outside the models: in the gateway, on its streams to workers, on the way to the client."""
    plain_share: float
    """Fraction of the rounds that had no draft token although K were expected, for example because drafting was late,
    refused or paused."""


@dataclass(frozen=True)
class Costs:
    """Average times of the rounds of one draft and target, for several K (draft tokens per round)."""

    by_k: Mapping[int, Cost]
    """Times of a round by K, in ascending order from K = 0."""

    @property
    def step_s(self) -> float:
        """Seconds of a step of the target without draft tokens (K = 0)."""
        return self.by_k[0].verify_s

    @property
    def draft_token_s(self) -> float:
        """Seconds that the target waits for one draft token: `wait_s` of the largest measured K, divided by that K."""
        k = max(self.by_k)
        return self.by_k[k].wait_s / k

    @property
    def c(self) -> float:
        """`draft_token_s` divided by `step_s`: the c of Leviathan et al. 2023, definition 3.7. Drafting that overlaps
        with the target's steps does not count.
        """
        return self.draft_token_s / self.step_s


def costs_of(passes: Mapping[int, Sequence[Pass]], max_tokens: int) -> Costs:
    """Return the times of rounds for each K. passes: for each K the measured passes, each of which has one output for
    every prompt. max_tokens: maximum number of output tokens of the requests.

    Each time is the mean over one pass, and then the median of these means over the passes, so that a disturbance of
    one pass changes it little. Raises ConfigError if no round had all K draft tokens.
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
    firsts_s = list[float]()
    gaps_s = list[float]()
    workers_s = list[float]()
    waits_s = list[float]()
    verifies_s = list[float]()
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
