"""Checks grammars in separate processes, caches the results, and turns refusals into errors.

A cached result is used only for the caller that sent the grammar. The time of a check shows whether the grammar was
cached, and a caller must not learn in that way what others send.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from gateway.confined.pool import ConfinedPool, NestsTooDeep, WorkExceeded, WorkFailed, WorkRefused, encode_request
from gateway.output_format import OutputFormat
from gateway.tools.grammar_request import ToolGrammarRequest
from outrider.wire.errors import InvalidRequest, OutriderError
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

MAX_KEPT_BYTES = 16 << 20
"""Maximal size of the cached grammars of all callers, in bytes: 21 grammars of the largest size (MAX_GRAMMAR_BYTES)."""
ENTRY_BYTES = 512
"""Size of a cache entry without the grammar's text, in bytes, measured with tracemalloc and rounded up."""

EXCEEDED_KEPT_S = 60.0
"""Seconds for which a grammar is refused without a check after its check exceeded the limit of CPU time or memory. A
grammar that is sent over and over then costs a second of CPU time each minute, at the default limit. CPU times vary, so
a grammar near the limit may pass later."""


class CheckerPool(Protocol):
    """Interface of the group of processes in which a GrammarChecker checks grammars. `ConfinedPool` implements it."""

    def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, caller: bytes, request: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class GrammarResult:
    """Result of checking a grammar: passed, or refused with a reason."""

    grammar: str
    refusal: str | None = None
    """Reason why the grammar is refused (`grammar` is then empty); None if it passed."""
    param: str | None = None
    until_s: float = math.inf
    """Monotonic time, in seconds, until which this result is valid. Afterwards the grammar is checked again."""

    def passed_grammar(self) -> str:
        """Return the text of the grammar. Raises InvalidRequest if it was refused."""
        if self.refusal is not None:
            raise InvalidRequest(self.refusal, param=self.param)
        return self.grammar

    @property
    def size_bytes(self) -> int:
        """Approximate size of this result as an entry of the cache, in bytes.

        A character counts as one byte, because grammars are mostly ASCII.
        """
        return ENTRY_BYTES + len(self.grammar) + len(self.refusal or "")


class GrammarResults:
    """A cache of the results of grammar checks, by caller and digest of the checked format, with at most `max_bytes`
    bytes.

    If it is full, the least recently used result of the caller with the most bytes is dropped, so that no caller evicts
    the results of callers with fewer bytes.
    """

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[bytes, OrderedDict[bytes, GrammarResult]] = {}
        self._num_bytes: Counter[bytes] = Counter()

    def get(self, caller: bytes, digest: bytes) -> GrammarResult | None:
        """Return a caller's cached result for the checked format with this digest; None if there is none that is still
        valid.
        """
        of_caller = self._kept.get(caller)
        if of_caller is None:
            return None
        result = of_caller.get(digest)
        if result is None or time.monotonic() > result.until_s:
            return None
        of_caller.move_to_end(digest)
        return result

    def keep(self, caller: bytes, digest: bytes, result: GrammarResult) -> None:
        """Cache the result of a check. If the cache is full, other results are dropped."""
        of_caller = self._kept.setdefault(caller, OrderedDict())
        previous = of_caller.pop(digest, None)
        if previous is not None:
            self._num_bytes[caller] -= previous.size_bytes
        of_caller[digest] = result
        self._num_bytes[caller] += result.size_bytes
        while self._num_bytes.total() > self._max_bytes:
            self._drop_one()

    def _drop_one(self) -> None:
        ((caller, _),) = self._num_bytes.most_common(1)
        _, result = self._kept[caller].popitem(last=False)
        self._num_bytes[caller] -= result.size_bytes
        if not self._kept[caller]:
            del self._kept[caller], self._num_bytes[caller]


@dataclass(slots=True)
class _Check:
    task: asyncio.Task[GrammarResult]
    num_waiting: int = 0


class GrammarChecker:
    """Checks the grammars of requests in other processes, and caches the results. One event loop uses it, without a
    lock.

    Equal concurrent requests of a caller share one check. A check is cancelled if no request waits for it any more. The
    refusal of a grammar that exceeded a limit is cached, too, so that sending it again costs nothing.
    """

    def __init__(self, pool: CheckerPool) -> None:
        self._pool = pool
        self._results = GrammarResults()
        self._checks: dict[tuple[bytes, bytes], _Check] = {}
        """Running checks for which a request waits, by caller and digest of the request."""
        self._tasks: set[asyncio.Task[GrammarResult]] = set()
        """Tasks of all checks, including those being cancelled."""

    def start(self) -> None:
        """Start the checking processes, so that the first request does not wait for their start."""
        self._pool.start()

    async def close(self) -> None:
        """Cancel the checks and stop the processes. Nothing may be checked afterwards."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool.close()

    async def output(self, caller: bytes, output: OutputFormat) -> str:
        """Return the checked grammar of an output format.

        caller: digest of the caller, who gets at most one of the checking processes at a time; empty without one.
        Raises InvalidRequest, which names the field, or Overloaded if no process becomes free in time.
        """
        return await self._checked(caller, {"format": output}, output.param)

    async def tools(self, caller: bytes, request: ToolGrammarRequest) -> str:
        """Return the checked grammar of an output that may call tools.

        caller: digest of the caller, who gets at most one of the checking processes at a time; empty without one.
        Raises InvalidRequest, which names the field, or Overloaded if no process becomes free in time.
        """
        return await self._checked(caller, {"tools": request}, "tools")

    async def _checked(self, caller: bytes, request: dict[str, Any], param: str) -> str:
        data = _encoded(request, param)
        digest = blake2b(data, digest_size=32).digest()
        result = self._results.get(caller, digest)
        if result is None:
            result = await self._shared(caller, digest, data, param)
        return result.passed_grammar()

    async def _shared(self, caller: bytes, digest: bytes, data: bytes, param: str) -> GrammarResult:
        key = (caller, digest)
        check = self._checks.get(key)
        if check is None:
            task = asyncio.create_task(self._check(caller, digest, data, param))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            check = self._checks[key] = _Check(task)
        check.num_waiting += 1
        try:
            return await asyncio.shield(check.task)
        finally:
            check.num_waiting -= 1
            if not check.num_waiting:
                self._checks.pop(key, None)
                check.task.cancel()

    async def _check(self, caller: bytes, digest: bytes, data: bytes, param: str) -> GrammarResult:
        try:
            result = GrammarResult(await self._pool.run(caller, data))
        except WorkRefused as refused:
            result = GrammarResult("", refused.message, refused.param)
        except WorkExceeded as exceeded:
            setting = ""
            if exceeded.is_time:
                setting = " (max_compile_s)"
            why = f"{param} takes more than {exceeded} to check{setting}; make it smaller"
            result = GrammarResult("", why, param, time.monotonic() + EXCEEDED_KEPT_S)
        except WorkFailed as failed:
            log.error("a grammar could not be checked: %s", failed)
            raise OutriderError("internal error; the gateway's log has the place") from None
        self._results.keep(caller, digest, result)
        return result


def _encoded(request: dict[str, Any], param: str) -> bytes:
    try:
        return encode_request(request)
    except NestsTooDeep:
        raise InvalidRequest(f"{param} nests too deep; make it flatter", param=param) from None


def create_checker(max_compile_s: float) -> GrammarChecker:
    """Return a grammar checker with processes of its own.

    max_compile_s: limit of the CPU time of one check, in seconds.
    """
    pool = ConfinedPool("gateway.grammar_work", max_compile_s, name="checking a grammar")
    return GrammarChecker(pool)
