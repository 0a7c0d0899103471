"""The chaos run's own judgement: it sees tokens that are wrong, repeated or lost, and errors that nothing explains."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.client import DeadlineExceeded, FinishReason, OutriderError, Round, Token, TokenKind, Unavailable
from tests.chaos.checks import not_well
from tests.chaos.excuses import RECOVERED_WITHIN_S, TARGET_WAIT_S, Attempt, Failure, Outages
from tests.chaos.faults import FAULTS, Chaos, Strike, possible
from tests.chaos.load import PROGRESS_S, ErrorReply, Gateway, Load, Stream, failure_of
from tests.chaos.plan import Planned, make_plan
from tests.chaos.questions import Answer, Asked, Question
from tests.chaos.results import gaps, quantile, waits
from tests.chaos.system import System
from tests.chaos.watching import Watcher
from tests.stack import Pools

IDS = (11, 12, 13, 14)
COUPLED_IDS = (11, 12, 23, 14)
ASKED = Asked(Question("x", len(IDS), 0.7, 5), Answer(IDS, "text", COUPLED_IDS))


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
    outages = Outages(1, 1)
    if excused:
        outages.begin("gateway 0", time.monotonic())
    load = Load([Gateway("127.0.0.1:1", "http://127.0.0.1:1")], outages, [ASKED], seed=0, level=1)
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


async def test_a_coupled_stream_has_an_answer_of_its_own() -> None:
    assert (await judged(ScriptedClient([COUPLED_IDS]), "coupled")).violation is None
    assert "token 2 is 13" in str((await judged(ScriptedClient([IDS]), "coupled")).violation)


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


def test_an_error_is_excused_by_the_attempts_own_gateway_and_time_alone() -> None:
    outages = Outages(2, 2)
    outages.begin("gateway 0", 100.0)
    late_s = 110.0 + RECOVERED_WITHIN_S

    def excused(asked_s: float, failed_s: float, gateway: int = 0, messages: int = 0) -> bool:
        return outages.excuse(Attempt(asked_s, gateway, messages), Failure.UNAVAILABLE, failed_s) is not None

    assert excused(90.0, 101.0, messages=3) and excused(105.0, 106.0) and not excused(90.0, 99.0)
    outages.end("gateway 0", 110.0)
    assert excused(90.0, 111.0, messages=3)  # it ran there then
    assert not excused(90.0, 111.0, gateway=1, messages=3)
    assert not excused(90.0, late_s + 1, messages=3)  # and went on for long afterwards
    assert excused(112.0, 113.0)  # refused while it recovers
    assert not excused(112.0, 113.0, messages=1)  # what it let in then must be answered
    assert not excused(late_s + 1, late_s + 2)
    assert outages.excuse(Attempt(90.0, 0), Failure.OTHER, 101.0) is None
    assert outages.excuse(Attempt(90.0, 0), Failure.TIMED_OUT, 101.0) is None


def test_without_a_target_a_gateway_may_refuse_and_not_break_off() -> None:
    outages = Outages(2, 2)
    outages.begin("target 0", 100.0)
    outages.begin("gateway 0 to target 1", 104.0)
    assert outages.targetless(0) == [(104.0, float("inf"))] and not outages.targetless(1)
    refused, broken = Attempt(105.0, 0), Attempt(90.0, 0, 5)
    assert outages.excuse(refused, Failure.UNAVAILABLE, 105.1) is not None
    assert outages.excuse(Attempt(105.0, 1), Failure.UNAVAILABLE, 105.1) is None
    assert outages.excuse(broken, Failure.UNAVAILABLE, 106.0) is None
    assert outages.excuse(broken, Failure.UNAVAILABLE, 105.0 + TARGET_WAIT_S) is not None
    outages.end("target 0", 106.0)
    assert outages.targetless(0) == [(104.0, 106.0 + RECOVERED_WITHIN_S)]
    assert outages.excuse(Attempt(107.0, 0), Failure.UNAVAILABLE, 107.1) is not None
    assert outages.excuse(Attempt(115.0, 0), Failure.UNAVAILABLE, 115.1) is None


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (Unavailable("gone"), Failure.UNAVAILABLE),
        (ErrorReply(503, "no target"), Failure.UNAVAILABLE),
        (httpx.ConnectError("refused"), Failure.UNAVAILABLE),
        (ErrorReply(504, "took too long"), Failure.TIMED_OUT),
        (DeadlineExceeded("took too long"), Failure.TIMED_OUT),
        (httpx.ReadTimeout("nothing came"), Failure.TIMED_OUT),
        (ErrorReply(500, "internal"), Failure.OTHER),
        (ErrorReply(None, "in a stream"), Failure.OTHER),
        (OutriderError("internal"), Failure.OTHER),
    ],
)
def test_errors_are_told_apart(error: Exception, failure: Failure) -> None:
    assert failure_of(error) is failure


async def test_a_request_out_of_time_is_slow_where_its_tokens_came_to_the_last_and_stuck_elsewhere() -> None:
    slow = await judged(ScriptedClient([(11,)], DeadlineExceeded("took too long")))
    assert slow.out_of_time and slow.violation is None and slow.ended_s is not None
    stuck = await judged(ScriptedClient([], DeadlineExceeded("took too long")))
    assert not stuck.out_of_time and "took too long" in str(stuck.violation) and PROGRESS_S > 5.0


def test_links_that_are_down_and_breakers_that_are_open_are_seen() -> None:
    pools = Pools([None], [None], [])  # type: ignore[list-item]
    well = {
        f'outrider_worker_connected{{worker="{role}",member="{role}-0",pool="{role}s"}}': 1.0
        for role in ("target", "draft")
    }
    system = System(pools, {}, Path())
    assert not_well(well, system) == []
    assert not_well(well | {'outrider_breaker_open{member="draft-0"}': 1.0}, system) == [
        "the breaker of draft-0 is open"
    ]
    assert not_well({}, system) == ["target-0 is not connected", "draft-0 is not connected"]


def test_waits_are_from_the_fault_to_the_next_token_of_who_was_running_there() -> None:
    hit = Stream(0, "grpc", ASKED, 0, 10.0, [11.0, 17.0], 18.0, [Attempt(10.0, 0)])
    moved = Stream(1, "openai", ASKED, 1, 10.0, [11.0, 13.0], 18.0, [Attempt(10.0, 0), Attempt(12.5, 1)])
    later = Stream(2, "grpc", ASKED, 0, 13.0, [14.0], 18.0, [Attempt(13.0, 0)])
    done = Stream(3, "grpc", ASKED, 0, 1.0, [2.0], 3.0, [Attempt(1.0, 0)])
    slow = Stream(4, "slow reader", ASKED, 0, 10.0, [20.0], 21.0, [Attempt(10.0, 0)])
    streams = [hit, moved, later, done, slow]
    assert waits(streams, 12.0) == [5.0, 1.0]
    assert waits(streams, 12.6, gateway=1) == [pytest.approx(0.4)]
    assert waits(streams, 12.6, gateway=0) == [pytest.approx(4.4)]
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.5, 0.99, 1.0)] == [3.0, 4.0, 4.0]
    assert gaps(streams, 12.0, 16.0) == [6.0, 2.0]
    assert gaps(streams, 12.0, 16.0, gateway=1) == [2.0]


async def watched(
    counts: Sequence[tuple[int, int] | None],
    monkeypatch: pytest.MonkeyPatch,
    limit_s: float,
    outages: Outages | None = None,
) -> float | None:
    """What `until_freed` makes of these slots and answers; the last ones stay."""
    monkeypatch.setattr("tests.chaos.watching.POLL_S", 0.01)
    monkeypatch.setattr("tests.chaos.watching.CALM_S", 0.1)
    watcher = Watcher(System(Pools([], [], []), {}, Path()), outages or Outages(2, 1))
    left = iter(counts)

    async def slots_and_answers() -> tuple[int, int] | None:
        return next(left, counts[-1])

    monkeypatch.setattr(watcher, "_slots_and_answers", slots_and_answers)
    try:
        return await watcher.until_freed(limit_s)
    finally:
        await watcher.close()


async def test_slots_of_a_gateway_that_is_gone_must_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await watched([(3, 3)], monkeypatch, 1.0) == 0.0
    assert await watched([(4, 3), (3, 3)], monkeypatch, 1.0) == 0.0  # an answer that has just ended
    assert 0.0 < (await watched([(4, 3)] * 5 + [(3, 3)], monkeypatch, 1.0) or 0.0) < 1.0
    assert await watched([None], monkeypatch, 0.3) is None  # not seen is not freed
    with pytest.raises(TimeoutError, match="4 slots"):
        await watched([(4, 3)], monkeypatch, 0.3)


async def test_slots_are_not_judged_while_another_gateway_is_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    outages = Outages(2, 1)
    asyncio.get_running_loop().call_later(0.1, outages.begin, "gateway 1", time.monotonic())
    assert await watched([(4, 0)], monkeypatch, 0.5, outages) is None


@pytest.mark.parametrize(
    ("connected", "violation"),
    [([0.0], None), ([1.0, 1.0, 0.0], None), ([1.0], r"gateways \[0\] had not noticed")],
    ids=["at once", "later", "never"],
)
async def test_a_hang_that_a_gateway_does_not_notice_is_a_violation(
    connected: list[float], violation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.chaos.watching.POLL_S", 0.01)
    outages = Outages(1, 1)
    watcher = Watcher(System(Pools([], [], []), {}, Path()), outages)
    left = iter(connected)

    async def gateway(index: int) -> dict[str, float]:
        return {'outrider_worker_connected{member="target-0"}': next(left, connected[-1])}

    monkeypatch.setattr(watcher, "gateway", gateway)
    load = Load([], outages, [ASKED], seed=0, level=1)
    strike = Strike(Planned(0.0, "target hung", "", 1.5, 1), part="target 0")
    chaos = Chaos(watcher._system, outages, load, watcher)
    await chaos._last(strike, watcher.until_lost("target", 0, [0], 1.0))
    await watcher.close()
    assert bool(strike.violations) == bool(violation) and (strike.noticed_s is None) == bool(violation)
    if violation:
        assert re.search(violation, strike.violations[0])
