"""Who is decoded and who waits."""

from __future__ import annotations

import asyncio

from gateway.admission.queue import AdmissionQueue
from outrider.wire.scheduling import Scheduling
from outrider.wire.settings.config import GatewayConfig


def queue_of(num_places: int) -> AdmissionQueue:
    return AdmissionQueue(GatewayConfig(target="127.0.0.1:9", max_running=num_places))


async def waiting(places: AdmissionQueue, order: list[int], index: int) -> None:
    await places.acquire(Scheduling())
    order.append(index)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_first_come_first_served_within_the_capacity() -> None:
    places, order = queue_of(2), list[int]()
    tasks = [asyncio.create_task(waiting(places, order, index)) for index in range(5)]
    await settle()
    assert order == [0, 1]
    places.release(Scheduling(), 1)
    await settle()
    assert order == [0, 1, 2]
    places.capacity = 4
    await settle()
    assert order == [0, 1, 2, 3, 4]
    assert places.num_running == 4
    await asyncio.gather(*tasks)


async def test_who_gives_up_waiting_takes_no_place_with_them() -> None:
    places, order = queue_of(1), list[int]()
    await places.acquire(Scheduling())
    tasks = [asyncio.create_task(waiting(places, order, index)) for index in range(3)]
    await settle()
    tasks[0].cancel()
    await settle()
    places.release(Scheduling(), 1)
    tasks[1].cancel()  # in the moment in which it is given its place
    await settle()
    assert order == [2]
    places.release(Scheduling(), 1)
    assert places.num_running == 0
    await asyncio.gather(*tasks, return_exceptions=True)
