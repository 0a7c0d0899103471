"""What steps, links and services take: measured by a group, and handed to the simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Measured seconds."""

    verify: Mapping[int, float]
    """A forward of the target by rows."""
    draft: Mapping[int, float]
    """A forward of the draft by rows."""
    decide_s: float = 0.0
    """From logits to what is kept."""
    draw_s: float = 0.0
    """From the logits after one node to what follows it."""
    gateway_s: float = 0.0
    """A turn through the gateway and its streams, without the links."""
    target_service_s: float = 0.0
    draft_service_s: float = 0.0
    """What a step takes more in a service than in a bare process."""
    round_trip_s: float = 0.0
    """Of any link."""

    def verify_s(self, num_rows: int) -> float:
        return at_rows(self.verify, num_rows) + self.decide_s

    def draft_s(self, num_rows: int) -> float:
        return at_rows(self.draft, num_rows) + num_rows * self.draw_s


def at_rows(seconds: Mapping[int, float], num_rows: int) -> float:
    """Return the seconds of the least measured number of rows that is as large; of the largest beyond."""
    return seconds[min((each for each in seconds if each >= num_rows), default=max(seconds))]
