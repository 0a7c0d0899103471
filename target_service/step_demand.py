"""What a slot would have a step verify, as the budget sees it: nothing of it follows from what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.wire.scheduling import Scheduling


@dataclass(frozen=True, slots=True)
class StepDemand:
    """One slot that is ready for a step."""

    probs: Sequence[float] = ()
    """Acceptance probability of each candidate draft token, best first. Of a tree whose size may follow from what was
    sampled: of its levels."""
    num_required: int = 0
    """Candidates that are verified whatever they cost, where the request names how many; 0: as many as pay."""
    max_rows: int = 0
    """Rows that the required ones may come to: of a tree whose size may follow from what was sampled, as many as it may
    have."""
    is_whole: bool = False
    """The required ones are verified together or not at all."""
    is_fixed: bool = False
    """The request names how many draft tokens a step verifies, whether there are some or not."""
    num_pending_rows: int = 1
    """Rows that the step feeds of the slot without any draft token."""
    extra_rows: int = 0
    """Rows that the slot's drafter would have fed beside the draft tokens, for those of later steps."""
    extra_gain: float = 0.0
    """Tokens a step that they are expected to bring."""
    extra_cost_rows: int = 0
    """Rows to be paid for that in all: these, and of the draft tokens those that came of earlier ones."""
    scheduling: Scheduling = field(default_factory=Scheduling)
    ready_s: float = 0.0
    """Monotonic time since when the slot is ready, in seconds."""

    def num_rows(self, count: int) -> int:
        """Return the rows that so many candidates count as."""
        return self.max_rows if count and self.is_whole else count

    def probs_of(self, count: int) -> Sequence[float]:
        """Return the acceptance probabilities of so many candidates."""
        return self.probs if count and self.is_whole else self.probs[:count]
