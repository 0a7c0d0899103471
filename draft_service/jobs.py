"""Messages to the engine of a draft about its slots, as plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engine.speculation.beam import Level

Rows = NDArray[np.uint16]
"""The bits of bfloat16 numbers, as they came."""


@dataclass(frozen=True, slots=True)
class AdvanceJob:
    """Continue a slot from what was committed."""

    owner: int
    slot_id: int
    ticket: int
    base_len: int
    committed_ids: tuple[int, ...]
    is_missed: bool = False
    """Whether the target had no draft tokens for its last step."""
    levels: tuple[Level, ...] = ()
    """Levels of a beam search, in place of committed_ids."""
    wrong: str = ""
    """What is wrong with the levels; empty where nothing is."""

    @property
    def decided(self) -> tuple[Any, ...]:
        """Return what was decided from base_len on, by position."""
        return self.levels or self.committed_ids


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """A request to a target for the rows of a lease from a position on."""

    ticket: int
    start: int
    id: int
    """Comes back with the rows; it changes once the rows that were here are lost."""


@dataclass(frozen=True, slots=True)
class RowsJob:
    """Take in rows of features of a lease's tokens. They may be late and come twice; those before may never come."""

    ticket: int
    target_epoch: int
    start: int
    """Position of the first."""
    rows: Rows
    """[num_rows, width]."""
    taken: Callable[[], None]
    """Called on the engine thread once they are taken in: the number of those that wait is bounded."""
    request_id: int = 0
    """Id of the request that they answer."""


@dataclass(frozen=True, slots=True)
class EngineJob:
    """A function to run between two steps."""

    run: Callable[[], None]
