"""Whether a draft is worth asking: it is tried, goes on while it adds enough, and is tried more rarely else. Pure."""

from __future__ import annotations

from dataclasses import dataclass

TRIAL = 16
"""Verdicts of a trial."""
TRIAL_PERIOD = 128
"""Verdicts from the first trial to the second. Each later one comes after twice as many."""
MAX_TRIAL_PERIODS = 64
"""Such periods from one trial to the next, at most: 16 verdicts of 8,192, half a minute of one answer that gains 250
tokens a second."""
MIN_GAIN = 0.2
"""Tokens that a draft has to add in a trial to each token that came without it. A draft that works takes memory
bandwidth and power from others on its host: 9 % of each step of a target on two cores."""


@dataclass(slots=True)
class DraftUse:
    """Of one draft, for one answer or for all of a caller's."""

    num_verdicts: int = 0
    """Since the last trial that paid; 0: the next one is a trial's first."""
    num_added: int = 0
    """Tokens of the trial that the draft proposed."""
    num_others: int = 0
    """Tokens of the trial that came without it."""

    @property
    def is_asked(self) -> bool:
        """Return whether the next verdict is one of a trial.

        Periods 1, 2, 4, 8, ... begin with a trial, and every MAX_TRIAL_PERIODS-th: after 0, 128, 384, 896 verdicts.
        """
        num_periods, place = divmod(self.num_verdicts, TRIAL_PERIOD)
        num_periods += 1
        is_due = num_periods.bit_count() == 1 or num_periods % MAX_TRIAL_PERIODS == 0
        return is_due and place < TRIAL

    @property
    def begins_trial(self) -> bool:
        return self.is_asked and self.num_verdicts % TRIAL == 0

    def note(self, num_added: int, num_tokens: int) -> None:
        """Record a verdict on num_tokens, of which the draft proposed num_added."""
        self.num_verdicts += 1
        self.num_added += num_added
        self.num_others += num_tokens - num_added
        if self.num_verdicts % TRIAL:
            return
        if self.num_added > MIN_GAIN * self.num_others:
            self.num_verdicts = 0
        self.num_added = self.num_others = 0
