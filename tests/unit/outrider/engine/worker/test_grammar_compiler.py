"""Whose grammar is compiled next."""

import asyncio
import os
import sys
import threading
from typing import Any

from outrider.engine.worker.grammar_compiler import NICENESS, GrammarCompiler
from outrider.wire.requests.scheduling import Scheduling
from tests.unit.outrider.engine.worker.compiling import _Slow


async def test_the_next_grammar_is_of_the_caller_that_compiling_has_taken_least_for() -> None:
    grammars, compiler = _Slow(), GrammarCompiler()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def compile_(caller: bytes, text: str) -> asyncio.Task[Any]:
        return asyncio.create_task(compiler.compile(grammars, text, Scheduling(caller)))  # type: ignore[arg-type]

    tasks = [compile_(b"busy", f"busy {number}") for number in range(4)]
    await asyncio.sleep(0)
    tasks += [compile_(b"other", "other"), compile_(b"left", "left")]
    await asyncio.sleep(0.01)
    tasks.pop().cancel()
    tasks.pop(1).cancel()
    grammars.may_go_on.set()
    await asyncio.gather(*tasks)
    assert grammars.compiled == ["busy 0", "other", "busy 2", "busy 3"]
    assert sys.platform != "linux" or grammars.niceness == min(19, own + NICENESS)
