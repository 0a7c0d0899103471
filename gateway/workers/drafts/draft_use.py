"""Decides whether a draft worker is used, from how many of its draft tokens were accepted lately. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.wire.requests.speculation import MIN_GAIN

TRIAL = 16
"""Number of verdicts in a trial of a draft worker. In a trial it drafts, and the gateway measures whether that pays."""
TRIAL_PERIOD = 512
"""Number of verdicts from the start of a draft worker's trial that did not pay to the start of its next trial. With
256, trials took 0.6 % of the speed of choices for which drafting does not pay."""
CARRIED = 0.75
"""Fraction of the token counts of a draft worker's trial that is added to those of its next trial, if the first one
paid. The counts of 16 verdicts vary so much that, without the earlier counts, most trials would not pay even with a
draft worker that adds half as many tokens as the target makes by itself."""


@dataclass(slots=True)
class DraftUse:
    """Decides whether one draft worker is used, by how many tokens it added to one choice, or to all choices of a
    caller.

    A draft worker is used in trials of TRIAL verdicts. A trial pays if its tokens are more than MIN_GAIN times those
    that the target made by itself. After such a trial the next begins at once. After a trial that did not pay, the
    draft worker drafts nothing until TRIAL_PERIOD verdicts have passed since the begin of that trial.

        # 16 verdicts with 24 tokens, of which 8 were accepted draft tokens: 24 against 16, a gain of 1.5
    """

    num_verdicts: int = 0
    """Number of verdicts since the draft worker's last trial that paid, or since the first trial began."""
    num_added: float = 0.0
    """Accepted draft tokens in the draft worker's present trial, plus CARRIED times this count at the end of the
    previous trial if that paid."""
    num_others: float = 0.0
    """Tokens that the target made by itself in the draft worker's present trial, plus CARRIED times this count at the
    end of the previous trial if that paid."""
    had_drafts: bool = False
    """Whether, in the draft worker's last trial, draft tokens arrived in time, or the target skipped them because they
    would not pay."""

    @property
    def is_in_use(self) -> bool:
        """Whether the draft worker drafts for the next verdict. It does in a trial: for the first TRIAL of every
        TRIAL_PERIOD verdicts since the last trial that paid.
        """
        return self.num_verdicts % TRIAL_PERIOD < TRIAL

    def note(self, num_added: int, num_tokens: int, *, is_ready: bool) -> None:
        """Record a verdict with `num_tokens` tokens, of which `num_added` are accepted draft tokens.

        is_ready: whether draft tokens were there for the verdict's step, or the target skipped them because they would
        not pay.
        """
        if self.is_in_use:
            self.had_drafts = is_ready or (self.had_drafts and self.num_verdicts % TRIAL_PERIOD > 0)
        self.num_verdicts += 1
        self.num_added += num_added
        self.num_others += num_tokens - num_added
        if self.num_verdicts % TRIAL:
            return
        carried = 0.0
        if self.num_added + self.num_others > MIN_GAIN * self.num_others:
            self.num_verdicts = 0  # the next trial begins at once
            carried = CARRIED
        self.num_added *= carried
        self.num_others *= carried
