"""What a drafter of blocks knows of an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.engine.sampling.host_sampling import HostLogits


def parts_of(rows: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """Yield each slot's share of rows [sum(counts), ...], of its own: it is kept for as long as the slot's block is,
    and must not keep the others' too.
    """
    for part in rows.split(list(counts)):
        yield part if len(part) == len(rows) else part.clone()


@dataclass(frozen=True, slots=True)
class Block:
    """The logits of the positions behind a committed token."""

    position: int
    """Of that token."""
    logits: HostLogits
    """Of what follows that token, and of the next positions."""


@dataclass(frozen=True, slots=True, eq=False)
class SequentialBlock:
    """What is known of the positions behind a committed token before the tokens in between are."""

    position: int
    """Of that token."""
    logits: Tensor
    """[N, V] float32, of what follows that token, and of the next positions."""
    hidden: Tensor
    """[N, d], what they were made of."""
