"""Checks grammars in the test's own process, where the processes of a gateway are not what is tested.

The work and the way to it are the gateway's: requests and replies go through JSON.
"""

from __future__ import annotations

import json
from typing import Any

from gateway import grammar_work
from gateway.confined.pool import WorkRefused
from gateway.grammar_checker import GrammarChecker
from outrider.wire.errors import InvalidRequest


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
