"""A small pool of processes for work on callers' input that could take any time or memory.

Compiling a grammar and rendering a chat template cannot be interrupted in a thread. Here each runs in a process, which
is ended if the work exceeds a limit or the client disconnects; another process replaces it. One process is started in
advance, others when a request finds none free. `gateway.chat_template` and `gateway.grammar_checker` each use one pool.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.confined.child import ChildProcess, NotBegun, NotStarted
from outrider.wire.errors import Overloaded
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

NUM_PROCESSES = 2
"""Maximal number of processes of a pool. A caller with an API key has at most one of them at a time, so that another is
left for other callers."""
MEMORY_BYTES = 512 << 20
"""Maximal address space that one piece of work may add to its process, in bytes. The largest of 300 public schemas
takes 60 MB."""
MAX_WAIT_S = 10.0
"""Maximal time for which a request waits for a process, in seconds. Ten pieces of work that each reach the default
limit, one second of CPU time, take as long."""
MAX_ELAPSED_FACTOR = 10
"""Elapsed time that a piece of work may take, as a multiple of its limit of CPU time: with 20 busy processes on two
cores, each process gets a tenth of a core."""
MIN_ELAPSED_LIMIT_S = 10.0
"""Elapsed time, in seconds, that a piece of work may take at least, however low its limit of CPU time."""
RETRY_S = 1.0
"""Seconds after which a request that got no process may be sent again. It is the default limit of the CPU time of one
piece of work."""
START_PAUSE_S = 0.1
"""Seconds between a failed start of a process and the next attempt. Each further pause is twice as long. A start takes
0.1 to 0.5 s."""
MAX_START_PAUSE_S = 2.0
"""Longest pause between two attempts to start a process, in seconds. Several attempts fit into MAX_WAIT_S."""


class WorkExceeded(Exception):
    """A piece of work exceeded its limit of CPU time or memory. The message is the limit, such as "1 s of CPU time"."""

    def __init__(self, message: str, *, is_time: bool = False) -> None:
        super().__init__(message)
        self.is_time = is_time
        """True if the limit of CPU time was exceeded, False if it was the limit of memory."""


class WorkFailed(Exception):
    """The function `work` raised an error other than InvalidRequest, or its process ended without a reply."""


class NestsTooDeep(Exception):
    """The JSON of a request for a pool nests deeper than 254 levels, the limit of orjson."""


class WorkRefused(Exception):
    """The function `work` raised InvalidRequest. `message` and `param` are those of that error."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


def encode_request(request: Any) -> bytes:
    """Return a request as JSON. A dataclass becomes an object of its fields.

    Raises NestsTooDeep for more than 254 levels.
    """
    try:
        return orjson.dumps(request)  # 20 times as fast as json, which blocks the event loop for 4 MB
    except TypeError as error:
        if "ecursion" in str(error):
            raise NestsTooDeep from None
    # For integers of more than 64 bits and lone surrogates. Neither is in a body that orjson has read.
    return json.dumps(request, default=_fields).encode("ascii")


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


@dataclass(eq=False)
class _Waiting:
    caller: bytes
    granted: asyncio.Future[ChildProcess]
    """Future of the process that the request gets."""


