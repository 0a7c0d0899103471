"""Starts, uses and ends one process of a pool, through its pipes. `pool.py` uses it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

from gateway.confined.process import LENGTH

END_S = 1.0
"""Seconds within which a process must end after it has closed its pipe. On an idle machine it takes 10 ms."""


class NotStarted(Exception):
    """A process of a pool ended before it was ready for work."""


class NotBegun(Exception):
    """A process of a pool was killed while it was idle, so that it ended before it read the request."""


class ChildProcess:
    """A process that does work for a pool, and the pipes to it."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    @classmethod
    async def start(cls, *args: str) -> ChildProcess:
        """Start a process, and return it once it is ready for work. Raises NotStarted if it ends before.

        args: command-line arguments of `gateway.confined.process`.
        """
        command = (sys.executable, "-P", "-m", "gateway.confined.process", *args)
        pipe = asyncio.subprocess.PIPE
        process = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
        try:
            await process._read()
        except EOFError:
            raise NotStarted(f"a process for {args[0]} ended with {await process.exit_code()} at its start") from None
        except asyncio.CancelledError:
            await process.end()
            raise
        return process

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended."""
        return self._child.returncode is not None

    async def send(self, request: bytes) -> dict[str, Any]:
        """Send a request, and return its reply.

        Raises NotBegun if the process ends before it has read the request, EOFError if it ends before the reply.
        """
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(LENGTH.pack(len(request)) + request)
            await self._child.stdin.drain()
            await self._read()
        except (BrokenPipeError, ConnectionResetError, EOFError):
            raise NotBegun from None
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        head = await self._child.stdout.readexactly(LENGTH.size)  # IncompleteReadError is an EOFError
        data = await self._child.stdout.readexactly(LENGTH.unpack(head)[0])
        reply: dict[str, Any] = json.loads(data)
        return reply

    async def exit_code(self) -> int:
        """Return the exit code of a process that has closed its pipe; -N if signal N ended it.

        A process that does not end within END_S is killed.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                return await self._child.wait()
        return await self.end()

    async def end(self) -> int:
        """Kill the process, wait until it has ended, and return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        assert self._child.stdin is not None
        self._child.stdin.close()
        return await self._child.wait()
