"""What an answer takes: its first tokens, each further one, and from what length on drafts pay."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lab.tuning.runs import Pass


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one setting, one answer at a time."""

    first_s: float
    """Median seconds from the call to the first message with tokens: the prompt, too."""
    num_first: float
    """Mean tokens of that message."""
    token_s: float
    """Seconds of a further token: of all that came later over all their tokens; NaN where none did."""

    @classmethod
    def of(cls, passes: Sequence[Pass]) -> Latency:
        answers = [answer for one in passes for answer in one.answers]
        num_first = [len(answer.rounds[0].tokens) for answer in answers]
        num_later = sum(answer.num_tokens for answer in answers) - sum(num_first)
        later_s = sum(sum(answer.gaps_s[1:]) for answer in answers)
        return cls(
            statistics.median(answer.gaps_s[0] for answer in answers),
            statistics.fmean(num_first),
            later_s / num_later if num_later else math.nan,
        )

    def answer_s(self, num_tokens: float) -> float:
        """Return the seconds of an answer."""
        return self.first_s + max(0.0, num_tokens - self.num_first) * self.token_s


def break_even(plain: Latency, drafted: Latency) -> int | None:
    """Return the tokens of the shortest answer that is there as soon with drafts as without, and every longer one
    sooner; None where a further token takes no less time with drafts.
    """
    gained_s = plain.token_s - drafted.token_s
    if not gained_s > 0.0:
        return None
    lost_s = drafted.answer_s(drafted.num_first) - plain.answer_s(drafted.num_first)
    if lost_s < 0.0:  # drafts are ahead with their first message: as soon are the tokens that plain decoding has then
        return max(1, math.ceil(plain.num_first + (drafted.first_s - plain.first_s) / plain.token_s))
    return max(1, math.ceil(drafted.num_first + lost_s / gained_s))
