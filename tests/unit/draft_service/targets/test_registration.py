"""A draft's head at a target: what is sent when, and what becomes of rows that are requested meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from draft_service.jobs import RowsRequest
from draft_service.targets import deliveries
from draft_service.targets import registration as module
from draft_service.targets.deliveries import Deliverer
from draft_service.targets.registration import HeadOffer, Registration
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import IncompatiblePair, Unavailable
from outrider.wire.telemetry.metrics import WorkerMetrics

OFFER = HeadOffer(bytes(range(10)), b"d" * 32, 4)
WANTED, READY, REFUSED = tpb.HEAD_STATE_WEIGHTS_WANTED, tpb.HEAD_STATE_READY, tpb.HEAD_STATE_REFUSED


class Peer:
    """A target's end of the stream."""

    def __init__(self) -> None:
        self.asked: list[tpb.FeatureAsk] = []
        outbox: Any = SimpleNamespace(put=self.asked.append, wait_below=self.wait_below)
        self.registration = Registration(OFFER, "a:1", outbox)

    async def wait_below(self, num: int) -> None:
        await asyncio.sleep(0)

    def says(self, state: Any, why: str = "", digest: bytes = OFFER.digest, epoch: int = 7) -> None:
        self.registration.replied(tpb.HeadReply(digest=digest, state=state, why=why, target_epoch=epoch))

    def took(self) -> list[tuple[Any, ...]]:
        """Return what came since the last call."""
        asked, found = list(self.asked), list[tuple[Any, ...]]()
        self.asked.clear()
        for ask in asked:
            kind = ask.WhichOneof("item")
            item = getattr(ask, str(kind))
            facts = {"head": ("target_epoch", "num_bytes"), "weights": ("offset", "data"), "rows": ("ticket", "start")}
            found.append((kind, *(getattr(item, name) for name in facts[str(kind)])))
            assert item.digest == OFFER.digest
        return found


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_weights_are_sent_if_wanted_and_rows_requested_once_the_head_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 4)
    peer = Peer()
    peer.registration.request(7, RowsRequest(1, 0, 1))
    peer.registration.request(7, RowsRequest(2, 30, 1))
    assert peer.took() == [("head", 7, 10)], "once"
    peer.says(WANTED)
    await settle()
    data = OFFER.data
    assert peer.took() == [("weights", 0, data[:4]), ("weights", 4, data[4:8]), ("weights", 8, data[8:])]
    peer.says(READY)
    assert not peer.took(), "the slots request them again"
    peer.registration.request(7, RowsRequest(3, 9, 1))
    assert peer.took() == [("rows", 3, 9)]
    await peer.registration.register(7)
    assert not peer.took()


async def registering(peer: Peer, epoch: int = 7) -> asyncio.Task[None]:
    task = asyncio.create_task(peer.registration.register(epoch))
    await settle()
    return task


async def refusal(registering: asyncio.Task[None]) -> str:
    with pytest.raises(IncompatiblePair) as error:
        await registering
    return error.value.message


async def test_a_head_that_is_here_already_needs_no_weights() -> None:
    peer = Peer()
    waiting = await registering(peer)
    peer.says(READY, digest=b"x" * 32)
    await settle()
    assert not waiting.done(), "that is not ours"
    peer.says(READY)
    await waiting
    assert peer.took() == [("head", 7, 10)]


async def test_one_that_is_refused_is_tried_again_only_when_asked_to() -> None:
    peer = Peer()
    waiting = await registering(peer)
    peer.says(WANTED)
    peer.says(REFUSED, "no room")
    assert await refusal(waiting) == "no room"
    assert peer.took() == [("head", 7, 10)], "the weights stay here"
    peer.registration.request(7, RowsRequest(1, 0, 1))
    assert not peer.took()
    again = await registering(peer)
    assert peer.took() == [("head", 7, 10)]
    peer.says(READY)
    await again
    assert not peer.took(), "what was asked for while it was refused is lost"


async def test_who_waits_hears_no_answer_to_another_offer() -> None:
    peer = Peer()
    waiting = await registering(peer)
    peer.says(REFUSED, "no room")
    again = asyncio.create_task(peer.registration.register(7))  # runs behind the one that was just answered
    await settle()
    assert await refusal(waiting) == "no room" and not again.done()
    peer.says(REFUSED, "no room still")
    assert await refusal(again) == "no room still"


async def test_a_refusal_without_a_reason_says_so() -> None:
    peer = Peer()
    waiting = await registering(peer)
    peer.says(REFUSED)
    assert await refusal(waiting) == "the target gave no reason"


async def test_a_head_that_the_target_does_not_answer_in_time_is_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "REGISTER_S", 0.01)
    deliverer, peer = Deliverer(WorkerMetrics("draft"), lambda job: None), Peer()
    link: Any = SimpleNamespace(registration=peer.registration, is_broken=False)
    deliverer._links["a:1"] = link
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"the target at a:1 did not take the head within 0\.01 s"):
            await deliverer.register("a:1", 7)
        assert peer.took() == [("head", 7, 10)]
    peer.says(READY)
    await deliverer.register("a:1", 7)
    assert not peer.took(), "it came late, and is true"


async def test_another_life_of_the_target_is_registered_at_anew() -> None:
    peer = Peer()
    peer.registration.request(7, RowsRequest(1, 0, 1))
    waiting = await registering(peer, 8)
    assert peer.took() == [("head", 7, 10), ("head", 8, 10)]
    peer.says(REFUSED, "for target epoch 7")
    peer.says(READY, epoch=8)
    await waiting
    assert not peer.took(), "the rows were asked of a life that is over"


async def test_who_waits_for_an_earlier_life_of_the_target_is_told_at_once() -> None:
    peer = Peer()
    earlier = await registering(peer)
    await registering(peer, 8)
    with pytest.raises(Unavailable, match="a:1 was started anew"):
        await earlier


async def test_a_head_that_is_refused_later_is_not_ready() -> None:
    peer = Peer()
    waiting = await registering(peer)
    peer.says(READY)
    peer.says(REFUSED, "it is not ready")
    await waiting
    peer.registration.request(7, RowsRequest(1, 0, 1))
    assert peer.took() == [("head", 7, 10)]


async def test_a_stream_that_ends_answers_those_who_wait() -> None:
    peer = Peer()
    waiting = await registering(peer)
    peer.says(WANTED)
    peer.registration.settle(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await waiting
    await settle()
    assert peer.took() == [("head", 7, 10)]
