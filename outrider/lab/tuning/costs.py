"""What a round costs by K."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from outrider.client import Round
from outrider.lab.tuning.runs import Pass, TimedAnswer
from outrider.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a round with k drafts; seconds."""

    first_s: float
    """From the call to the first round's tokens: the prompt, too."""
    round_s: float
    """Of every later round, as the client sees it; the three that follow are its parts."""
    wait_s: float
    """The target's wait for drafts: what of the draft's work and of the wire its own steps do not hide."""
    verify_s: float
    """In the target: queue, forward and acceptance."""
    rest_s: float
    """Gateway, control streams, and the way to the client."""
    plain_share: float
    """Of rounds that were to have k drafts and had none: late or refused ones, and the pauses after them."""


@dataclass(frozen=True)
class Costs:
    by_k: Mapping[int, Cost]
    """Ascending, from 0."""

    @property
    def step_s(self) -> float:
        """A plain step of the target."""
        return self.by_k[0].verify_s

    @property
    def draft_token_s(self) -> float:
        """What a draft token costs beside its verification, at the largest k."""
        k = max(self.by_k)
        return self.by_k[k].wait_s / k

    @property
    def c(self) -> float:
        """A draft token's time over a step of the target (Leviathan et al. 2023, definition 3.7), as far as no step of
        the target hides it.
        """
        return self.draft_token_s / self.step_s


_NAMES = [field.name for field in fields(Cost)]


def costs_of(passes: Mapping[int, Sequence[Pass]], max_tokens: int) -> Costs:
    """By k. Of each value the median over passes of a pass's mean: what a hiccup does to one pass is left out.

    Raises ConfigError when the answers are too short to tell.
    """
    return Costs({k: _cost(k, passes[k], max_tokens) for k in sorted(passes)})


def _cost(k: int, passes: Sequence[Pass], max_tokens: int) -> Cost:
    each = [_cost_of_pass(k, one, max_tokens) for one in passes]
    return Cost(**{name: statistics.median(getattr(cost, name) for cost in each) for name in _NAMES})


def _cost_of_pass(k: int, one: Pass, max_tokens: int) -> Cost:
    rounds = [found for answer in one.answers for found in _later_rounds(k, answer, max_tokens)]
    drafted = [timed for timed in rounds if timed[0].num_drafted == k]
    if not drafted:
        raise ConfigError(
            f"no round had all drafts of K = {k} in {len(one.answers)} answers of {one.num_tokens} tokens in all; give "
            "more --max-tokens, more prompts or a smaller --max-k, and see that the draft keeps up"
        )
    timings = [round_.timings for round_, _ in rounds]
    parts = {
        "round_s": statistics.fmean(gap_s for _, gap_s in rounds),
        "wait_s": statistics.fmean(round_.timings.deliver_s for round_, _ in drafted),
        "verify_s": statistics.fmean(round_.timings.verify_s for round_, _ in drafted),
    }
    workers_s = statistics.fmean(each.deliver_s + each.verify_s for each in timings)
    return Cost(
        first_s=statistics.fmean(answer.gaps_s[0] for answer in one.answers),
        rest_s=parts["round_s"] - workers_s,
        plain_share=1.0 - len(drafted) / len(rounds),
        **parts,
    )


def _later_rounds(k: int, answer: TimedAnswer, max_tokens: int) -> list[tuple[Round, float]]:
    """With the wait for each: those after the first that had room for k drafts, and had as many or none."""
    found, start = [], 0
    for index, (round_, gap_s) in enumerate(zip(answer.rounds, answer.gaps_s, strict=True)):
        if index and max_tokens - start - 1 >= k and round_.num_drafted in (0, k):
            found.append((round_, gap_s))
        start += len(round_.tokens)
    return found
