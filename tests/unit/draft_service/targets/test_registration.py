"""A draft's head at a target: what is sent when, and what becomes of rows that are requested meanwhile."""

import asyncio

import pytest

from draft_service.slot_jobs import FeaturesRequest
from draft_service.targets import registration as module
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import IncompatiblePair, Unavailable
from tests.unit.draft_service.targets.registered import HEAD, Peer

WANTED, READY, REFUSED = tpb.HEAD_STATE_NEEDS_WEIGHTS, tpb.HEAD_STATE_READY, tpb.HEAD_STATE_REFUSED


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_weights_are_sent_on_request_and_features_requested_once_the_head_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 4)
    peer = Peer()
    peer.registration.request(7, FeaturesRequest(1, 0, 1))
    peer.registration.request(7, FeaturesRequest(2, 30, 1))
    assert peer.took() == [("head", 7, 10)], "once"
    peer.says(WANTED)
    await settle()
    data = HEAD.data
    assert peer.took() == [("weights", 0, data[:4]), ("weights", 4, data[4:8]), ("weights", 8, data[8:])]
    peer.says(READY)
    assert not peer.took(), "the slots request them again"
    peer.registration.request(7, FeaturesRequest(3, 9, 1))
    assert peer.took() == [("features", 3, 9)]
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


async def test_a_refused_head_is_registered_again_only_on_request() -> None:
    peer = Peer()
    waiting = await registering(peer)
    peer.says(WANTED)
    peer.says(REFUSED, "no room")
    assert await refusal(waiting) == "no room"
    assert peer.took() == [("head", 7, 10)], "the weights stay here"
    peer.registration.request(7, FeaturesRequest(1, 0, 1))
    assert not peer.took()
    again = await registering(peer)
    assert peer.took() == [("head", 7, 10)]
    peer.says(READY)
    await again
    assert not peer.took(), "what was asked for while it was refused is lost"


async def test_another_life_of_the_target_is_registered_at_anew() -> None:
    peer = Peer()
    peer.registration.request(7, FeaturesRequest(1, 0, 1))
    waiting = await registering(peer, 8)
    assert peer.took() == [("head", 7, 10), ("head", 8, 10)]
    peer.says(REFUSED, "for target epoch 7")
    peer.says(READY, epoch=8)
    await waiting
    assert not peer.took(), "the rows were asked of a life that is over"


async def test_a_stream_that_ends_answers_those_who_wait() -> None:
    peer = Peer()
    waiting = await registering(peer)
    peer.says(WANTED)
    peer.registration.settle(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await waiting
    await settle()
    assert peer.took() == [("head", 7, 10)]
