"""Who may be decoded now, first come, first served, and how many wait. One for each served model."""

from __future__ import annotations

import asyncio
from collections import deque

from gateway.queue_estimate import QueueEstimate


class Places:
    """`capacity` follows the number of targets; when it falls, nobody who runs is sent away."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.estimate = QueueEstimate(capacity)
        self._line: deque[asyncio.Future[None]] = deque()
        self.num_admitted = 0
        """Answers running or waiting."""
        self.num_running = 0
        self.num_refused = 0
        """Since the start."""

    @property
    def capacity(self) -> int:
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self._capacity = self.estimate.num_places = capacity
        self._let_in()

    @property
    def num_queued(self) -> int:
        return self.num_admitted - self.num_running

    def wait_s(self) -> float:
        """How long an answer that came now is expected to wait for its turn."""
        return self.estimate.wait_s(self.num_admitted)

    async def acquire(self) -> None:
        """Returns when it is the caller's turn. Cancelled: the place goes to the next."""
        if self.num_running < self._capacity and not self._line:
            self.num_running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            elif turn in self._line:
                self._line.remove(turn)
            raise

    def release(self) -> None:
        self.num_running -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._line and self.num_running < self._capacity:
            turn = self._line.popleft()
            if not turn.done():
                self.num_running += 1
                turn.set_result(None)
