"""The chaos run's own judgement: it sees tokens that are wrong, repeated or lost, and errors that nothing explains."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from outrider.client import FinishReason, OutriderError, Round, Token, TokenKind, Unavailable
from tests.chaos.faults import FAULTS, possible
from tests.chaos.load import Gateway, Gateways, Load, Stream
from tests.chaos.plan import make_plan
from tests.chaos.questions import Answer, Asked, Question
from tests.chaos.results import quantile, waits

IDS = (11, 12, 13, 14)
ASKED = Asked(Question("x", len(IDS)), Answer(IDS, "text"))


class ScriptedClient:
    """Answers with these rounds, then with an error if there is one."""

    def __init__(self, rounds: Sequence[Sequence[int]], error: OutriderError | None = None) -> None:
        self._rounds = rounds
        self._error = error

    def stream(self, prompt: str, **options: Any) -> ScriptedClient:
        return self

    async def __aenter__(self) -> AsyncIterator[Round]:
        return self._messages()

    async def __aexit__(self, *exc: object) -> None: ...

    async def aclose(self) -> None: ...

    async def _messages(self) -> AsyncIterator[Round]:
        num_tokens = 0
        for ids in self._rounds:
            num_tokens += len(ids)
            tokens = tuple(Token(each, TokenKind.PLAIN, "", None) for each in ids)
            last = num_tokens >= len(IDS) or ids is self._rounds[-1]
            yield Round("r", 0, tokens, "", 0, 0, None, FinishReason.LENGTH if last else None, None, None)  # type: ignore[arg-type]
        if self._error is not None:
            raise self._error


async def judged(client: ScriptedClient, kind: str = "grpc", *, excused: bool = False) -> Stream:
    """One attempt at one stream."""
    gateway = Gateway("127.0.0.1:1", "http://127.0.0.1:1")
    gateway.note(down=excused)
    load = Load(Gateways([gateway]), [ASKED], seed=0, level=1)
    load._sdk = [client]  # type: ignore[list-item]
    stream = Stream(0, kind, ASKED, 0)
    load.streams.append(stream)
    task = asyncio.create_task(load._live(stream, random.Random(0)))
    await asyncio.wait({task}, timeout=0.05 if excused else 5.0)
    task.cancel()
    await load.close()
    return stream


@pytest.mark.parametrize(
    ("rounds", "violation"),
    [
        ([(11,), (12, 13), (14,)], None),
        ([(11,), (12, 99), (14,)], "token 2 is 99, the right one is 13"),
        ([(11,), (12, 13), (12, 13)], "token 3 is 12, the right one is 14"),
        ([(11,), (13, 14)], "token 1 is 13, the right one is 12"),
        ([(11,), (12, 13)], "ended after 3 of 4 tokens"),
        ([(11,), (12, 13), (14, 15)], "5 tokens came, the right answer has 4"),
    ],
    ids=["right", "wrong", "repeated", "lost", "cut short", "too long"],
)
async def test_each_token_is_compared(rounds: list[tuple[int, ...]], violation: str | None) -> None:
    stream = await judged(ScriptedClient(rounds))
    assert (stream.violation or "").startswith(violation or "") and bool(stream.violation) == bool(violation)
    assert stream.ended_s is not None


async def test_a_sampled_stream_is_only_to_be_whole() -> None:
    assert (await judged(ScriptedClient([(1, 2), (3, 4)]), "sampled")).violation is None
    assert "3 of 4" in str((await judged(ScriptedClient([(1, 2), (3,)]), "sampled")).violation)


async def test_an_error_is_a_violation_unless_its_gateway_was_down() -> None:
    broken = ScriptedClient([(11,)], Unavailable("gone"))
    assert "gone" in str((await judged(broken)).violation)
    excused = await judged(broken, excused=True)
    assert excused.violation is None and excused.ended_s is None  # it asks again


def test_a_plan_is_drawn_from_its_seed_and_has_every_fault_before_one_comes_again() -> None:
    kinds = possible(2, 2)
    assert kinds == list(FAULTS)
    plan, same = (make_plan(kinds, seed=7, minutes=10, every_s=10, fewest=16, most=64) for _ in range(2))
    other = make_plan(kinds, seed=8, minutes=10, every_s=10, fewest=16, most=64)
    assert plan == same != other
    assert {each.fault for each in plan[: len(kinds)]} == set(kinds)
    assert all(16 <= each.level <= 64 for each in plan) and 50 < len(plan) < 70
    assert all(b.at_s - a.at_s >= 8 for a, b in itertools.pairwise(plan))


def test_waits_are_from_the_fault_to_the_next_token_of_who_was_running_there() -> None:
    hit = Stream(0, "grpc", ASKED, 0, 10.0, [11.0, 17.0], 18.0, [(10.0, 0)])
    moved = Stream(1, "openai", ASKED, 1, 10.0, [11.0, 13.0], 18.0, [(10.0, 0), (12.5, 1)])
    later = Stream(2, "grpc", ASKED, 0, 13.0, [14.0], 18.0, [(13.0, 0)])
    done = Stream(3, "grpc", ASKED, 0, 1.0, [2.0], 3.0, [(1.0, 0)])
    slow = Stream(4, "slow reader", ASKED, 0, 10.0, [20.0], 21.0, [(10.0, 0)])
    streams = [hit, moved, later, done, slow]
    assert waits(streams, 12.0) == [5.0, 1.0]
    assert waits(streams, 12.6, gateway=1) == [pytest.approx(0.4)]
    assert waits(streams, 12.6, gateway=0) == [pytest.approx(4.4)]
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.5, 0.99, 1.0)] == [3.0, 4.0, 4.0]
