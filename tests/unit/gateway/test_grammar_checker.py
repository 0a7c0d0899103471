"""Checking grammars in processes: what is kept and for whom, what is refused at the limit, and who has left."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.confined.pool import ConfinedPool, WorkExceeded, WorkFailed
from gateway.grammar_checker import GrammarChecker, GrammarResult, GrammarResults
from gateway.grammars import create_schema_grammar
from gateway.output_format import OutputFormat
from outrider.wire.errors import InvalidRequest, OutriderError
from tests.checkers import ENDLESS, InlinePool, children, until_busy, until_ended

LONG = OutputFormat("json", ENDLESS, "response_format.json_schema.schema")
SHORT = OutputFormat("json", {"type": "null"}, "p")


@pytest_asyncio.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(ConfinedPool("gateway.grammar_work", 0.15))
    yield checker
    await checker.close()


async def test_what_takes_too_long_is_refused_by_name_and_remembered(checker: GrammarChecker) -> None:
    """Eight at once are one piece of work."""
    replies = await asyncio.gather(*(checker.output(b"", LONG) for _ in range(8)), return_exceptions=True)
    texts = {str(reply) for reply in replies}
    why = "takes more than 0.15 s of CPU time to check (max_compile_s); make it smaller"
    assert texts == {f"{LONG.param} {why}"} and all(isinstance(each, InvalidRequest) for each in replies)
    before = children()
    with pytest.raises(InvalidRequest, match="max_compile_s"):
        await checker.output(b"", LONG)
    assert children() == before, "no process was ended for it"
    assert await checker.output(b"", SHORT) == create_schema_grammar({"type": "null"}, "p", strict=False)


async def test_a_check_ends_when_all_that_wait_for_it_have_left() -> None:
    checker = GrammarChecker(ConfinedPool("gateway.grammar_work", 60.0))
    before = children()
    try:
        await checker.output(b"", SHORT)
        waiting = [asyncio.create_task(checker.output(b"", LONG)) for _ in range(2)]
        busy = await until_busy(before)
        for task in waiting:
            assert busy <= children(), "one still waits"
            task.cancel()
            await asyncio.sleep(0)
        await until_ended(busy)
    finally:
        await checker.close()


async def test_what_has_passed_is_not_checked_again_for_its_caller() -> None:
    pool = InlinePool()
    checker = GrammarChecker(pool)
    refused = OutputFormat("json", {"not": {}}, "p")
    for caller, num_run in ((b"", 2), (b"", 2), (b"other", 4)):
        await checker.output(caller, SHORT)
        with pytest.raises(InvalidRequest, match=r"^p\.not is a keyword") as error:
            await checker.output(caller, refused)
        assert (error.value.param, pool.num_run) == ("p.not", num_run)


def test_what_is_kept_is_bounded_and_drops_what_the_largest_caller_has() -> None:
    results = GrammarResults(max_bytes=10_000)
    results.keep(b"small", b"0", GrammarResult("x" * 500))
    for number in range(100):
        results.keep(b"large", b"%d" % number, GrammarResult("x" * 500))
    assert results.get(b"small", b"0") and results.get(b"large", b"99") and not results.get(b"large", b"0")
    results.keep(b"small", b"0", GrammarResult("", "too slow", "p", until_s=time.monotonic() - 1))
    assert results.get(b"small", b"0") is None


class OtherPool(InlinePool):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def run(self, caller: bytes, request: bytes) -> Any:
        raise self.error


async def test_memory_is_refused_and_a_failure_is_ours(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidRequest, match=r"^p takes more than 512 MiB of memory to check; make it smaller$"):
        await GrammarChecker(OtherPool(WorkExceeded("512 MiB of memory"))).output(b"", SHORT)
    with pytest.raises(OutriderError, match="internal error") as error:
        await GrammarChecker(OtherPool(WorkFailed("at line 1"))).output(b"", SHORT)
    assert error.value.http_status == 500 and "at line 1" in caplog.text
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="nests too deep"):
        await GrammarChecker(InlinePool()).output(b"", OutputFormat("json", deep, "p"))
