"""What the streams of drafts ask of the engine beside deliveries, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.engine.heads.opening import OpeningMap
from outrider.engine.worker.jobs import JobError


class RowsLink(Protocol):
    """The way of rows to one draft, as the engine thread sees it."""

    @property
    def has_room(self) -> bool:
        """Return whether less waits to be written than may."""

    def send_rows(self, job: WantRows, start: int, num_rows: int, data: bytes) -> None:
        """Send rows that a job asked for, of consecutive positions from `start` on: [num_rows, width] bfloat16."""

    def note_dropped(self, num_rows: int, num_bytes: int) -> None:
        """Count rows that were not sent for want of room."""


@dataclass(frozen=True, slots=True)
class FeatureJob:
    """A job of `Features`."""


@dataclass(frozen=True, slots=True)
class AddHead(FeatureJob):
    """Make rows for a head from now on."""

    digest: bytes
    opening: OpeningMap
    respond: Callable[[JobError | None], None]


@dataclass(frozen=True, slots=True)
class DropHead(FeatureJob):
    """Make none for it any more."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class WantRows(FeatureJob):
    """Send rows of a lease from a position on: what is here, and the rest as it is made."""

    link: RowsLink
    digest: bytes
    ticket: int
    start: int
    request_id: int = 0
    """Comes back with the rows."""


@dataclass(frozen=True, slots=True)
class LinkGone(FeatureJob):
    """Send nothing more to a draft, whose stream has ended."""

    link: RowsLink
    done: Callable[[], None] = field(default=lambda: None, compare=False)
    """Called once nothing more is sent."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What the target says of a text."""

    taps: bytes
    """[tokens, taps, hidden] bfloat16."""
    best_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ProbeJob(FeatureJob):
    """Run a text alone."""

    token_ids: Sequence[int]
    taps: Sequence[int]
    respond: Callable[[Probed | JobError], None]


@dataclass(slots=True)
class Wanting:
    """Who reads the rows of a lease."""

    job: WantRows
    lacks: int | None = None
    """Position from which rows were not sent, since too many waited on the way."""
