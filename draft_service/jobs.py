"""What a draft is told of a slot, as a plain value."""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.feature_rows import Rows


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


@dataclass(frozen=True, slots=True)
class RowsJob:
    """Take in rows of features."""

    ticket: int
    target_epoch: int
    start: int
    """Position of the first."""
    rows: Rows
