"""Who is decoded and who waits, and for how long."""

import asyncio
from contextlib import ExitStack

import pytest

from gateway.admission.queue import AdmissionQueue, QueueEstimate
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.settings.config import GatewayConfig
from tests.unit.clock import Clock


def queue_of(num_places: int) -> AdmissionQueue:
    return AdmissionQueue(GatewayConfig(target="127.0.0.1:9", max_running=num_places))


async def waiting(places: AdmissionQueue, order: list[int], index: int, whose: Scheduling | None = None) -> None:
    await places.acquire(whose or Scheduling())
    order.append(index)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_first_come_first_served_within_the_capacity() -> None:
    places, order = queue_of(2), list[int]()
    tasks = [asyncio.create_task(waiting(places, order, index)) for index in range(5)]
    await settle()
    assert order == [0, 1]
    places.release(Scheduling())
    await settle()
    assert order == [0, 1, 2]
    places.capacity = 4
    await settle()
    assert order == [0, 1, 2, 3, 4]
    assert places.num_running == 4
    await asyncio.gather(*tasks)


async def served(places: AdmissionQueue, order: str, weights: dict[str, float] | None = None) -> str:
    """Return in which order those of `order` get the only place, one after the other; capitals are of priority -1."""
    got = list[str]()

    def scheduling(name: str) -> Scheduling:
        weight, priority = (weights or {}).get(name.lower(), 1.0), -int(name.isupper())
        return Scheduling(name.lower().encode(), weight, priority)

    async def wait(name: str) -> None:
        await places.acquire(scheduling(name))
        got.append(name)

    await places.acquire(Scheduling())
    tasks = [asyncio.create_task(wait(name)) for name in order]
    await settle()
    places.release(Scheduling())
    for number in range(len(order)):
        await settle()
        places.release(scheduling(got[number]))
    await asyncio.gather(*tasks)
    return "".join(got)


async def test_places_go_round_between_callers_by_weight_and_within_one_by_priority() -> None:
    assert await served(queue_of(1), "aaaaabb") == "ababaaa"
    assert await served(queue_of(1), "aaaaaaabb", weights={"b": 0.5}) == "abaabaaaa"
    assert await served(queue_of(1), "aaAaA") == "AAaaa"
    assert await served(queue_of(1), "abcBdC") == "aBCdbc", "and not between them"


async def test_places_are_held_by_weight() -> None:
    places, order = queue_of(1), list[int]()
    await places.acquire(Scheduling())
    both = [(index, Scheduling(b"a", 3.0)) for index in range(8)] + [(9, Scheduling(b"b"))] * 8
    tasks = [asyncio.create_task(waiting(places, order, *each)) for each in both]
    await settle()
    places.capacity = 9
    await settle()
    assert len(order) == 8 and order.count(9) == 2
    places.capacity = 17
    await asyncio.gather(*tasks)


async def test_a_caller_with_two_streams_has_its_share_among_many_with_one() -> None:
    """All ask again after each answer; the places are fewer than the callers."""
    places, got = queue_of(4), list[bytes]()
    callers = [b"two", b"two", *(b"%d" % index for index in range(8))]

    async def ask(caller: bytes) -> None:
        for _ in range(20):
            await places.acquire(Scheduling(caller))
            got.append(caller)
            await settle()
            places.release(Scheduling(caller))

    await asyncio.gather(*map(ask, callers))
    assert got[:100].count(b"two") >= 10


async def test_who_gives_up_waiting_takes_no_place_with_them() -> None:
    places, order = queue_of(1), list[int]()
    await places.acquire(Scheduling())
    tasks = [asyncio.create_task(waiting(places, order, index)) for index in range(3)]
    await settle()
    tasks[0].cancel()
    await settle()
    places.release(Scheduling())
    tasks[1].cancel()  # in the moment in which it is given its place
    await settle()
    assert order == [2]
    places.release(Scheduling())
    assert places.num_running == 0
    await asyncio.gather(*tasks, return_exceptions=True)


def serve(estimate: QueueEstimate, clock: Clock, seconds: float) -> None:
    with estimate.served():
        clock.now += seconds


def test_a_free_place_is_not_waited_for_and_each_ahead_adds_its_share() -> None:
    clock = Clock()
    estimate = QueueEstimate(4, clock)
    assert estimate.wait_s(100) == 0.0, "nothing is known"
    serve(estimate, clock, 8.0)
    assert [estimate.wait_s(ahead) for ahead in (0, 3, 4, 5, 103)] == [0.0, 0.0, 2.0, 4.0, 200.0]


def test_answers_that_do_not_end_count_by_their_age() -> None:
    clock = Clock()
    estimate = QueueEstimate(2, clock)
    serve(estimate, clock, 1.0)
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(estimate.served())
        clock.now += 60.0
        assert estimate.wait_s(2) == pytest.approx(30.0)
    assert estimate.service_s() > 30.0, "and when they have ended, by what they took"
