"""Decides whether a draft worker is asked for draft tokens, by how many of them were accepted lately. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.wire.requests.speculation import MIN_GAIN

TRIAL = 16
"""Verdicts of a trial."""
TRIAL_PERIOD = 512
"""Verdicts from one trial that did not pay to the next. Halved, trials take .6 % of the speed of what pays without
drafts; doubled, a text of which drafts become worth their while has them so much later."""
CARRIED = 0.75
"""Weight of the trials before in the next one's: 16 verdicts alone vary so much that a draft that adds half as many
tokens again would be left in most of them."""


@dataclass(slots=True)
class DraftUse:
    """How many tokens one draft worker added to one answer, or to all answers of a caller."""

    num_verdicts: int = 0
    """Since the last trial that paid."""
    num_added: float = 0.0
    """Tokens of the trial that the draft proposed."""
    num_others: float = 0.0
    """Tokens of the trial that came without it."""
    was_ready: bool = False
    """Draft tokens were there in the last trial, or on their way and passed over."""

    @property
    def is_asked(self) -> bool:
        """Return whether the next verdict is one of a trial."""
        return self.num_verdicts % TRIAL_PERIOD < TRIAL

    def note(self, num_added: int, num_tokens: int, *, is_ready: bool) -> None:
        """Record a verdict on num_tokens, of which the draft proposed num_added.

        A draft that works takes memory bandwidth and power from others on its host, 9 % of each step of a target on two
        cores. So a trial pays where it made MIN_GAIN times as many tokens as there were without the draft's.
        """
        if self.is_asked:
            self.was_ready = is_ready or (self.was_ready and self.num_verdicts % TRIAL_PERIOD > 0)
        self.num_verdicts += 1
        self.num_added += num_added
        self.num_others += num_tokens - num_added
        if self.num_verdicts % TRIAL:
            return
        carried = 0.0
        if self.num_added + self.num_others > MIN_GAIN * self.num_others:
            self.num_verdicts, carried = 0, CARRIED
        self.num_added *= carried
        self.num_others *= carried
