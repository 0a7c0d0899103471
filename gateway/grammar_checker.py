"""The gateway's way to the processes that check grammars: what has been checked is kept, and refusals become errors.

What is kept belongs to the caller that sent it. Whether a grammar was checked before shows in the time that it takes,
and callers must not learn from that what others send.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from gateway.confined.pool import ConfinedPool, NestsTooDeep, WorkExceeded, WorkFailed, WorkRefused, encoded
from gateway.output_format import OutputFormat
from gateway.tools.grammar_request import ToolGrammarRequest
from outrider.wire.errors import InvalidRequest, OutriderError
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

MAX_KEPT_BYTES = 16 << 20
"""Bytes of the grammars that are kept, of all callers together: 21 of the largest (MAX_GRAMMAR_BYTES)."""
ENTRY_BYTES = 512
"""Bytes of an entry besides its text, measured with tracemalloc and rounded up."""

EXCEEDED_KEPT_S = 60.0
"""Seconds for which a grammar is refused unchecked after it took more than the limit: one that is sent again and again
then costs a sixtieth of a core at the default limit. CPU times vary, so one near the limit may pass later."""


class Pool(Protocol):
    """What is used of a ConfinedPool."""

    def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, caller: bytes, request: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """What checking a grammar came to."""

    grammar: str
    refusal: str | None = None
    """Why it is refused; then `grammar` is empty."""
    param: str | None = None
    until_s: float = math.inf
    """Monotonic time after which it is checked again."""

    def result(self) -> str:
        """Return the grammar. Raise InvalidRequest for one that is refused."""
        if self.refusal is not None:
            raise InvalidRequest(self.refusal, param=self.param)
        return self.grammar

    @property
    def size_bytes(self) -> int:
        """Return about how many bytes it takes: a byte a character, for grammars are mostly ASCII."""
        return ENTRY_BYTES + len(self.grammar) + len(self.refusal or "")


class Verdicts:
    """Verdicts by caller and digest of the request, at most MAX_KEPT_BYTES of them.

    The oldest of the caller that has the most is dropped first, so that nobody drops those of callers with fewer.
    """

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[bytes, OrderedDict[bytes, Verdict]] = {}
        self._num_bytes: Counter[bytes] = Counter()

    def get(self, caller: bytes, digest: bytes) -> Verdict | None:
        own = self._kept.get(caller)
        verdict = None if own is None else own.get(digest)
        if own is None or verdict is None or time.monotonic() > verdict.until_s:
            return None
        own.move_to_end(digest)
        return verdict

    def keep(self, caller: bytes, digest: bytes, verdict: Verdict) -> None:
        own = self._kept.setdefault(caller, OrderedDict())
        previous = own.pop(digest, None)
        if previous is not None:
            self._num_bytes[caller] -= previous.size_bytes
        own[digest] = verdict
        self._num_bytes[caller] += verdict.size_bytes
        while self._num_bytes.total() > self._max_bytes:
            self._drop_one()

    def _drop_one(self) -> None:
        ((caller, _),) = self._num_bytes.most_common(1)
        _, verdict = self._kept[caller].popitem(last=False)
        self._num_bytes[caller] -= verdict.size_bytes
        if not self._kept[caller]:
            del self._kept[caller], self._num_bytes[caller]


@dataclass(slots=True)
class _Check:
    """A check that is under way, and how many requests wait for it."""

    task: asyncio.Task[Verdict]
    num_waiting: int = 0


class GrammarChecker:
    """Checks what requests ask answers to be. One per gateway; one event loop, so no lock.

    Equal requests of a caller that come together are checked once. A check ends when all that wait for it have left.
    A grammar that took more than the limit is remembered as well: to send it again costs nothing.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._verdicts = Verdicts()
        self._checks: dict[tuple[bytes, bytes], _Check] = {}
        """By caller and digest, those for which somebody waits."""
        self._tasks: set[asyncio.Task[Verdict]] = set()
        """Of all checks, those that are being ended included."""

    def start(self) -> None:
        """Start the processes. The first request does so as well."""
        self._pool.start()

    async def close(self) -> None:
        """End the checks and the processes. Nothing may be checked any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool.close()

    async def output(self, caller: bytes, output: OutputFormat) -> str:
        """Return the grammar of what an output has to be. caller: whose share of the processes it takes.

        Raise InvalidRequest that names the field, Overloaded when no process is free for too long.
        """
        return await self._checked(caller, {"format": output}, output.param)

    async def tools(self, caller: bytes, request: ToolGrammarRequest) -> str:
        """Return the grammar of an answer that may have calls of tools. Raise as `output` does."""
        return await self._checked(caller, {"tools": request}, "tools")

    async def _checked(self, caller: bytes, request: dict[str, Any], param: str) -> str:
        data = _encoded(request, param)
        digest = blake2b(data, digest_size=32).digest()
        verdict = self._verdicts.get(caller, digest)
        if verdict is None:
            verdict = await self._shared(caller, digest, data, param)
        return verdict.result()

    async def _shared(self, caller: bytes, digest: bytes, data: bytes, param: str) -> Verdict:
        """Wait for the check of this request, which is begun unless it is under way."""
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

    async def _check(self, caller: bytes, digest: bytes, data: bytes, param: str) -> Verdict:
        try:
            verdict = Verdict(await self._pool.run(caller, data))
        except WorkRefused as refused:
            verdict = Verdict("", refused.message, refused.param)
        except WorkExceeded as exceeded:
            setting = " (max_compile_s)" if exceeded.is_time else ""
            why = f"{param} takes more than {exceeded} to check{setting}; make it smaller"
            verdict = Verdict("", why, param, time.monotonic() + EXCEEDED_KEPT_S)
        except WorkFailed as failed:
            log.error("a grammar could not be checked: %s", failed)
            raise OutriderError("internal error; the gateway's log has the place") from None
        self._verdicts.keep(caller, digest, verdict)
        return verdict


def _encoded(request: dict[str, Any], param: str) -> bytes:
    try:
        return encoded(request)
    except NestsTooDeep:
        raise InvalidRequest(f"{param} nests too deep; make it flatter", param=param) from None


def create_checker(max_compile_s: float) -> GrammarChecker:
    """Return a checker with processes of its own."""
    pool = ConfinedPool("gateway.grammar_work", max_compile_s, name="checking a grammar")
    return GrammarChecker(pool)
