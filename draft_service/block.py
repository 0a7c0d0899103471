"""What a drafter of blocks knows of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.engine.sampling.host_sampling import HostLogits


@dataclass(frozen=True, slots=True)
class Block:
    """The logits of the positions behind a committed token."""

    position: int
    """Of that token."""
    logits: HostLogits
    first: int
    """Index among the logits of what follows that token; that of the next position is next."""


@dataclass(frozen=True, slots=True, eq=False)
class SequentialBlock:
    """What is known of the positions behind a committed token before the tokens in between are."""

    position: int
    """Of that token."""
    logits: Tensor
    """[N, V] float32, of what follows that token, and of the next positions."""
    hidden: Tensor
    """[N, d], what they were made of."""
