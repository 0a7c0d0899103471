"""What a drafter of blocks keeps of a slot."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(eq=False, slots=True)
class Block:
    """Output of a drafter at the positions behind a committed token, before any of their tokens is known."""

    position: int
    """Of that token."""
    logits: Tensor
    """[N, V] float32, of what follows that token, and of the next positions."""
    hidden: Tensor | None = None
    """[N, d], what the logits were made of, for a sequential head."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """States [1, r] of a sequential head after nodes and ROOT, whose indices stay as long as the block does."""
