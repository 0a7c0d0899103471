"""Who waits, and who is refused, where calls are many. Against a server: tests/service/test_call_room.py."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from outrider.wire.errors import Overloaded
from outrider.wire.transport.call_limits import CallLimits, CallQueue


async def test_a_caller_waits_behind_its_own_share_alone() -> None:
    turns = CallQueue(4, 2, CallLimits("wait", 100, 5))
    async with AsyncExitStack() as held:
        for _ in range(2):
            await held.enter_async_context(turns.one("a"))
        waiting = [asyncio.create_task(held.enter_async_context(turns.one("a"))) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="5 wait, 5 of this client; at most 100 and 5 are allowed"):
            await held.enter_async_context(turns.one("a"))
        async with asyncio.timeout(1), turns.one("b"):
            assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    async with asyncio.timeout(1), turns.one("a"), turns.one("a"):
        pass


def test_places_are_few_in_all_and_are_given_back() -> None:
    places = CallLimits("are open", 2, 2)
    refused = pytest.raises(Overloaded, match="2 are open, 0 of this client")
    with places.one("a"), places.one("b"), refused, places.one("c"):
        pass
    with places.one("a"), places.one("a"):
        pass
