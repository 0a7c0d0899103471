"""Jobs for the engine thread of a draft worker about its slots, as plain values.

The servicer and the links to targets create them; `Grower.handle` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engine.speculation.beam import BeamLevel

FeatureBits = NDArray[np.uint16]
"""The bits of bfloat16 numbers, as received."""


@dataclass(frozen=True, slots=True)
class AdvanceJob:
    """A job that continues a slot from newly committed tokens."""

    owner: int
    slot_id: int
    ticket: int
    base_len: int
    committed_ids: tuple[int, ...]
    is_missed: bool = False
    """Whether the target had no draft tokens for its last step."""
    levels: tuple[BeamLevel, ...] = ()
    """Levels of a beam search, in place of `committed_ids`."""
    wrong: str = ""
    """Error in the levels as received; empty if they are valid."""

    @property
    def decided(self) -> tuple[Any, ...]:
        """Committed token ids, or levels of a beam search, of the positions from `base_len` on."""
        return self.levels or self.committed_ids


@dataclass(frozen=True, slots=True)
class FeaturesRequest:
    """A request to a target for a lease's features from a position on."""

    ticket: int
    start: int
    id: int
    """Id that is returned with the features; it changes once the slot loses features that it had received."""


@dataclass(frozen=True, slots=True)
class FeaturesJob:
    """A job with features of a lease's tokens. They may be late or repeated; earlier ones may never arrive."""

    ticket: int
    target_epoch: int
    start: int
    """Position of the first feature."""
    rows: FeatureBits
    """Features [num_rows, width]."""
    taken: Callable[[], None]
    """Called on the engine thread once the features are taken, so that the link reads more from the target."""
    request_id: int = 0
    """Id of the request that the features answer."""


@dataclass(frozen=True, slots=True)
class EngineJob:
    """A job that runs a function between two steps."""

    run: Callable[[], None]
