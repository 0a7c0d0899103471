"""A small pool of processes for work that a request asks for and that could take any time or memory.

A grammar that is compiled and a chat template that is rendered cannot be interrupted in a thread. Here each runs in a
process that ends when it takes too much, or when the client that asked for it leaves; another process takes its place.
One process is started before a request needs it, others when a request finds none free.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.confined.process import LENGTH
from outrider.wire.errors import Overloaded
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

NUM_PROCESSES = 2
"""Processes of a pool at most. Two, so that one caller's work never holds all of them."""
MEMORY_BYTES = 512 << 20
"""Address space that one piece of work may add to its process: the largest of 300 public schemas takes 60 MB."""
MAX_WAIT_S = 10.0
"""Seconds that a request waits for a process at most: ten pieces of work at the default limit, one second each."""
STALLED = 10
"""Seconds by the clock for each CPU second of the limit: what 20 busy processes leave one of them on two cores."""
MIN_STALLED_S = 10.0
"""Seconds by the clock that a piece of work has in any case: STALLED at the default limit, one second."""
END_S = 1.0
"""Seconds that a process may take to end once it has closed its pipe; an idle machine takes 10 ms."""
RETRY_S = 1.0
"""Seconds after which a request that found no process may come again: one piece of work at the default limit."""
START_PAUSE_S = 0.1
"""Seconds before a process that could not start is tried again; each pause is twice the one before. A start takes 0.1
to 0.5 s."""
MAX_START_PAUSE_S = 2.0
"""Seconds of the longest such pause: a request that waits MAX_WAIT_S sees several tries."""


class WorkExceeded(Exception):
    """Work took more than its limit; the message says which, as in "1 s of CPU time"."""

    def __init__(self, message: str, *, is_time: bool = False) -> None:
        super().__init__(message)
        self.is_time = is_time
        """Whether it was its CPU time, not its memory."""


class WorkFailed(Exception):
    """Work raised something that is no refusal."""


class NestsTooDeep(Exception):
    """A request nests deeper than orjson writes, 254 levels."""


class _NotBegun(Exception):
    """The process ended before it had read the request: somebody killed it while it was idle."""


class WorkRefused(Exception):
    """Work raised InvalidRequest; `message` and `param` are its own."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


def encoded(request: Any) -> bytes:
    """Return a request as JSON. Raise NestsTooDeep. Fields of dataclasses are written as those of an object."""
    try:
        return orjson.dumps(request)  # 20 times as fast on 4 MB, where the event loop waits
    except TypeError as error:
        if "ecursion" in str(error):
            raise NestsTooDeep from None
    # A number of more than 64 bits, or half a character: neither is in a body that orjson has read.
    return json.dumps(request, default=_fields).encode("ascii")


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, as orjson writes one."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


@dataclass(eq=False)
class _Waiting:
    """A request that waits for a process."""

    caller: bytes
    granted: asyncio.Future[_Process]


class _Process:
    """One process of the pool and the pipe to it."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    @classmethod
    async def start(cls, *args: str) -> _Process:
        """Return a process that is ready for work. Raise WorkFailed when it ends before that."""
        command = (sys.executable, "-P", "-m", "gateway.confined.process", *args)
        pipe = asyncio.subprocess.PIPE
        process = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
        try:
            await process._read()
        except EOFError:
            raise WorkFailed(f"a process for {args[0]} ended with {await process.exit_code()} at its start") from None
        except asyncio.CancelledError:
            await process.end()
            raise
        return process

    @property
    def has_ended(self) -> bool:
        return self._child.returncode is not None

    async def ask(self, request: bytes) -> dict[str, Any]:
        """Return the reply to `request`. Raise _NotBegun when the process ends before it has read the request, EOFError
        when it ends before the reply.
        """
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(LENGTH.pack(len(request)) + request)
            await self._child.stdin.drain()
            await self._read()
        except (BrokenPipeError, ConnectionResetError, EOFError):
            raise _NotBegun from None
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        head = await self._child.stdout.readexactly(LENGTH.size)  # IncompleteReadError is an EOFError
        data = await self._child.stdout.readexactly(LENGTH.unpack(head)[0])
        reply: dict[str, Any] = json.loads(data)
        return reply

    async def exit_code(self) -> int:
        """Return the exit code of a process that has closed its pipe: -N when signal N ended it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                return await self._child.wait()
        return await self.end()

    async def end(self) -> int:
        """End the process, wait for it, and return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        assert self._child.stdin is not None
        self._child.stdin.close()
        return await self._child.wait()


