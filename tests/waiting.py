"""Wait until something holds."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

TIMEOUT_S = 30.0
POLL_S = 0.02

T = TypeVar("T")


def wait_until(holds: Callable[[], T], what: str, timeout_s: float = TIMEOUT_S) -> T:
    """Return once it holds, with what it returned. Fail with `what` where that takes longer."""
    for pause_s in _pauses(timeout_s):
        if found := holds():
            return found
        time.sleep(pause_s)
    raise AssertionError(what)


def wait_until_none(left: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Return once nothing is left. Fail with what is where that takes longer."""
    found: object = None
    for pause_s in _pauses(timeout_s):
        if not (found := left()):
            return
        time.sleep(pause_s)
    raise AssertionError(f"left: {found}")


async def until(holds: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T:
    """As `wait_until`, asked on the event loop."""
    for pause_s in _pauses(timeout_s):
        if found := holds():
            return found
        await asyncio.sleep(pause_s)
    raise AssertionError("it does not hold")


def _pauses(timeout_s: float) -> Iterator[float]:
    """Until the time is over, short ones first."""
    give_up_s, pause_s = time.monotonic() + timeout_s, 0.001
    while time.monotonic() < give_up_s:
        yield pause_s
        pause_s = min(2 * pause_s, POLL_S)