class ConfinedPool:
    """Runs the function `work` of one module in other processes, with limits of CPU time and memory. One event loop
    uses it, so it needs no locks.

    A process that becomes free takes a request of the caller for whom the fewest processes run; among equals, of the
    caller that has used the least CPU time since the pool was last idle.
    """

    def __init__(self, module: str, cpu_s: float, *, memory_bytes: int = MEMORY_BYTES, name: str = "work") -> None:
        """Create a pool without processes.

        module: name of a module with `prepare()` and `work(request)`, see `gateway.confined.process`. cpu_s: limit of
        the CPU time of one piece of work, in seconds. memory_bytes: limit of the address space that one piece of work
        adds, in bytes. name: name of the work, for errors.
        """
        self._args = (module, str(cpu_s), str(memory_bytes))
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._name = name
        self._idle: list[ChildProcess] = []
        self._waiting: list[_Waiting] = []
        self._num_running: Counter[bytes] = Counter()
        self._spent_s: defaultdict[bytes, float] = defaultdict(float)
        """CPU time that each caller has used since the pool was last idle, in seconds."""
        self._starting: set[asyncio.Task[None]] = set()
        self._num_processes = 0
        self._is_closed = False

    def start(self) -> None:
        """Start the first process in the background, so that the first `run` does not wait for it."""
        self._start_up_to(1)

    async def close(self) -> None:
        """End all processes. `run` must not be called afterwards."""
        self._is_closed = True
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in self._idle))
        self._idle.clear()

    async def run(self, caller: bytes, request: Any) -> Any:
        """Run the module's `work` for a request in a process, and return its result.

        caller: digest of the caller for whom the work is done; empty without one. request: a JSON value, or its text as
        bytes. If this call is cancelled, the process is killed.

        Raises WorkRefused if the module raises InvalidRequest, WorkExceeded if the work exceeds its limit of CPU time
        or memory, WorkFailed for any other exception, NestsTooDeep if the request nests too deep for JSON, and
        Overloaded if no process becomes free within MAX_WAIT_S or the work gets too little CPU time.
        """
        data = request
        if not isinstance(request, bytes):
            data = encode_request(request)
        try:
            reply = await self._send(caller, data)
        except NotBegun:
            try:
                reply = await self._send(caller, data)
            except NotBegun:
                raise WorkFailed(f"two processes for {self._name} ended before they had read a request") from None
        if "result" in reply:
            return reply["result"]
        if "refused" in reply:
            raise WorkRefused(reply["refused"], reply["param"])
        if "out_of_memory" in reply:
            raise WorkExceeded(self._memory_limit())
        raise WorkFailed(reply["failed"])

    async def _send(self, caller: bytes, data: bytes) -> dict[str, Any]:
        process = await self._acquire(caller)
        try:
            async with asyncio.timeout(max(MIN_ELAPSED_LIMIT_S, MAX_ELAPSED_FACTOR * self._cpu_s)):
                reply = await process.send(data)
        except NotBegun:
            self._num_processes -= 1  # the caller's work did not end it: the caller may have the other one at once
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
            self._return_process(caller, process, reply["cpu_s"])
        return reply

    def _start_up_to(self, num_processes: int) -> None:
        while self._num_processes < min(num_processes, NUM_PROCESSES) and not self._is_closed:
            self._num_processes += 1
            self._start_in_background(None)

    def _start_in_background(self, caller: bytes | None) -> None:
        task = asyncio.create_task(self._start_one(caller))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_one(self, caller: bytes | None) -> None:
        """Start a process; try again while a request waits. `caller`: counts as running it until it is ready."""
        pause_s = START_PAUSE_S
        try:
            while True:
                try:
                    process = await ChildProcess.start(*self._args)
                    break
                except (NotStarted, OSError) as error:
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

    async def _acquire(self, caller: bytes) -> ChildProcess:
        waiting = _Waiting(caller, asyncio.get_running_loop().create_future())
        if not self._num_running and not self._waiting:
            self._spent_s.clear()
        elif caller not in self._callers():
            # A new caller starts at the least that the others have spent: time without work earns no priority.
            min_spent_s = min(self._spent_s[other] for other in self._callers())
            self._spent_s[caller] = max(self._spent_s[caller], min_spent_s)
        self._waiting.append(waiting)
        self._grant()
        try:
            # Not wait_for: of a grant and a timeout or cancellation in one turn of the event loop, it loses one.
            await asyncio.wait({waiting.granted}, timeout=MAX_WAIT_S)
        except asyncio.CancelledError:
            if waiting.granted.done():
                self._return_process(caller, waiting.granted.result(), 0.0)
            raise
        finally:
            self._waiting.remove(waiting)
        if not waiting.granted.done():
            raise self._overloaded(f"waited {MAX_WAIT_S:g} s for a process")
        return waiting.granted.result()

    def _callers(self) -> set[bytes]:
        callers = set(self._num_running)
        for waiting in self._waiting:
            callers.add(waiting.caller)
        return callers

    def _grant(self) -> None:
        """Give idle processes to requests that wait, as far as both last."""
        self._forget_ended()
        while True:
            grantable = self._grantable()
            if not grantable:
                return
            if not self._idle:
                self._start_up_to(self._num_running.total() + len(grantable))
                return
            chosen = min(grantable, key=self._precedence)
            self._num_running[chosen.caller] += 1
            chosen.granted.set_result(self._idle.pop())

    def _forget_ended(self) -> None:
        alive = [process for process in self._idle if not process.has_ended]
        self._num_processes -= len(self._idle) - len(alive)
        self._idle = alive

    def _grantable(self) -> list[_Waiting]:
        grantable = []
        for waiting in self._waiting:
            if not waiting.granted.done() and self._may_run(waiting.caller):
                grantable.append(waiting)
        return grantable

    def _precedence(self, waiting: _Waiting) -> tuple[int, float]:
        return self._num_running[waiting.caller], self._spent_s[waiting.caller]

    def _may_run(self, caller: bytes) -> bool:
        """Whether the caller may have another process. A caller with a name never has all of them."""
        return not caller or self._num_running[caller] < NUM_PROCESSES - 1

    def _return_process(self, caller: bytes, process: ChildProcess, cpu_s: float) -> None:
        self._spent_s[caller] += cpu_s
        self._idle.append(process)
        self._release(caller)
        self._grant()

    def _replace(self, caller: bytes, cpu_s: float) -> None:
        """Start another process for one that ends with a caller's work. Until it is ready, it counts as running for the
        caller: a client that keeps disconnecting does not get more processes than one.
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
        """Return the error for work whose process ended with this exit code in the middle of it."""
        if code == -signal.SIGPROF:
            return WorkExceeded(f"{self._cpu_s:g} s of CPU time", is_time=True)
        if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGKILL):  # SIGKILL is the kernel's, out of memory
            return WorkExceeded(self._memory_limit())
        return WorkFailed(f"the process for {self._name} ended with {code}")

    def _memory_limit(self) -> str:
        return f"{self._memory_bytes >> 20} MiB of memory"

    def _overloaded(self, why: str) -> Overloaded:
        return Overloaded(f"{self._name} {why}; try again later", retry_after_s=RETRY_S)
