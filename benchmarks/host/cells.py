"""The cells that are measured, and one pass of a cell: answers at once over HTTP, with what the processes used."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.host.accounts import Spent
from benchmarks.host.systems import System

PLAIN, FOUR, AUTO = SPECULATIONS = "plain", "K = 4", "auto"
GREEDY, SAMPLED, COUPLED = SAMPLINGS = "greedy", "T = 1", "coupled"
STREAMED, WHOLE = DELIVERIES = "streamed", "whole"
NUM_AT_ONCE = (1, 16, 64)
MIN_ANSWERS = 4
"""Answers of a pass, one after the other where fewer are asked for at once."""
SETTLE_S = 0.05
"""Seconds after an answer in which a draft ends the steps that it had begun."""
ANSWER_S = 300.0
_EVENT = b"data: {"
_SPECULATION: dict[str, dict[str, Any]] = {
    PLAIN: {"enabled": False},
    FOUR: {"num_draft_tokens": 4},
    AUTO: {"num_draft_tokens": "auto"},
}


@dataclass(frozen=True)
class Cell:
    speculation: str
    sampling: str
    delivery: str
    num_at_once: int

    def __str__(self) -> str:
        return f"{self.speculation}, {self.sampling}, {self.num_at_once}, {self.delivery}"

    @property
    def num_answers(self) -> int:
        return max(MIN_ANSWERS, self.num_at_once)

    @property
    def has_peer(self) -> bool:
        """Whether vLLM runs it, too."""
        return self.speculation == PLAIN and self.sampling != COUPLED and self.delivery == STREAMED

    def body(self, index: int, max_tokens: int, system: System) -> dict[str, Any]:
        """Return the request of an answer. Plain T = 1 has no seed: vLLM draws seeded rows one by one."""
        body: dict[str, Any] = {
            "model": system.model,
            "prompt": [30 + index % 50, 40, 50, 60, 30, 41, 52, 66, 70, 31 + index % 8],
            "max_tokens": max_tokens,
            "temperature": 0.0 if self.sampling == GREEDY else 1.0,
            "ignore_eos": True,
            "stream": self.delivery == STREAMED,
        }
        if system.has_speculation:
            rule = {"acceptance": "coupled"} if self.sampling == COUPLED else {}
            body["speculation"] = _SPECULATION[self.speculation] | rule
        if self.speculation != PLAIN or self.sampling == COUPLED:
            body["seed"] = index
        return body


CELLS = [Cell(*each) for each in itertools.product(SPECULATIONS, SAMPLINGS, DELIVERIES, NUM_AT_ONCE)]


@dataclass(frozen=True)
class Pass:
    seconds: float
    num_tokens: int
    num_events: int
    """0 where answers come whole."""
    gaps_s: list[float]
    """Seconds between two arrivals of one answer, the first token's wait apart."""
    spent: Spent

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def us_a_token(self, seconds: float) -> float:
        return 1e6 * seconds / self.num_tokens

    @property
    def host_us(self) -> float:
        """CPU time a token of all processes outside the forwards, in microseconds."""
        return self.us_a_token(self.spent.total_host_s)

    @property
    def cpu_us(self) -> float:
        """CPU time a token of all processes, in microseconds."""
        return self.us_a_token(self.spent.total_cpu_s)


def run_pass(system: System, cell: Cell, max_tokens: int) -> Pass:
    """Answer all requests of a cell once. Raises RuntimeError for an answer that is not whole."""
    before, began_s = system.spent(), time.perf_counter()
    answers = asyncio.run(_answers(system, cell, max_tokens))
    seconds = time.perf_counter() - began_s
    time.sleep(SETTLE_S)
    return Pass(
        seconds,
        cell.num_answers * max_tokens,
        sum(answer.num_events for answer in answers),
        [gap_s for answer in answers for gap_s in answer.gaps_s],
        system.spent().since(before),
    )


async def _answers(system: System, cell: Cell, max_tokens: int) -> list[Arrivals]:
    places = asyncio.Semaphore(cell.num_at_once)

    async def answer(index: int) -> Arrivals:
        async with places:
            return await ask(system.port, "/v1/completions", cell.body(index, max_tokens, system))

    return await asyncio.gather(*(answer(index) for index in range(cell.num_answers)))


class Arrivals:
    """What has come of one answer, without reading its text: the client shares the cores with what is measured."""

    def __init__(self) -> None:
        self.num_events = 0
        self.gaps_s: list[float] = []
        self.tail = b""
        """The last bytes, in which an event may begin."""
        self._last_s: float | None = None

    def add(self, data: bytes, now_s: float) -> None:
        num_new = (self.tail + data).count(_EVENT)
        self.tail = (self.tail + data)[-len(_EVENT) + 1 :]
        if not num_new:
            return
        self.num_events += num_new
        if self._last_s is not None:
            self.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s


async def ask(port: int, path: str, body: dict[str, Any]) -> Arrivals:
    """Post a request and return when its answer arrived. Raises RuntimeError for an answer that is not whole."""
    return await asyncio.wait_for(_ask(port, path, body), ANSWER_S)


async def _ask(port: int, path: str, body: dict[str, Any]) -> Arrivals:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        arrivals, start, ends = Arrivals(), b"", b""
        while data := await reader.read(1 << 16):
            start = start or data
            ends = (ends + data)[-1000:]
            arrivals.add(data, time.perf_counter())
    finally:
        writer.close()
    whole = b"data: [DONE]" if body["stream"] else f'"completion_tokens":{body["max_tokens"]}'.encode()
    if b" 200 " not in start[:20] or whole not in ends:
        raise RuntimeError(f"{body} was answered by {start[:500]!r} ... {ends!r}")
    return arrivals
