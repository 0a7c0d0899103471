"""What a drafter of blocks knows of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.sampling.host_sampling import HostLogits


@dataclass(frozen=True, slots=True)
class Block:
    """The logits of the positions behind a committed token."""

    position: int
    """Of that token."""
    logits: HostLogits
    first: int
    """Index among the logits of what follows that token; that of the next position is next."""
