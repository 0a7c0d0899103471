"""Checks grammars in the test's own process, where the processes of a gateway are not what is tested; and waits for
those processes, where they are.

The work and the way to it are the gateway's: requests and replies go through JSON.
"""

import json
import os
from collections.abc import Set
from pathlib import Path
from typing import Any

from gateway import grammar_work
from gateway.confined.pool import WorkRefused
from gateway.grammar_checker import GrammarChecker
from outrider.wire.errors import InvalidRequest
from outrider.wire.processes.descendants import descendants
from tests.waiting import until

ENDLESS: dict[str, Any] = {"type": "integer", "multipleOf": 999_983}
"""A schema that takes minutes to check."""
PATIENCE_S = 20.0


class InlinePool:
    def __init__(self) -> None:
        self.num_run = 0

    def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def run(self, caller: bytes, request: bytes) -> Any:
        self.num_run += 1
        try:
            return json.loads(json.dumps(grammar_work.work(json.loads(request))))
        except InvalidRequest as error:
            raise WorkRefused(error.message, error.param) from None


def inline_checker(max_compile_s: float = 1.0) -> GrammarChecker:
    return GrammarChecker(InlinePool())


def children() -> set[int]:
    return set(descendants(os.getpid()))


async def until_busy(before: Set[int]) -> set[int]:
    """Return the processes that have begun since and are at work: each has used more CPU time than its start takes."""
    return await until(lambda: {pid for pid in children() - before if _cpu_s(pid) > 0.25}, PATIENCE_S)


async def until_ended(pids: Set[int]) -> None:
    await until(lambda: not pids & children(), PATIENCE_S)


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process, 0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
