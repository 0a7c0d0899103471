"""Admits answers to a queue, and refuses those that would wait too long. One queue for each served model. No I/O.

A caller that has no more than its share of the places is always admitted: what others have waiting refuses nobody else.
A free place is for the caller that holds the fewest over its weight, of those alike for the one that was given the
fewest, then for who came first, and of its answers for that of the lowest priority number.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.wire.errors import Overloaded
from outrider.wire.requests.scheduling import Scheduling, VirtualTokens
from outrider.wire.settings.config import GatewayConfig

BURST_S = 0.25
"""What comes within this of an idle moment is a burst, which the whole queue is for: what one caller sends at once, and
little of what many send all the time."""
CALM_S = 1.0
"""Overload is over when nobody has found all places taken for so long."""
LEAST_RETRY_S = 1.0
"""The soonest that who is refused is asked to come back. Doubled, places may stand empty for twice as long."""
MEMORY = 32
"""Answers that the mean looks back on. Doubled, it follows a change of the load half as fast."""


class QueueEstimate:
    """Expects how long a new answer waits for one of `num_places`, from how long answers hold theirs."""

    def __init__(self, num_places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_places = num_places
        self._clock = clock
        self._mean_s = 0.0
        self._num_ended = 0
        self._num_running = 0
        self._sum_began_s = 0.0

    @contextmanager
    def served(self) -> Iterator[None]:
        """While an answer holds a place."""
        began_s = self._clock()
        self._num_running += 1
        self._sum_began_s += began_s
        try:
            yield
        finally:
            self._num_running -= 1
            self._sum_began_s = self._sum_began_s - began_s if self._num_running else 0.0
            self._num_ended += 1
            self._mean_s += (self._clock() - began_s - self._mean_s) / min(self._num_ended, MEMORY)

    def service_s(self) -> float:
        """Mean time that an answer holds its place; 0 before the first. Those that run for longer count by their age:
        when all stands still, nothing ends that could say so.
        """
        if not self._num_running:
            return self._mean_s
        return max(self._mean_s, self._clock() - self._sum_began_s / self._num_running)

    def wait_s(self, num_ahead: int) -> float:
        """Until an answer gets a place that has `num_ahead` running or waiting before it."""
        turns = max(0, num_ahead - self.num_places + 1)
        return turns * self.service_s() / max(1, self.num_places)


class AdmissionQueue:
    """`capacity` follows the number of targets; when it falls, nobody who runs is sent away."""

    def __init__(self, config: GatewayConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.estimate = QueueEstimate(config.max_running, clock)
        self.num_admitted = 0
        """Answers running or waiting."""
        self._admitted: dict[bytes, tuple[int, float]] = {}
        """By caller: its answers that run or wait, and its weight. Callers that have none are not in it."""
        self.num_running = 0
        self.num_refused = 0
        """Since the start."""
        self._config = config
        self._clock = clock
        self._capacity = config.max_running
        self._line: list[tuple[Scheduling, asyncio.Future[None]]] = []
        """Who waits, in the order in which they came."""
        self._num_held: Counter[bytes] = Counter()
        """Places, by caller; those that hold none are not in it."""
        self._given = VirtualTokens()
        """Places."""
        self._idle_s = self._full_s = -math.inf
        self._overloaded = False

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

    def admit(self, num_answers: int, caller: bytes = b"", weight: float = 1.0) -> None:
        """Count so many more answers of a caller. Raise Overloaded, with the time after which they may come, when they
        cannot be admitted.
        """
        if not self._is_within_share(num_answers, caller, weight):
            self._check(num_answers)
        self.change(num_answers, caller, weight)

    def change(self, by: int, caller: bytes = b"", weight: float = 1.0) -> None:
        """Count so many more answers of a caller that run or wait, or fewer."""
        self.num_admitted += by
        count = self._admitted.pop(caller, (0, weight))[0] + by
        if count:
            self._admitted[caller] = count, weight

    def _is_within_share(self, num_answers: int, caller: bytes, weight: float) -> bool:
        """Return whether the caller would have no more answers than its share of the places, beside other callers."""
        if not self._admitted.keys() - {caller}:
            return False
        count = self._admitted.get(caller, (0, weight))[0] + num_answers
        total_weight = weight + sum(other[1] for each, other in self._admitted.items() if each != caller)
        return count <= max(1.0, self._capacity * weight / total_weight)

    def _check(self, num_answers: int) -> None:
        """Raise Overloaded when so many more answers cannot be admitted."""
        config, limit = self._config, self._capacity + self._config.max_queue
        wait_s = self.estimate.wait_s(self.num_admitted)
        if self.num_admitted + num_answers > limit:
            why = f"{num_answers} more would pass the limit of {limit}"
        elif not self._may_wait(wait_s):
            why = (
                f"one more would wait for about {wait_s:.3g} s; the queue has been longer than max_queue_wait_s "
                f"{config.max_queue_wait_s:g} and for now lets in only whom a place is free for"
            )
        else:
            return
        self.num_refused += num_answers
        retry_after_s = min(max(wait_s, LEAST_RETRY_S), config.request_timeout_s)
        raise Overloaded(
            f"{self.num_admitted} answers are running or waiting, {why}; try again later",
            retry_after_s=float(f"{retry_after_s:.3g}"),
        )

    def _may_wait(self, wait_s: float) -> bool:
        """A short queue evens out arrivals. Once it has grown longer than max_queue_wait_s, more comes than can be
        served, and waiting helps nobody: until that is over, only who finds a free place is let in. Who finds nobody
        waiting may wait, unless there is overload: with few places a single turn may be longer than the limit.
        """
        now_s = self._clock()
        if self.num_admitted <= self._capacity // 8:
            self._idle_s = now_s
        if now_s - self._full_s >= CALM_S:
            self._overloaded = False
        if self.num_admitted < self._capacity:
            return True
        self._full_s = now_s
        if now_s - self._idle_s < BURST_S:
            return True
        self._overloaded |= self.num_admitted > self._capacity and wait_s > self._config.max_queue_wait_s
        return not self._overloaded

    async def acquire(self, scheduling: Scheduling) -> None:
        """Returns when it is the answer's turn. Cancelled: the place goes to the next."""
        if self.num_running < self._capacity and not self._line:
            self._hold(scheduling.caller)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((scheduling, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(scheduling)
            else:
                self._line = [each for each in self._line if each[1] is not turn]
            raise

    def release(self, scheduling: Scheduling) -> None:
        """Free the place of an answer."""
        self.num_running -= 1
        self._num_held[scheduling.caller] -= 1
        self._num_held += Counter()  # forgets those that hold none
        self._let_in()

    def _hold(self, caller: bytes) -> None:
        self.num_running += 1
        self._num_held[caller] += 1

    def _let_in(self) -> None:
        self._line = [each for each in self._line if not each[1].done()]
        if not self._line or self.num_running >= self._capacity:
            return
        waiting = {scheduling.caller: scheduling.weight for scheduling, _ in self._line}
        self._given.wait(waiting, self._num_held)
        while self._line and self.num_running < self._capacity:
            caller = min((scheduling for scheduling, _ in self._line), key=self._rank).caller
            own = (each for each in self._line if each[0].caller == caller)
            first = min(own, key=lambda each: each[0].priority)
            self._line.remove(first)
            self._given.give(caller, 1.0)
            self._hold(caller)
            first[1].set_result(None)

    def _rank(self, scheduling: Scheduling) -> tuple[float, float]:
        return self._num_held[scheduling.caller] / scheduling.weight, self._given.given(scheduling.caller)
