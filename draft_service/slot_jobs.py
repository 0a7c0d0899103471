"""Jobs for the engine thread of a draft worker about its slots, as plain values.

The servicer and the streams to targets create them; `Grower.handle` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engine.speculation.beam import BeamLevel

FeatureBits = NDArray[np.uint16]
"""Features as received, [N, d] for N tokens: bfloat16 numbers, whose bits are read as uint16."""


@dataclass(frozen=True, slots=True)
class AdvanceJob:
    """Job that commits tokens of a slot and lets its draft tokens grow after them."""

    owner: int
    slot_id: int
    ticket: int
    base_len: int
    committed_ids: tuple[int, ...]
    is_missed: bool = False
    """Whether the target had no draft tokens for the slot's last step. An earlier delivery for the slot may then have
    been lost."""
    levels: tuple[BeamLevel, ...] = ()
    """Decided levels of a beam search, which take the place of `committed_ids`; empty for other requests."""
    error: str = ""
    """What is wrong with the received levels of the beam search; empty if they are valid."""

    @property
    def decided(self) -> tuple[Any, ...]:
        """Token ids, or levels of a beam search, that the job commits in place of everything from position `base_len`
        on.
        """
        return self.levels or self.committed_ids


@dataclass(frozen=True, slots=True)
class FeaturesRequest:
    """Request to a target for the features of the committed tokens of one slot, from position `start` on. The slot is
    named by the ticket of its lease.
    """

    ticket: int
    start: int
    id: int
    """Number that the target returns with the features. After the slot has lost features it uses a new number, so that
    it can tell late answers to an earlier request."""


@dataclass(frozen=True, slots=True)
class FeaturesJob:
    """Job with features of consecutive tokens of one slot, which a target has sent. They may come late or twice, and
    features of earlier tokens may have been lost.
    """

    ticket: int
    target_epoch: int
    start: int
    """Position of the token to which the first feature belongs."""
    rows: FeatureBits
    """Features of N consecutive committed tokens that the target sent, [N, d], as bits of bfloat16 numbers."""
    on_stored: Callable[[], None]
    """Function to call on the engine thread once the slot has stored the features. If too many bytes are not stored
    yet, the draft worker reads no more features from the target's stream until this is called."""
    request_id: int = 0
    """Number of the slot's request for features to which these are the reply; 0 if the target returned none."""


@dataclass(frozen=True, slots=True)
class EngineJob:
    """Job that runs a function on the engine thread, between two steps."""

    run: Callable[[], None]
