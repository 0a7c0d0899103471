"""Work in processes that can be ended: its limits, its callers' shares, and what is left after it."""

import asyncio
import errno
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.confined.pool import NUM_PROCESSES, ConfinedPool, WorkExceeded, WorkFailed, WorkRefused
from outrider.wire.processes.descendants import descendants
from tests.waiting import until

ROOT = Path(__file__).parents[4]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@asynccontextmanager
async def pool_of(cpu_s: float = 5.0, memory_bytes: int = 64 * MIB) -> AsyncIterator[ConfinedPool]:
    before = set(descendants(os.getpid()))
    pool = ConfinedPool("tests.unit.gateway.confined.confined_work", cpu_s, memory_bytes=memory_bytes)
    pool.start()
    try:
        yield pool
    finally:
        await pool.close()
    assert set(descendants(os.getpid())) <= before


async def test_what_takes_too_much_is_ended_and_the_next_is_served() -> None:
    async with pool_of(cpu_s=0.1) as pool:
        assert await pool.run(b"", {"kind": "echo", "value": ["\ud800", 2**70, None]}) == ["\ud800", 2**70, None]
        with pytest.raises(WorkExceeded, match=r"0\.1 s of CPU time"):
            await pool.run(b"", {"kind": "loop"})
        with pytest.raises(WorkExceeded, match="64 MiB of memory"):
            await pool.run(b"", {"kind": "memory", "bytes": 3_000_000_000})
        with pytest.raises(WorkExceeded, match="64 MiB of memory"):  # as compiled code ends without memory
            await pool.run(b"", {"kind": "abort"})
        with pytest.raises(WorkRefused) as refused:
            await pool.run(b"", {"kind": "refuse"})
        assert (refused.value.message, refused.value.param) == ("x is 1, must be 2", "x")
        with pytest.raises(WorkFailed, match=r"confined_work\.py[\s\S]*SystemExit$"):
            await pool.run(b"", {"kind": "panic"})
        assert await pool.run(b"", {"kind": "memory", "bytes": MIB}) == MIB


async def test_work_ends_when_its_client_leaves() -> None:
    async with pool_of() as pool:
        pids = {await pool.run(b"", {"kind": "pid"}) for _ in range(4)}
        work = [asyncio.create_task(pool.run(b"", {"kind": "loop"})) for _ in range(NUM_PROCESSES + 1)]
        await asyncio.sleep(0.05)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        assert not pids & set(descendants(os.getpid()))
        assert await pool.run(b"", {"kind": "echo", "value": 1}) == 1


async def test_a_caller_never_holds_all_processes() -> None:
    async with pool_of() as pool:
        greedy = [asyncio.create_task(pool.run(b"greedy", {"kind": "pid", "sleep_s": 30})) for _ in range(8)]
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(pool.run(b"other", {"kind": "echo", "value": 1}), 20) == 1
        assert not any(task.done() for task in greedy)
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)


async def test_what_a_process_keeps_does_not_count_against_the_next() -> None:
    async with pool_of() as pool:
        pids = [await pool.run(b"", {"kind": "keep", "bytes": 40 * MIB}) for _ in range(4)]
        assert len(set(pids)) == 4


async def test_a_process_killed_while_idle_fails_no_request() -> None:
    async with pool_of() as pool:
        pid = await pool.run(b"", {"kind": "pid"})
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # sent to all processes of a service
            os.kill(pid, number)
        assert await pool.run(b"", {"kind": "pid"}) == pid
        os.kill(pid, signal.SIGKILL)
        assert await pool.run(b"", {"kind": "pid"}) != pid  # before the event loop knows
        await until(lambda: not os.path.exists(f"/proc/{pid}"))  # the event loop has waited for it
        assert pid not in {await pool.run(b"", {"kind": "pid"}) for _ in range(4)}


async def test_a_caller_whose_work_was_ended_waits_for_the_process_in_its_place() -> None:
    async with pool_of() as pool:
        inner = cast(Any, pool)
        inner._start_up_to(NUM_PROCESSES)
        await until(lambda: len(inner._idle) == NUM_PROCESSES)
        pids = {process._child.pid for process in inner._idle}
        work = asyncio.create_task(pool.run(b"leaves", {"kind": "loop"}))
        await asyncio.sleep(0.05)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert await pool.run(b"leaves", {"kind": "pid"}) not in pids


async def test_a_process_that_cannot_start_is_tried_again_while_a_request_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create, num_tries = asyncio.create_subprocess_exec, 0

    async def create_later(*args: Any, **settings: Any) -> Any:
        nonlocal num_tries
        num_tries += 1
        if num_tries <= 2 * NUM_PROCESSES:
            raise OSError(errno.EMFILE, "too many open files")
        return await create(*args, **settings)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_later)
    monkeypatch.setattr("gateway.confined.pool.START_PAUSE_S", 0.01)
    async with pool_of() as pool:
        assert await pool.run(b"", {"kind": "echo", "value": 1}) == 1


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_grant_at_the_moment_of_a_timeout_is_not_lost(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.confined.pool.MAX_WAIT_S", 0.01)
    pool = cast(Any, ConfinedPool("tests.unit.gateway.confined.confined_work", 1.0))
    pool._num_processes = NUM_PROCESSES
    process = SimpleNamespace(has_ended=False)
    waiting = asyncio.create_task(pool._acquire(b"a"))
    await asyncio.sleep(0)
    time.sleep(0.02)  # noqa: ASYNC251  (the timeout is due)
    pool._idle.append(process)
    pool._grant()
    if is_cancelled:
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool._idle == [process] and not pool._num_running
    else:
        assert await waiting is process
        assert pool._num_running == {b"a": 1}