class ConfinedPool:
    """Runs requests to one module in processes, fairly between callers. One event loop, so no lock.

    A free process goes to the caller for whom the fewest run and, of those alike, the one that has used the least CPU
    time since the pool was last idle.
    """

    def __init__(self, module: str, cpu_s: float, *, memory_bytes: int = MEMORY_BYTES, name: str = "work") -> None:
        """module: has `prepare()` and `work(request)`, see `gateway.confined.process`. cpu_s: CPU seconds of one piece
        of work at most. name: of the work, for errors.
        """
        self._args = (module, str(cpu_s), str(memory_bytes))
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._name = name
        self._idle: list[_Process] = []
        self._waiting: list[_Waiting] = []
        self._num_running: Counter[bytes] = Counter()
        self._spent_s: defaultdict[bytes, float] = defaultdict(float)
        """CPU seconds by caller, since the pool was last idle."""
        self._starting: set[asyncio.Task[None]] = set()
        self._num_processes = 0
        self._is_closed = False

    def start(self) -> None:
        """Start the first process in the background. `run` does so as well."""
        self._start_up_to(1)

    async def close(self) -> None:
        """End all processes. Nothing may run any more."""
        self._is_closed = True
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in self._idle))
        self._idle.clear()

    async def run(self, caller: bytes, request: Any) -> Any:
        """Return the result of the module's `work` for `request`, a JSON value, or JSON text as bytes.

        Cancelled, the work is ended. Raise WorkRefused for an InvalidRequest of the module, WorkExceeded when the work
        takes more than its CPU time or memory, WorkFailed for any other exception, NestsTooDeep for a request that
        cannot be written, Overloaded when no process is free for too long.
        """
        data = request if isinstance(request, bytes) else encoded(request)
        try:
            reply = await self._ask(caller, data)
        except _NotBegun:
            try:
                reply = await self._ask(caller, data)
            except _NotBegun:
                raise WorkFailed(f"two processes for {self._name} ended before they had read a request") from None
        if "result" in reply:
            return reply["result"]
        if "refused" in reply:
            raise WorkRefused(reply["refused"], reply["param"])
        if "out_of_memory" in reply:
            raise WorkExceeded(self._memory_limit())
        raise WorkFailed(reply["failed"])

    async def _ask(self, caller: bytes, data: bytes) -> dict[str, Any]:
        """Return a process's reply to a request. Raise _NotBegun when the process had ended before it."""
        process = await self._acquire(caller)
        try:
            async with asyncio.timeout(max(MIN_STALLED_S, STALLED * self._cpu_s)):
                reply = await process.ask(data)
        except _NotBegun:
            self._num_processes -= 1  # not by the caller's work: the caller may have the other process at once
            self._release(caller)
            self._grant()
            await process.exit_code()
            raise
        except EOFError:
            self._replace(caller, self._cpu_s)
            raise self._exceeded(await process.exit_code()) from None
        except TimeoutError:
            self._replace(caller, self._cpu_s)
            await process.end()
            raise self._overloaded("did not get enough of the processor") from None
        except BaseException:
            self._replace(caller, self._cpu_s)
            await asyncio.shield(process.end())
            raise
        if reply["is_last"]:
            self._replace(caller, reply["cpu_s"])
            await process.end()
        else:
            self._give_back(caller, process, reply["cpu_s"])
        return reply

    def _start_up_to(self, num_wanted: int) -> None:
        """Start processes in the background until there are as many as are wanted, or as a pool may have."""
        while self._num_processes < min(num_wanted, NUM_PROCESSES) and not self._is_closed:
            self._num_processes += 1
            self._start_in_background(None)

    def _start_in_background(self, caller: bytes | None) -> None:
        task = asyncio.create_task(self._start_one(caller))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_one(self, caller: bytes | None) -> None:
        """Start a process. While a request waits, one that cannot start is tried again.

        caller: for whom it counts as running until it is ready; None = for nobody.
        """
        pause_s = START_PAUSE_S
        try:
            while True:
                try:
                    process = await _Process.start(*self._args)
                    break
                except (WorkFailed, OSError) as error:
                    log.error("no process for %s: %s", self._name, error)
                self._release(caller)
                caller = None
                if not self._waiting:
                    self._num_processes -= 1
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_START_PAUSE_S)
        except asyncio.CancelledError:
            self._num_processes -= 1
            self._release(caller)
            raise
        self._idle.append(process)
        self._release(caller)
        self._grant()

    async def _acquire(self, caller: bytes) -> _Process:
        waiting = _Waiting(caller, asyncio.get_running_loop().create_future())
        if not self._num_running and not self._waiting:
            self._spent_s.clear()
        elif caller not in self._callers():
            # A caller that comes anew has spent no less than the others have: nobody saves up.
            self._spent_s[caller] = max(self._spent_s[caller], min(self._spent_s[each] for each in self._callers()))
        self._waiting.append(waiting)
        self._grant()
        try:
            # Not wait_for: when a grant comes in the turn of a timeout or a cancellation, one of the two is lost.
            await asyncio.wait({waiting.granted}, timeout=MAX_WAIT_S)
        except asyncio.CancelledError:
            if waiting.granted.done():
                self._give_back(caller, waiting.granted.result(), 0.0)
            raise
        finally:
            self._waiting.remove(waiting)
        if not waiting.granted.done():
            raise self._overloaded(f"waited {MAX_WAIT_S:g} s for a process")
        return waiting.granted.result()

    def _callers(self) -> set[bytes]:
        return {*self._num_running, *(each.caller for each in self._waiting)}

    def _grant(self) -> None:
        """Give free processes to those that wait."""
        alive = [process for process in self._idle if not process.has_ended]
        self._num_processes -= len(self._idle) - len(alive)
        self._idle = alive
        while pending := [each for each in self._waiting if not each.granted.done() and self._may_run(each.caller)]:
            if not self._idle:
                self._start_up_to(self._num_running.total() + len(pending))
                return
            chosen = min(pending, key=lambda each: (self._num_running[each.caller], self._spent_s[each.caller]))
            self._num_running[chosen.caller] += 1
            chosen.granted.set_result(self._idle.pop())

    def _may_run(self, caller: bytes) -> bool:
        """Return whether the caller may have another process: one that has a name never has all of them."""
        return not caller or self._num_running[caller] < NUM_PROCESSES - 1

    def _give_back(self, caller: bytes, process: _Process, cpu_s: float) -> None:
        """Record the end of a caller's work in a process that is ready for more."""
        self._spent_s[caller] += cpu_s
        self._idle.append(process)
        self._release(caller)
        self._grant()

    def _replace(self, caller: bytes, cpu_s: float) -> None:
        """Record the end of a caller's work whose process ends with it. Until another one has started in its place, it
        counts as running for the caller: to leave early again and again gives nobody more processes than one.
        """
        self._spent_s[caller] += cpu_s
        if self._is_closed:
            self._num_processes -= 1
            self._release(caller)
        else:
            self._start_in_background(caller)

    def _release(self, caller: bytes | None) -> None:
        if caller is None:
            return
        self._num_running[caller] -= 1
        self._num_running += Counter()  # drops callers for whom nothing runs

    def _exceeded(self, code: int) -> Exception:
        """Return what a process that ended with this code in the middle of its work has exceeded."""
        if code == -signal.SIGPROF:
            return WorkExceeded(f"{self._cpu_s:g} s of CPU time", is_time=True)
        if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGKILL):  # SIGKILL is the kernel's, out of memory
            return WorkExceeded(self._memory_limit())
        return WorkFailed(f"the process for {self._name} ended with {code}")

    def _memory_limit(self) -> str:
        return f"{self._memory_bytes >> 20} MiB of memory"

    def _overloaded(self, why: str) -> Overloaded:
        return Overloaded(f"{self._name} {why}; try again later", retry_after_s=RETRY_S)
