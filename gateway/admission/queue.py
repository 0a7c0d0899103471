"""Admits choices to a queue, and refuses those that would wait too long. One queue for each served model. No I/O.

A caller that has no more than its share of the places is always admitted: another caller's backlog never refuses it. A
free place goes to the caller with the fewest places held, divided by its weight; among equals to the caller that was
given the fewest places so far; then to the first that came. Among the choices of that caller, the one with the lowest
priority number goes first.

    # A has weight 2 and holds 3 places, B has weight 1 and holds 2: A is next, since 3 / 2 < 2 / 1
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
"""Seconds of a burst. It begins when a request arrives while at most an eighth of the places are taken. During a burst,
requests may fill the whole queue whatever the expected wait: the time is long enough for what one caller sends at once,
and too short for a constant load of many callers."""
CALM_S = 1.0
"""Seconds after which an overload counts as over, if no request has arrived while all places were taken."""
MIN_RETRY_S = 1.0
"""Shortest time after which a refused caller is asked to retry, in seconds."""
MEMORY = 32
"""About how many of the choices that ended last determine the mean time for which a choice holds its place."""


class QueueEstimate:
    """An estimate of how long a new choice waits for one of `num_places` places.

    It is computed from how long previous choices held their places.
    """

    def __init__(self, num_places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_places = num_places
        self._clock = clock
        self._mean_s = 0.0
        self._num_ended = 0
        self._num_running = 0
        self._sum_began_s = 0.0
        """Sum of the monotonic times at which the running choices got their places, in seconds."""

    @contextmanager
    def served(self) -> Iterator[None]:
        """Context manager: measure how long a choice holds its place. The block begins when the choice gets the place
        and ends when it frees the place.
        """
        began_s = self._clock()
        self._num_running += 1
        self._sum_began_s += began_s
        try:
            yield
        finally:
            self._num_running -= 1
            self._sum_began_s -= began_s
            if not self._num_running:
                self._sum_began_s = 0.0  # without the errors of rounding
            self._num_ended += 1
            held_s = self._clock() - began_s
            self._mean_s += (held_s - self._mean_s) / min(self._num_ended, MEMORY)

    def service_s(self) -> float:
        """Return an estimate of how long a choice holds its place, in seconds; 0 before the first choice got a place.

        It is the mean of the choices that have ended, or the mean time that the running ones have held their places,
        whichever is longer. So it grows when workers hang and no choice ends.
        """
        if not self._num_running:
            return self._mean_s
        return max(self._mean_s, self._clock() - self._sum_began_s / self._num_running)

    def wait_s(self, num_ahead: int) -> float:
        """Return the seconds until a new choice gets a place, if `num_ahead` choices run or wait before it.

        # 4 places, 9 ahead, 2 s each: 6 of them must end first, 4 in every 2 s, which takes 3 s
        """
        num_to_end = max(0, num_ahead - self.num_places + 1)
        return num_to_end * self.service_s() / max(1, self.num_places)


class AdmissionQueue:
    """The queue of one model: choices that run, and choices that wait for a place.

    `capacity`, the number of places, follows the number of targets. When it falls, running choices keep their places.
    """

    def __init__(self, config: GatewayConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.estimate = QueueEstimate(config.max_running, clock)
        self.num_admitted = 0
        """Number of choices of this model that run or wait."""
        self._admitted: dict[bytes, tuple[int, float]] = {}
        """Number of choices that run or wait, and weight, by caller. Callers without such choices have no entry."""
        self.num_running = 0
        self.num_refused = 0
        """Number of choices that the queue has refused since the gateway started."""
        self._config = config
        self._clock = clock
        self._capacity = config.max_running
        self._waiting: list[tuple[Scheduling, asyncio.Future[None]]] = []
        """Waiting choices, in the order of arrival."""
        self._num_held: Counter[bytes] = Counter()
        """Number of places held, by caller. Callers without a place have no entry."""
        self._served = VirtualTokens()
        """Number of places given so far, by caller."""
        self._idle_s = -math.inf
        """Monotonic time of the last arrival at an almost idle model, in seconds."""
        self._full_s = -math.inf
        """Monotonic time of the last arrival that found all places taken, in seconds."""
        self._is_overloaded = False

    @property
    def capacity(self) -> int:
        """Number of places: choices that may run at once."""
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self._capacity = self.estimate.num_places = capacity
        self._start_waiting()

    @property
    def num_queued(self) -> int:
        """Number of choices that wait for a place."""
        return self.num_admitted - self.num_running

    def admit(self, num_choices: int, caller: bytes = b"", weight: float = 1.0) -> None:
        """Let `num_choices` more choices of a caller into the queue, where each waits for a place.

        caller, weight: digest and weight of the caller's API key; the defaults stand for no key. Raises Overloaded,
        with the seconds after which to retry, if the queue is full or the wait would be too long.
        """
        if not self._is_within_share(num_choices, caller, weight):
            self._check(num_choices)
        self.change(num_choices, caller, weight)

    def change(self, by: int, caller: bytes = b"", weight: float = 1.0) -> None:
        """Add `by`, negative for choices that have ended, to the number of a caller's choices that run or wait. No
        limit is checked.

        caller, weight: digest and weight of the caller's API key; the defaults stand for no key. The caller's share of
        the places is proportional to the weight.
        """
        self.num_admitted += by
        count = self._admitted.pop(caller, (0, weight))[0] + by
        if count:
            self._admitted[caller] = count, weight

    def _is_within_share(self, num_choices: int, caller: bytes, weight: float) -> bool:
        """The share of a caller is its weight over that of all callers with admitted choices.

        # capacity 12, weights 1 and 2: 4 and 8 places
        """
        if not self._admitted.keys() - {caller}:
            return False
        num_admitted, _ = self._admitted.get(caller, (0, weight))
        other_weights = [of_other for other, (_, of_other) in self._admitted.items() if other != caller]
        total_weight = weight + sum(other_weights)
        return num_admitted + num_choices <= max(1.0, self._capacity * weight / total_weight)

    def _check(self, num_choices: int) -> None:
        config = self._config
        limit = self._capacity + config.max_queue
        wait_s = self.estimate.wait_s(self.num_admitted)
        if self.num_admitted + num_choices > limit:
            why = f"{num_choices} more would pass the limit of {limit}"
        elif not self._may_wait(wait_s):
            why = (
                f"one more would wait for about {wait_s:.3g} s; the queue has been longer than max_queue_wait_s "
                f"{config.max_queue_wait_s:g} and for now lets in only whom a place is free for"
            )
        else:
            return
        self.num_refused += num_choices
        retry_after_s = min(max(wait_s, MIN_RETRY_S), config.request_timeout_s)
        raise Overloaded(
            f"{self.num_admitted} answers are running or waiting, {why}; try again later",
            retry_after_s=float(f"{retry_after_s:.3g}"),
        )

    def _may_wait(self, wait_s: float) -> bool:
        """A short queue evens out arrivals. A long one means that more arrives than can be served.

        Long is an expected wait above max_queue_wait_s. Waiting then helps nobody: until the overload is over, only
        choices that find a free place are admitted. Without an overload, a choice that finds an empty queue may wait,
        because with few places one service time may exceed the limit.
        """
        now_s = self._clock()
        if self.num_admitted <= self._capacity // 8:
            self._idle_s = now_s
        if now_s - self._full_s >= CALM_S:
            self._is_overloaded = False
        if self.num_admitted < self._capacity:
            return True
        self._full_s = now_s
        if now_s - self._idle_s < BURST_S:
            return True
        self._is_overloaded |= self.num_admitted > self._capacity and wait_s > self._config.max_queue_wait_s
        return not self._is_overloaded

    async def acquire(self, scheduling: Scheduling) -> None:
        """Wait until a choice gets a place. If the waiting task is cancelled, the place goes to the next choice."""
        if self.num_running < self._capacity and not self._waiting:
            self._hold(scheduling.caller)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((scheduling, place))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release(scheduling)
            else:
                self._waiting = [waiting for waiting in self._waiting if waiting[1] is not place]
            raise

    def release(self, scheduling: Scheduling) -> None:
        """Free the place of a choice that has ended. The next waiting choice gets it."""
        self.num_running -= 1
        self._num_held[scheduling.caller] -= 1
        self._num_held += Counter()  # forgets those that hold none
        self._start_waiting()

    def _hold(self, caller: bytes) -> None:
        self.num_running += 1
        self._num_held[caller] += 1

    def _start_waiting(self) -> None:
        self._waiting = [waiting for waiting in self._waiting if not waiting[1].done()]
        if not self._waiting or self.num_running >= self._capacity:
            return
        weights = {scheduling.caller: scheduling.weight for scheduling, _ in self._waiting}  # of the callers that wait
        self._served.wait(weights, self._num_held)
        while self._waiting and self.num_running < self._capacity:
            caller = min((scheduling for scheduling, _ in self._waiting), key=self._rank).caller
            of_caller = [waiting for waiting in self._waiting if waiting[0].caller == caller]
            first = min(of_caller, key=lambda waiting: waiting[0].priority)
            self._waiting.remove(first)
            self._served.add_served(caller, 1.0)
            self._hold(caller)
            _, place = first
            place.set_result(None)

    def _rank(self, scheduling: Scheduling) -> tuple[float, float]:
        return self._num_held[scheduling.caller] / scheduling.weight, self._served.served(scheduling.caller)
