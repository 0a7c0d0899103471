"""Which workers a start needs, and when a gateway is ready."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from gateway.coordinator import Coordinator
from gateway.workers.member import State
from gateway.workers.membership import Membership
from gateway.workers.worker_pools import Pools
from outrider.wire.errors import IncompatiblePair
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.metrics import GatewayMetrics
from tests.unit.gateway.scripted_pool import connection_of
from tests.unit.gateway.workers.started import CHAT, CODE, SMALL, TINY, Parts, members


async def test_members_come_and_go_with_the_membership(pools: Pools) -> None:
    pools.update(Membership((CHAT, CODE, SMALL, TINY), members("chat/a", "code/b", "small/c", "tiny/d")))
    chat, code = pools.models["chat"], pools.models["code"]
    assert (set(chat.targets), set(code.targets)) == ({"a"}, {"b"})
    assert (set(chat.drafts), set(code.drafts)) == ({"c"}, {"c", "d"})
    kept, shared = chat.targets["a"], chat.drafts["c"]
    assert shared is code.drafts["c"]
    pools.update(Membership((CHAT, CODE, SMALL), members("chat/a", "code/b", "code/e", "small/c", is_draining=True)))
    assert chat.targets["a"] is kept, "its link goes on"
    assert kept.is_draining
    assert set(code.targets) == {"b", "e"}
    assert set(code.drafts) == {"c"}
    pools.update(
        Membership((CHAT, SMALL), (*members("chat/a", address="127.0.0.1:10"), *members("small/c", is_starting=True)))
    )
    assert set(pools.models) == {"chat"}
    assert code.removed
    assert code.reason() == "the pool code is no longer served"
    assert chat.targets["a"] is not kept, "another address is another worker"
    assert not chat.drafts
    assert set(pools.members) == {"a"}


async def test_one_pool_that_can_be_served_makes_a_gateway_ready(pools: Pools) -> None:
    coordinator = Coordinator(pools)
    assert coordinator.ready() == "no pool of targets"
    pools.update(Membership((CHAT, CODE), members("chat/a", "code/b")))
    assert coordinator.ready() == "no target at 127.0.0.1:9: not connected; no target at 127.0.0.1:9: not connected"
    pools.members["a"].link._connection = cast(Any, connection_of())
    assert coordinator.ready() is None
    pools.members["a"].spec = replace(pools.members["a"].spec, is_draining=True)
    assert coordinator.ready() is not None


async def test_a_failed_restart_is_reported_with_the_reason(pools: Pools) -> None:
    why = "model is 'llama', and there is no such folder"
    away = {"is_starting": True, "address": "", "why": why}
    pools.update(Membership((CHAT, SMALL), members("chat/a", "chat/b", "small/c", **away)))
    coordinator = Coordinator(pools)
    assert coordinator.ready() == f"no target in the pool chat: {why}"
    assert coordinator.refusals() == [f"target a: {why}", f"target b: {why}", f"draft c: {why}"]
    pools.update(Membership((CHAT, SMALL), (*members("chat/a"), *members("small/c", **away))))
    pools.members["a"].link._connection = cast(Any, connection_of())
    assert (coordinator.ready(), coordinator.refusals()) == (None, [f"draft c: {why}"])


async def test_a_start_goes_on_without_a_refused_head(pools: Pools) -> None:
    parts = Parts(pools)
    for name in "abc":
        await parts.connect(name)
    await pools.wait_ready()
    hearing = asyncio.create_task(pools.wait_drafts())
    parts.says("a:1", "it reads a layer too low")
    await parts.settle()
    assert not hearing.done(), "of the other it has not said"
    parts.says("b:1", None)
    await hearing
    why = "draft model does not fit target model: it reads a layer too low"
    assert Coordinator(pools).refusals() == [f"draft at 127.0.0.1:9: {why}"]
    assert (parts.served(), pools.members["c"].state) == (["b"], State.SERVING)
    parts.says("b:1", "it reads a layer too low")
    await parts.connect("b", 8)
    assert (parts.served(), pools.members["c"].state) == ([], State.REFUSED)
    parts.says("a:1", None)
    await parts.connect("a", 8)
    assert (parts.served(), pools.members["c"].state) == (["a"], State.SERVING)


MISFIT = IncompatiblePair("of another vocabulary")
ADDRESSES = {"target": "127.0.0.1:9", "draft": "127.0.0.1:9"}
SOURCES: list[dict[str, str]] = [
    ADDRESSES,
    {"registry": "127.0.0.1:9"},
    {"target": "dns:///a:9", "draft": "dns:///b:9"},
]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("refused", [MISFIT, None], ids=["refused", "away"])
async def test_a_start_does_not_need_its_draft(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    source: dict[str, str],
    refused: IncompatiblePair | None,
) -> None:
    """One of another vocabulary or protocol, and one that is away or hangs, wherever its address comes from."""
    monkeypatch.setattr("gateway.workers.worker_pools.DRAFTS_WAIT_S", 0.05)
    pools = Pools(GatewayConfig(**source), GatewayMetrics())  # type: ignore[arg-type]
    try:
        pools.update(Membership((CHAT, SMALL), members("chat/a", "small/c")))
        pools.members["a"].link._connection = cast(Any, connection_of())
        pools.members["c"].link.refused = refused
        await asyncio.wait_for(pools.wait_ready(), 10)
        assert Coordinator(pools).ready() is None
        await asyncio.wait_for(pools.wait_drafts(), 10)
        is_told = "no draft at 127.0.0.1:9 within 0.05 s: is it running there? Serving without" in caplog.text
        assert is_told is (refused is None), "the link has logged why one is refused"
        assert pools.refusals() == ([] if refused is None else ["draft at 127.0.0.1:9: of another vocabulary"])
    finally:
        await pools.close()


@pytest.mark.parametrize("source", [{"registry": "127.0.0.1:9"}, {"target": "dns:///workers:9"}])
async def test_a_start_where_workers_come_and_go_waits_on_until_one_pool_can_be_served(
    monkeypatch: pytest.MonkeyPatch, source: dict[str, str]
) -> None:
    """A model may take longer to load than a wrong address may take to be reported."""
    monkeypatch.setattr("gateway.workers.worker_pools.START_TIMEOUT_S", 0.05)
    monkeypatch.setattr("gateway.workers.worker_pools.OTHERS_WAIT_S", 0.05)
    pools = Pools(GatewayConfig(**source), GatewayMetrics())  # type: ignore[arg-type]
    try:
        pools.update(Membership((CHAT, CODE), members("chat/a", "code/b")))
        starting = asyncio.create_task(pools.wait_ready())
        done, _ = await asyncio.wait({starting}, timeout=0.2)
        assert not done
        pools.members["a"].link._connection = cast(Any, connection_of())
        pools._note_change()
        await asyncio.wait_for(starting, 10)
    finally:
        await pools.close()
