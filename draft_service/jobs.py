"""What a draft is told of a slot, as plain values."""

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
    """Go on from what was committed."""

    owner: int
    slot_id: int
    ticket: int
    base_len: int
    committed_ids: tuple[int, ...]
    is_missed: bool = False
    """Nothing lay ready at the target."""
    levels: tuple[Level, ...] = ()
    """Of a beam search, in place of committed_ids."""
    wrong: str = ""
    """What was wrong with these."""

    @property
    def decided(self) -> tuple[Any, ...]:
        """What was decided from base_len on, by position."""
        return self.levels or self.committed_ids


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """What is asked of a target: rows of a lease from a position on."""

    ticket: int
    start: int
    id: int
    """Comes back with the rows; another one once what was here was lost."""


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
    """To be called on the engine thread once they are taken in: those that wait are bounded."""
    request_id: int = 0
    """Of the request that they were sent for."""


@dataclass(frozen=True, slots=True)
class EngineJob:
    """Do something between two steps."""

    run: Callable[[], None]
