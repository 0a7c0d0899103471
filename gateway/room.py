"""Whose turn it is when all the target's slots are in use: first come, first served.

Memory is the target's own business: a slot that has none yet waits inside it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

POLL_S = 0.25
"""The head of the line also tries again by itself: a slot may be freed by another gateway's requests."""


class Room:
    """One per target. Every new slot asks here; while somebody waits, nobody overtakes."""

    def __init__(self) -> None:
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()

    def note_freed(self) -> None:
        """A slot of ours was closed."""
        self._freed.set()

    async def enter(self, try_open: Callable[[], Awaitable[bool]]) -> None:
        """Returns once `try_open` has returned True. Its errors pass through."""
        if not self._line.locked() and await try_open():
            return
        async with self._line:  # asyncio's lock is fair
            while True:
                self._freed.clear()
                if await try_open():
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._freed.wait()
