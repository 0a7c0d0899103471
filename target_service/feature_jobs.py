"""What the streams of drafts ask of the target's engine beside deliveries: features for heads, and probes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from target_service.feature_stream import FeatureStream
    from target_service.features import Features


@dataclass(eq=False, slots=True)
class FeatureSubscription:
    """A draft's subscription to the features of one lease: what is kept, and the rest as it is made."""

    link: FeatureStream
    digest: bytes
    """Of the head whose projection makes them."""
    ticket: int
    next_position: int
    """First position that was not sent."""
    request_id: int = 0
    """Comes back with the features."""
    has_begun: bool = False
    """Whether the lease has begun."""
    dropped_end: int = 0
    """Position behind the last one that was counted as dropped."""


@dataclass(frozen=True, slots=True)
class FeatureJob:
    """A call of `Features` on the engine thread."""

    run: Callable[[Features], None]
