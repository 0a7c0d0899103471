"""How many bytes of requests are held at once, from their arrival until they are admitted or refused."""

from __future__ import annotations

from collections import Counter

from outrider.wire.errors import Overloaded, RateLimited

RETRY_S = 1.0
NUM_LARGEST = 16
"""Requests of the largest size that are held at once; smaller ones many more."""
NUM_SHARES = 4
"""An API key may hold one of so many equal parts, so that who sends its bodies slowly keeps none of the others out."""


class BodyBudget:
    """One per gateway, for HTTP and gRPC. One event loop, so no lock."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_bytes_of: Counter[str] = Counter()
        """By API key; those that hold none are not in it."""

    def hold(self, key_name: str | None) -> Held:
        """None: no keys are asked for, so nobody is told from another."""
        return Held(self, key_name)

    def check(self, key_name: str | None, num_bytes: int) -> None:
        """Raises Overloaded when there is no room for so many more."""
        if self.num_bytes + num_bytes > self.max_bytes:
            raise Overloaded(
                f"requests of {self.num_bytes} bytes are being read, {num_bytes} more would pass the limit of "
                f"{self.max_bytes}; try again later",
                retry_after_s=RETRY_S,
            )
        if key_name is None:
            return
        share, own = self.max_bytes // NUM_SHARES, self.num_bytes_of[key_name]
        if own + num_bytes > share:
            raise RateLimited(
                f"requests of {own} bytes of the API key {key_name!r} are being read, {num_bytes} more would pass its "
                f"limit of {share}; send fewer at once, or faster",
                param="max_body_bytes",
                retry_after_s=RETRY_S,
            )

    def change(self, key_name: str | None, by: int) -> None:
        self.num_bytes += by
        if key_name is not None:
            self.num_bytes_of[key_name] += by
            if not self.num_bytes_of[key_name]:
                del self.num_bytes_of[key_name]


class Held:
    """What one request holds. `release` may be called again."""

    def __init__(self, budget: BodyBudget, key_name: str | None) -> None:
        self._budget = budget
        self._key_name = key_name
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises Overloaded."""
        self._budget.check(self._key_name, num_bytes)
        self._budget.change(self._key_name, num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        self._budget.change(self._key_name, -self._num_bytes)
        self._num_bytes = 0
