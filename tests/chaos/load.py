"""The streams: who asks, how, and whether what came is the right answer. Each stream ends whole, whatever happens.

A stream whose error is excused (`excuses.py`) asks again, as a user would; its answer is compared from its first token.
Every other error is a violation.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from outrider.client import (
    AsyncClient,
    DeadlineExceeded,
    Drafter,
    FinishReason,
    GenerateOptions,
    OutriderError,
    RetryPolicy,
    Speculation,
    Unavailable,
)
from tests.chaos.excuses import Attempt, Failure, Outages
from tests.chaos.questions import Asked

KINDS = (
    *("grpc", "grpc", "grpc", "coupled", "coupled", "openai", "openai", "openai whole"),
    *("sampled", "slow reader", "leaves"),
)
"""A stream's kind is drawn from these."""
DRAFTERS = (None, Drafter.NGRAM_AND_MODEL, Drafter.MODEL_AND_MODEL)
"""Who drafts for a stream over gRPC: the default, or several sources in one tree, of which a fault may take one."""
REQUEST_TIMEOUT_S = 240.0
"""After which the gateways end a request with a clear error."""
STREAM_TIMEOUT_S = REQUEST_TIMEOUT_S + 30.0
"""Who has heard nothing of an end by then never will."""
PROGRESS_S = 30.0
"""A stream that had a token so shortly before its request's time was up is slow, not stuck."""
RETRY_S = 0.2
SLOW_READS, SLOW_READ_S = 30, 0.3
"""A slow reader pauses this many times, so long."""


@dataclass
class Stream:
    """One request, with its retries."""

    number: int
    kind: str
    asked: Asked
    gateway: int
    started_s: float = field(default_factory=time.monotonic)
    arrivals_s: list[float] = field(default_factory=list)
    """Of messages with tokens."""
    ended_s: float | None = None
    attempts: list[Attempt] = field(default_factory=list)
    violation: str | None = None
    out_of_time: bool = False
    """It ended with its gateway's timeout, its tokens coming to the last."""

    @property
    def num_retries(self) -> int:
        return max(0, len(self.attempts) - 1)

    def gateway_at(self, moment_s: float) -> int | None:
        return next((each.gateway for each in reversed(self.attempts) if each.asked_s <= moment_s), None)

    def running_at(self, moment_s: float) -> bool:
        return self.started_s <= moment_s and (self.ended_s is None or self.ended_s > moment_s)

    def next_after(self, moment_s: float) -> float | None:
        """Seconds from then to the next token; None when it had all of them."""
        return next((arrival_s - moment_s for arrival_s in self.arrivals_s if arrival_s > moment_s), None)


@dataclass(frozen=True)
class Gateway:
    """How to reach it."""

    grpc: str
    http: str


