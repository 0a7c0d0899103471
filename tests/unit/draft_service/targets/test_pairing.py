"""When a head is tested at a target, and what is asked there for it."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.slot_jobs import EngineJob
from draft_service.targets import pairing as module
from draft_service.targets.pairing import WiringTest
from outrider.engine.heads.wiring import MAX_PROBE_TAPS, ProbeStates
from outrider.engine.worker.engine_thread import EngineThread
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import IncompatiblePair, Unavailable
from outrider.wire.settings.config import DraftConfig
from outrider.wire.telemetry.metrics import WorkerMetrics


class AtOnce:
    """An engine that does what it is given."""

    call = EngineThread.call

    def submit(self, job: EngineJob) -> None:
        job.run()

    def answer(self, send: Callable[[], None]) -> None:
        send()


def state_of(taps: tuple[int, ...], num_layers: int, score: Callable[[Any], float]) -> Any:
    head = SimpleNamespace(
        projection=SimpleNamespace(spec=SimpleNamespace(taps=taps)),
        num_layers=num_layers,
        score=lambda seen: SimpleNamespace(configured=SimpleNamespace(agreement=score(seen))),
    )
    return SimpleNamespace(
        config=DraftConfig.model_construct(model="head", trust_draft_config=False),
        tokenizer=SimpleNamespace(tokenizer_json=b""),
        slots=SimpleNamespace(context_limit=9),
        head=head,
    )


def wiring_test(state: Any, probe: Callable[[str, tpb.ProbeRequest], Any]) -> WiringTest:
    """probe: what a target at an address answers."""

    def stub_of(address: str) -> Any:
        return SimpleNamespace(Probe=lambda request, timeout: probe(address, request))

    engine: Any = AtOnce()
    return WiringTest(state, engine, WorkerMetrics("draft"), stub_of)


async def found(test: WiringTest, address: str, epoch: int) -> str | None:
    """Return why the head does not fit."""
    try:
        await test(address, epoch)
    except IncompatiblePair as error:
        return error.message
    return None


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head says its own score, and fits."""
    monkeypatch.setattr(module, "score_head", lambda head, seen: head.score(seen))
    monkeypatch.setattr(module, "probe_ids", lambda *_: [1, 2])
    monkeypatch.setattr(module, "judge", lambda *_, **__: None)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies are the head's to read as they come."""
    monkeypatch.setattr(module, "seen_in", lambda ids, taps, replies: replies)


class Reply:
    """A target's reply to a probe."""


async def test_a_head_is_tested_once_in_each_life_of_a_target_that_it_fits(
    unread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, asked = {("b:1", 7): "it reads a layer too low"}, list[tuple[str, int]]()
    monkeypatch.setattr(module, "judge", lambda *_, **__: said.get(asked[-1]))
    state = state_of((1,), 2, lambda seen: 0.5)

    async def probe(address: str, request: tpb.ProbeRequest) -> Any:
        asked.append((address, request.target_epoch))

    test = wiring_test(state, probe)
    lives = [("a:1", 7), ("b:1", 7), ("a:1", 8)]
    for address, epoch in lives:
        why = said.get((address, epoch))
        assert [await found(test, address, epoch), await found(test, address, epoch)] == [why, why]
    assert asked == [("a:1", 7), ("b:1", 7), ("b:1", 7), ("a:1", 8)]
    assert len(test._tests) == 2, "one of each target, whatever its life"


async def test_two_gateways_at_once_query_a_target_once(unread: None) -> None:
    asked, answers = list[str](), asyncio.Event()

    async def probe(address: str, request: tpb.ProbeRequest) -> Any:
        asked.append(address)
        await answers.wait()

    test = wiring_test(state_of((1,), 2, lambda seen: 0.5), probe)
    both = asyncio.gather(test("a:1", 7), test("a:1", 7))
    await asyncio.sleep(0)
    answers.set()
    await both
    assert asked == ["a:1"]
    answers.clear()
    with pytest.raises(TimeoutError):  # as a gateway's call has a deadline
        async with asyncio.timeout(0.01):
            await test("a:1", 8)
    answers.set()
    await test("a:1", 8)
    assert asked == ["a:1", "a:1"], "the test went on"


@pytest.mark.parametrize("fails", [False, True])
async def test_the_replies_of_a_test_are_not_kept(fails: bool, unread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are megabytes, and so it is where a test ends in an error, whose traceback has frames."""
    monkeypatch.setattr(module, "judge", lambda *_, **__: "it reads a layer too low")
    monkeypatch.setattr(module.log, "exception", lambda message: None)  # pytest keeps what is logged
    replies = list[weakref.ref[Reply]]()

    async def probe(address: str, request: tpb.ProbeRequest) -> Any:
        reply = Reply()
        replies.append(weakref.ref(reply))
        return reply

    def score(seen: Any) -> float:
        if fails:
            raise RuntimeError("it cannot be scored")
        return 0.5

    test = wiring_test(state_of((1,), 2, score), probe)
    assert await found(test, "a:1", 7) is not None
    gc.collect()
    assert [reply() for reply in replies] == [None]


async def test_a_probe_whose_connection_is_closed_is_run_again(unread: None) -> None:
    num_probes = 0

    async def probe(address: str, request: tpb.ProbeRequest) -> Any:
        nonlocal num_probes
        num_probes += 1
        if num_probes == 1:
            raise asyncio.CancelledError
        return Reply()

    test = wiring_test(state_of((1,), 2, lambda seen: 0.5), probe)
    with pytest.raises(Unavailable, match="its connection was closed"):
        await test("a:1", 7)
    await test("a:1", 7)
    assert num_probes == 2


async def test_more_features_than_a_target_sends_at_once_are_requested_in_parts() -> None:
    taps, asked, given = tuple(range(1, 25, 4)), list[int](), list[ProbeStates]()

    async def probe(address: str, request: tpb.ProbeRequest) -> tpb.ProbeReply:
        asked.append(len(request.taps))
        exact = torch.tensor(list(request.taps), dtype=torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return tpb.ProbeReply(taps=np.stack([exact, exact]).tobytes(), best_ids=(7, 8))

    def score(seen: ProbeStates) -> float:
        given.append(seen)
        return 0.5

    await wiring_test(state_of(taps, 30, score), probe)("a:1", 7)
    assert asked == [MAX_PROBE_TAPS, 2]
    (seen,) = given
    assert {tap: states[1].item() for tap, states in seen.taps.items()} == {
        tap + by: tap + by for tap in taps for by in (-1, 0, 1)
    }
    assert seen.best_ids.tolist() == [7, 8]
