"""How many bytes of requests are held at once, from their arrival until they are admitted or refused."""

from __future__ import annotations

from outrider.wire.errors import Overloaded

RETRY_S = 1.0
NUM_LARGEST = 16
"""Requests of the largest size that are held at once; smaller ones many more."""


class BodyBudget:
    """One per gateway, for HTTP and gRPC. One event loop, so no lock."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def hold(self) -> Held:
        return Held(self)


class Held:
    """What one request holds. `release` may be called again."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises Overloaded."""
        budget = self._budget
        if budget.num_bytes + num_bytes > budget.max_bytes:
            raise Overloaded(
                f"requests of {budget.num_bytes} bytes are being read, {num_bytes} more would pass the limit of "
                f"{budget.max_bytes}; try again later",
                retry_after_s=RETRY_S,
            )
        budget.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def release(self) -> None:
        self._budget.num_bytes -= self._num_bytes
        self._num_bytes = 0