class Load:
    """Keeps `level` streams running until it is told to stop."""

    def __init__(
        self, gateways: Sequence[Gateway], outages: Outages, asked: Sequence[Asked], seed: int, level: int
    ) -> None:
        self.level = level
        self.streams: list[Stream] = []
        self.num_ended: Counter[str] = Counter()
        self._outages = outages
        self._asked = asked
        self._seed = seed
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._sdk = [AsyncClient(gateway.grpc, retries=RetryPolicy(0), ping_interval_s=2.0) for gateway in gateways]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = [
            httpx.AsyncClient(base_url=gateway.http, timeout=httpx.Timeout(STREAM_TIMEOUT_S), limits=limits)
            for gateway in gateways
        ]

    @property
    def violations(self) -> list[str]:
        return [
            f"stream {stream.number} ({stream.kind}): {stream.violation}" for stream in self.streams if stream.violation
        ]

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    async def run(self) -> None:
        """Until `stop`, and until the streams that run then have ended."""
        while not self._stopping:
            while len(self._tasks) < self.level:
                self._start()
            await asyncio.wait(self._tasks, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def stop(self) -> None:
        self._stopping = True

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for client in self._sdk:
            await client.aclose()
        for http in self._http:
            await http.aclose()

    def _start(self) -> None:
        number = len(self.streams)
        dice = random.Random(f"{self._seed}/stream {number}")
        stream = Stream(
            number, dice.choice(KINDS), dice.choice(self._asked), dice.choice(self._outages.gateways_up or [0])
        )
        self.streams.append(stream)
        task = asyncio.create_task(self._live(stream, dice))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, stream: Stream, dice: random.Random) -> None:
        try:
            while not await asyncio.wait_for(self._attempt(stream, dice), STREAM_TIMEOUT_S + 10.0):
                await asyncio.sleep(RETRY_S)
                up = self._outages.gateways_up
                stream.gateway = dice.choice(up) if up else stream.gateway
        except TimeoutError:
            stream.violation = (
                stream.violation or f"heard of no end within {STREAM_TIMEOUT_S + 10.0:g} s of its last asking"
            )
        except Exception as error:  # a broken harness must not look like a stream that ended
            stream.violation = f"{type(error).__name__}: {error}"
        stream.ended_s = time.monotonic()
        self.num_ended[stream.kind] += 1

    async def _attempt(self, stream: Stream, dice: random.Random) -> bool:
        """False when it has to ask again."""
        ask: Callable[[Stream, random.Random], AsyncIterator[None]] = {
            "openai": self._openai,
            "openai whole": self._openai_whole,
        }.get(stream.kind, self._grpc)
        attempt = Attempt(time.monotonic(), stream.gateway)
        stream.attempts.append(attempt)
        try:
            async for _ in ask(stream, dice):
                stream.arrivals_s.append(time.monotonic())
                attempt.num_messages += 1
        except (OutriderError, httpx.TransportError, ErrorReply) as error:
            return self._judge(stream, attempt, error)
        return True

    def _judge(self, stream: Stream, attempt: Attempt, error: Exception) -> bool:
        """False when it may ask again."""
        now_s, failure = time.monotonic(), failure_of(error)
        if self._outages.excuse(attempt, failure, now_s) is not None:
            return False
        lively = attempt.num_messages > 0 and now_s - stream.arrivals_s[-1] < PROGRESS_S
        if failure is Failure.TIMED_OUT and now_s - attempt.asked_s < STREAM_TIMEOUT_S and lively:
            stream.out_of_time = True
        else:
            stream.violation = (
                f"{type(error).__name__} from gateway {attempt.gateway} after {now_s - attempt.asked_s:.1f} s and "
                f"{attempt.num_messages} messages: {error}"
            )
        return True

    async def _grpc(self, stream: Stream, dice: random.Random) -> AsyncIterator[None]:
        """Greedy or coupled with ids compared one by one; sampled by rejection, where only their number is known; slow;
        leaving early.
        """
        answer, question = stream.asked.answer, stream.asked.question
        expected = answer.coupled_ids if stream.kind == "coupled" else answer.ids
        sampled = stream.kind == "sampled"
        leave_after = dice.randint(1, 20) if stream.kind == "leaves" else None
        drafter = dice.choice(DRAFTERS)
        how: GenerateOptions = {"temperature": 0.0, "speculation": Speculation(drafter=drafter)}
        if sampled:
            how |= {"temperature": dice.uniform(0.3, 1.2), "seed": dice.getrandbits(32)}
        elif stream.kind == "coupled":
            how = question.coupled(speculate=True, drafter=drafter)
        max_tokens = question.max_tokens
        ids: list[int] = []
        last = None
        client = self._sdk[stream.gateway]
        async with client.stream(
            question.prompt, max_tokens=max_tokens, ignore_eos=True, timeout_s=STREAM_TIMEOUT_S, **how
        ) as rounds:
            async for each in rounds:
                ids += [token.id for token in each.tokens]
                last = each
                if not sampled and ids != list(expected[: len(ids)]):
                    stream.violation = _first_difference(expected, ids)
                    return
                if each.tokens:
                    yield
                if leave_after is not None and stream.attempts[-1].num_messages >= leave_after:
                    return
                if stream.kind == "slow reader" and stream.attempts[-1].num_messages <= SLOW_READS:
                    await asyncio.sleep(SLOW_READ_S)
        if len(ids) != max_tokens or last is None or last.finish_reason is not FinishReason.LENGTH:
            stream.violation = f"ended after {len(ids)} of {max_tokens} tokens: {last and last.finish_reason}"

    async def _openai(self, stream: Stream, dice: random.Random) -> AsyncIterator[None]:
        expected, text, reason = stream.asked.answer.text, "", None
        async with self._http[stream.gateway].stream(
            "POST", "/v1/completions", json=_body(stream) | {"stream": True}
        ) as reply:
            if reply.status_code != 200:
                raise ErrorReply(reply.status_code, (await reply.aread()).decode())
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                data = json.loads(line.removeprefix("data: "))
                if "error" in data:
                    raise ErrorReply(_status(data["error"]), str(data["error"]))
                choice = data["choices"][0]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                if not expected.startswith(text):
                    stream.violation = f"its text leaves the right one after {len(_common(expected, text))} characters"
                    return
                yield
        self._check_text(stream, text, reason)

    async def _openai_whole(self, stream: Stream, dice: random.Random) -> AsyncIterator[None]:
        reply = await self._http[stream.gateway].post("/v1/completions", json=_body(stream))
        if reply.status_code != 200:
            raise ErrorReply(reply.status_code, reply.text)
        choice = reply.json()["choices"][0]
        self._check_text(stream, choice["text"], choice["finish_reason"])
        yield

    def _check_text(self, stream: Stream, text: str, reason: str | None) -> None:
        if text != stream.asked.answer.text or reason != "length":
            same, right = len(_common(stream.asked.answer.text, text)), len(stream.asked.answer.text)
            stream.violation = f"ended with {reason} after {len(text)} of {right} characters, {same} of them right"


class ErrorReply(Exception):
    """Over HTTP, with its status; None for one that came in a stream that had begun and is not a timeout."""

    def __init__(self, status: int | None, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


def failure_of(error: Exception) -> Failure:
    status = error.status if isinstance(error, ErrorReply) else None
    if isinstance(error, DeadlineExceeded | httpx.TimeoutException) or status == 504:
        return Failure.TIMED_OUT
    if isinstance(error, Unavailable | httpx.TransportError) or status == 503:
        return Failure.UNAVAILABLE
    return Failure.OTHER


def _status(error: dict[str, object]) -> int | None:
    """Of an error inside a stream."""
    return 504 if error["type"] == "timeout_error" else None


def _body(stream: Stream) -> dict[str, object]:
    question = stream.asked.question
    return {"prompt": question.prompt, "max_tokens": question.max_tokens, "temperature": 0, "ignore_eos": True}


def _common(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _first_difference(expected: Sequence[int], found: Sequence[int]) -> str:
    for position, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return f"token {position} is {other}, the right one is {one}"
    return f"{len(found)} tokens came, the right answer has {len(expected)}"
