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
"""Bits of bfloat16 numbers, as they were received."""


@dataclass(frozen=True, slots=True)
class AdvanceJob:
    """Job that commits tokens of a slot and lets its draft tokens grow after them."""

    owner: int
    slot_id: int
    ticket: int
    base_len: int
    committed_ids: tuple[int, ...]
    is_missed: bool = False
    """Whether the target had no draft tokens for its last step, so that a delivery may have been lost."""
    levels: tuple[BeamLevel, ...] = ()
    """Levels of a beam search, in place of `committed_ids`; empty for other requests."""
    error: str = ""
    """What is wrong with the received levels of the beam search; empty if they are valid."""

    @property
    def decided(self) -> tuple[Any, ...]:
        """What the job commits from position `base_len` on: token ids, or levels of a beam search."""
        return self.levels or self.committed_ids


@dataclass(frozen=True, slots=True)
class FeaturesRequest:
    """Request to a target for the features of a lease, from a position on."""

    ticket: int
    start: int
    id: int
    """Number that is returned with the features. It changes once the slot loses features that it had received."""


@dataclass(frozen=True, slots=True)
class FeaturesJob:
    """Job with features of a lease's tokens, which arrived from a target. They may be late or repeated; earlier ones
    may never arrive.
    """

    ticket: int
    target_epoch: int
    start: int
    """Position of the token of the first feature."""
    rows: FeatureBits
    """Features, [num_rows, width]."""
    on_stored: Callable[[], None]
    """Function to call on the engine thread once the slot has taken the features, so that the link reads more from the
    target."""
    request_id: int = 0
    """Number of the draft worker's message that asked for these features; the target repeats it in its answer."""


@dataclass(frozen=True, slots=True)
class EngineJob:
    """Job that runs a function on the engine thread, between two steps."""

    run: Callable[[], None]
