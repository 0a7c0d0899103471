"""Wait until something holds."""

import asyncio
import time
from collections.abc import Callable

TIMEOUT_S = 30.0
POLL_S = 0.02


def wait_until(holds: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Return once it holds. Fail with `what` where that takes longer."""
    give_up_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_s, what
        time.sleep(POLL_S)


async def until(holds: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Return once it holds, which is asked on the event loop. Fail where that takes longer."""
    give_up_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_s
        await asyncio.sleep(POLL_S)
