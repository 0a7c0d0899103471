"""Whether a draft is worth asking: it is tried, and asked on while it adds enough. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.wire.speculation import MIN_GAIN

TRIAL = 16
"""Verdicts of a trial."""
TRIAL_PERIOD = 512
"""Verdicts from one trial that did not pay to the next. Halved, trials take .6 % of the speed of what pays without
drafts; doubled, a text of which drafts become worth their while has them so much later."""


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
        """Return whether the next verdict is one of a trial."""
        return self.num_verdicts % TRIAL_PERIOD < TRIAL

    @property
    def begins_trial(self) -> bool:
        return self.num_verdicts % TRIAL_PERIOD == 0

    def note(self, num_added: int, num_tokens: int) -> None:
        """Record a verdict on num_tokens, of which the draft proposed num_added. A draft that works takes memory
        bandwidth and power from others on its host, 9 % of each step of a target on two cores, so that a trial pays
        where it made MIN_GAIN times as many tokens as there were without the draft's.
        """
        self.num_verdicts += 1
        self.num_added += num_added
        self.num_others += num_tokens - num_added
        if self.num_verdicts % TRIAL:
            return
        if self.num_added + self.num_others > MIN_GAIN * self.num_others:
            self.num_verdicts = 0
        self.num_added = self.num_others = 0
