"""Who the workers are: command lines, registry messages, and what a change of members changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest

from gateway.coordinator import Coordinator
from gateway.workers.member import DraftMember, State, TargetMember
from gateway.workers.membership import Membership, MemberSpec, PoolSpec, from_config, from_proto
from gateway.workers.pools import Pools
from gateway.workers.reference_target import ReferenceTarget
from outrider.v1 import common_pb2 as pb
from outrider.v1 import registry_pb2 as rpb
from outrider.wire.errors import ConfigError, IncompatiblePair, OutriderError, Unavailable
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.metrics import GatewayMetrics
from tests.unit.scripted_pool import INFO, connection_of
from tests.unit.test_detokenizer import byte_level

CHAT, CODE = PoolSpec("chat", "target"), PoolSpec("code", "target", "coder")
SMALL, TINY = PoolSpec("small", "draft", serves=("chat", "code")), PoolSpec("tiny", "draft", serves=("code",))


def test_a_command_line_is_a_pool_of_targets_and_one_of_drafts() -> None:
    config = GatewayConfig(target="a:1, b:2", draft="c:3", target_for_draft="x:1,y:2", model_name="demo")
    found = from_config(config)
    assert found.pools == (PoolSpec("target", "target", "demo"), PoolSpec("draft", "draft", serves=("target",)))
    assert [(m.name, m.address, m.deliver_address) for m in found.members] == [
        ("target-0", "a:1", "x:1"),
        ("target-1", "b:2", "y:2"),
        ("draft-0", "c:3", ""),
    ]
    assert len(from_config(GatewayConfig(target="a:1")).pools) == 1
    found = from_config(GatewayConfig(target="a:1", draft="c:3,d:4;e:5"))
    assert [(m.name, m.pool, m.address) for m in found.members if m.role == "draft"] == [
        ("draft-0", "draft", "c:3"),
        ("draft-1", "draft", "d:4"),
        ("draft-2", "draft-2", "e:5"),
    ]
    assert [(pool.name, pool.serves) for pool in found.pools[1:]] == [("draft", ("target",)), ("draft-2", ("target",))]
    named = from_config(GatewayConfig(target="a:1", draft="small=c:3,d:4;draft=e:5"))
    assert [(m.name, m.pool, m.address) for m in named.members[1:]] == [
        ("draft-small-0", "small", "c:3"),
        ("draft-small-1", "small", "d:4"),
        ("draft-0", "draft", "e:5"),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "a:1,"}, "target is 'a:1,', which has an empty address"),
        ({"target": "a:1,a:1"}, "target is 'a:1,a:1', which names a worker twice"),
        ({"target": "a:1", "draft": "c:1;d:1,c:1"}, "draft is 'c:1;d:1,c:1', which names a worker twice"),
        ({"target": "x=a:1", "draft": "x=b:1"}, "target and draft both have a pool 'x'"),
        ({"target": "dns:///a:1", "target_for_draft": "b:1"}, "target_for_draft is given and target has 'dns:///a:1'"),
        ({"target": "a:1", "draft": "c:1;;d:1"}, "draft is 'c:1;;d:1', which has an empty pool"),
        ({"target": "a:1", "draft": "c:1;3"}, "draft has the address '3', must be host:port"),
        ({"target": "a"}, "target has the address 'a', must be host:port"),
        ({"target": "dns:///h:99999"}, "target has the address 'dns:///h:99999', must be host:port"),
        ({"target": "dns:///:7200"}, "target has the address 'dns:///:7200', must be host:port"),
        (
            {"target": "chat=h:1,code=h:2"},
            "target has the pool 'chat=h:1,code'; write POOL=host:port,host:port, one pool",
        ),
        ({"target": "=h:1"}, "target has the pool ''"),
        ({"target": "a:1", "draft": "x=c:1,y=d:1"}, "draft has the pool 'x=c:1,y'; write .*;POOL=host:port"),
        ({"target": "a:1", "draft": "c:1;draft=d:1"}, "with two pools called draft"),
        ({"target": "a:1,b:1", "target_for_draft": "x:1"}, "target_for_draft has 1 addresses and target has 2"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_config(GatewayConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(("draft", "is_told"), [("c:1,d:1", True), ("c:1;d:1", False)])
def test_a_union_of_drafts_of_one_pool_is_told(caplog: pytest.LogCaptureFixture, draft: str, is_told: bool) -> None:
    from_config(GatewayConfig(target="a:1", draft=draft, drafter="model&model"))
    assert ("it takes two pools" in caplog.text) is is_told


def test_a_registrys_message() -> None:
    message = rpb.Membership(
        pools=[
            rpb.Pool(name="chat", role=rpb.ROLE_TARGET),
            rpb.Pool(name="small", role=rpb.ROLE_DRAFT, serves=["chat"]),
            rpb.Pool(name="new", role=9),
        ],
        members=[
            rpb.Member(name="a", pool="chat", role=rpb.ROLE_TARGET, state=rpb.MEMBER_STATE_SERVING, address="a:1"),
            rpb.Member(name="b", pool="chat", role=rpb.ROLE_TARGET, state=rpb.MEMBER_STATE_DRAINING, address="b:1"),
            rpb.Member(name="c", pool="small", role=rpb.ROLE_DRAFT, state=rpb.MEMBER_STATE_STARTING, why="w"),
            rpb.Member(name="d", pool="new", role=9, state=rpb.MEMBER_STATE_SERVING, address="d:1"),
        ],
    )
    found = from_proto(message)
    assert found.pools == (PoolSpec("chat", "target"), PoolSpec("small", "draft", serves=("chat",)))
    assert [(m.name, m.starting, m.draining) for m in found.members] == [
        ("a", False, False),
        ("b", False, True),
        ("c", True, False),
    ]
    assert (found.members[0].deliver_address, found.members[2].why) == ("a:1", "w")


@pytest.fixture
async def pools() -> AsyncIterator[Pools]:
    made = Pools(GatewayConfig(registry="127.0.0.1:9"), GatewayMetrics())
    yield made
    await made.close()


def members(*names: str, **changes: object) -> tuple[MemberSpec, ...]:
    """By "pool/name"; nobody listens at their addresses."""
    role = {"chat": "target", "code": "target", "small": "draft", "tiny": "draft"}
    return tuple(
        replace(MemberSpec(name, pool, role[pool], "127.0.0.1:9", "127.0.0.1:9"), **changes)  # type: ignore[arg-type]
        for pool, name in (each.split("/") for each in names)
    )


async def test_members_come_and_go_with_the_membership(pools: Pools) -> None:
    pools.update(Membership((CHAT, CODE, SMALL, TINY), members("chat/a", "code/b", "small/c", "tiny/d")))
    chat, code = pools.models["chat"], pools.models["code"]
    assert (set(chat.targets), set(code.targets)) == ({"a"}, {"b"})
    assert (set(chat.drafts), set(code.drafts)) == ({"c"}, {"c", "d"})
    kept, shared = chat.targets["a"], chat.drafts["c"]
    assert shared is code.drafts["c"]
    pools.update(Membership((CHAT, CODE, SMALL), members("chat/a", "code/b", "code/e", "small/c", draining=True)))
    assert chat.targets["a"] is kept, "its link goes on"
    assert kept.draining
    assert set(code.targets) == {"b", "e"}
    assert set(code.drafts) == {"c"}
    pools.update(
        Membership((CHAT, SMALL), (*members("chat/a", address="127.0.0.1:10"), *members("small/c", starting=True)))
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
    pools.members["a"].spec = replace(pools.members["a"].spec, draining=True)
    assert coordinator.ready() is not None


async def test_what_does_not_start_again_is_said_with_the_reason(pools: Pools) -> None:
    why = "model is 'llama', and there is no such folder"
    away = {"starting": True, "address": "", "why": why}
    pools.update(Membership((CHAT, SMALL), members("chat/a", "chat/b", "small/c", **away)))
    coordinator = Coordinator(pools)
    assert coordinator.ready() == f"no target in the pool chat: {why}"
    assert coordinator.refusals() == [f"target a: {why}", f"target b: {why}", f"draft c: {why}"]
    pools.update(Membership((CHAT, SMALL), (*members("chat/a"), *members("small/c", **away))))
    pools.members["a"].link._connection = cast(Any, connection_of())
    assert (coordinator.ready(), coordinator.refusals()) == (None, [f"draft c: {why}"])


class Parts:
    """Two pools of a target each and a head that serves both, whose links are the test's."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.asked: list[tuple[str, int]] = []
        self.said: dict[str, asyncio.Future[str | None]] = {}
        """What the head says of each target, by its address."""
        specs = members("chat/a", "code/b", "small/c")
        specs = tuple(replace(each, deliver_address=f"{each.name}:1") for each in specs)
        pools.update(Membership((CHAT, CODE, SMALL), specs))
        head: Any = pools.members["c"].link
        head.info = pb.WorkerInfo(needs_features=True, num_slots=1, epoch=3)
        head.pair = self._pair
        for address in ("a:1", "b:1"):
            self.said[address] = asyncio.get_running_loop().create_future()

    async def _pair(self, address: str, epoch: int) -> str | None:
        self.asked.append((address, epoch))
        return await asyncio.shield(self.said[address])

    def says(self, address: str, why: str | None) -> None:
        if self.said[address].done():
            self.said[address] = asyncio.get_running_loop().create_future()
        self.said[address].set_result(why)

    async def connect(self, name: str, epoch: int = 7) -> None:
        link = self.pools.members[name].link
        before, link._connection = link._connection, cast(Any, connection_of(epoch))
        self.pools._link_changed(name, link, before, link._connection)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def served(self) -> list[str]:
        """Return the targets whose requests the head may be given."""
        head = cast(DraftMember, self.pools.members["c"])
        targets = [cast(TargetMember, self.pools.members[name]) for name in "ab"]
        return [target.name for target in targets if head.serves(target)]


async def test_a_head_is_paired_with_each_target_on_its_own(pools: Pools) -> None:
    parts = Parts(pools)
    await parts.connect("a")
    await parts.connect("c")
    assert (parts.asked, parts.served()) == ([("a:1", 7)], []), "what is not there yet is not waited for"
    assert pools.members["c"].state is State.LOST, "no target knows it"
    parts.says("a:1", None)
    await parts.settle()
    assert parts.served() == ["a"]
    await parts.connect("b", 8)
    assert (parts.asked[1:], parts.served()) == ([("b:1", 8)], ["a"]), "while the other is asked, too"
    parts.says("b:1", None)
    await parts.settle()
    assert parts.served() == ["a", "b"]
    await parts.connect("a", 9)
    assert (parts.asked[2:], parts.served()) == ([("a:1", 9)], ["a", "b"]), "each life is asked of"


async def test_a_start_goes_on_without_a_head_that_is_refused_and_another_life_of_a_target_tests_it_again(
    pools: Pools,
) -> None:
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


async def test_a_refused_head_is_tried_again_when_a_worker_comes_or_goes(pools: Pools) -> None:
    """Another's head may have had the memory that it lacked."""
    parts = Parts(pools)
    await parts.connect("a")
    await parts.connect("c")
    parts.says("a:1", "no room for its map")
    await parts.settle()
    assert (parts.served(), pools.members["c"].state) == ([], State.REFUSED)
    parts.says("a:1", None)
    await parts.settle()
    assert parts.served() == [], "nothing has changed"
    parts.says("b:1", None)
    await parts.connect("b")
    assert parts.served() == ["a", "b"]


async def test_another_target_of_the_same_name_is_paired_with_while_the_one_before_is_still_asked(pools: Pools) -> None:
    parts = Parts(pools)
    await parts.connect("a")
    await parts.connect("c")
    specs = tuple(member.spec for member in pools.members.values())
    moved = tuple(replace(spec, address="127.0.0.1:10") if spec.name == "a" else spec for spec in specs)
    pools.update(Membership((CHAT, CODE, SMALL), moved))
    await parts.connect("a", 8)
    assert parts.asked == [("a:1", 7), ("a:1", 8)]
    parts.says("a:1", None)
    await parts.settle()
    assert parts.served() == ["a"]


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
    monkeypatch.setattr("gateway.workers.pools.DRAFTS_WAIT_S", 0.05)
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


async def test_a_start_does_not_need_a_target_of_another_model_in_the_pool(pools: Pools) -> None:
    """It may be refused a moment before the one that it was compared with is connected."""
    pools.update(Membership((CHAT,), members("chat/a", "chat/b")))
    pools.members["b"].link.refused = MISFIT
    starting = asyncio.create_task(pools.wait_ready())
    await asyncio.sleep(0)
    assert not starting.done()
    pools.members["a"].link._connection = cast(Any, connection_of())
    pools._note_change()
    await asyncio.wait_for(starting, 10)
    assert Coordinator(pools).refusals() == ["target at 127.0.0.1:9: of another vocabulary"]


async def test_a_start_does_not_need_the_other_pools(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is refused is not waited for, one that is away for a while."""
    pools.update(Membership((CHAT, CODE), members("chat/a", "code/b")))
    pools.members["a"].link._connection = cast(Any, connection_of())
    pools.members["b"].link.refused = ConfigError("tokenizer.json cannot be used: it is none")
    await asyncio.wait_for(pools.wait_ready(), 10)
    pools.members["b"].link.refused = None
    monkeypatch.setattr("gateway.workers.pools.OTHERS_WAIT_S", 0.05)
    await asyncio.wait_for(pools.wait_ready(), 10)


@pytest.mark.parametrize("error", [ConfigError("tokenizer.json cannot be used: it is none"), MISFIT])
async def test_a_start_ends_where_every_target_was_refused(pools: Pools, error: OutriderError) -> None:
    pools.update(Membership((CHAT, SMALL), members("chat/a", "chat/b", "small/c")))
    for name in "ab":
        pools.members[name].link.refused = error
    with pytest.raises(type(error), match=error.message):
        await pools.wait_ready()


async def test_a_start_with_given_addresses_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.workers.pools.START_TIMEOUT_S", 0.1)
    pools = Pools(GatewayConfig(target="127.0.0.1:9"), GatewayMetrics())
    try:
        pools.update(Membership((CHAT,), members("chat/a")))
        with pytest.raises(Unavailable, match=r"no target at .* within 0.1 s"):
            await pools.wait_ready()
    finally:
        await pools.close()


@pytest.mark.parametrize("source", [{"registry": "127.0.0.1:9"}, {"target": "dns:///workers:9"}])
async def test_a_start_where_workers_come_and_go_waits_on_until_one_pool_can_be_served(
    monkeypatch: pytest.MonkeyPatch, source: dict[str, str]
) -> None:
    """A model may take longer to load than a wrong address may take to be reported."""
    monkeypatch.setattr("gateway.workers.pools.START_TIMEOUT_S", 0.05)
    monkeypatch.setattr("gateway.workers.pools.OTHERS_WAIT_S", 0.05)
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


def test_what_a_later_target_must_be() -> None:
    reference = ReferenceTarget(INFO, pb.TokenizerFiles(), byte_level(), INFO.model_id)
    same = pb.WorkerInfo()
    same.CopyFrom(INFO)
    reference.check_target(same, same.model_id)
    for change, message in (
        ({"vocab_size": 127}, "has vocabulary 127"),
        ({"tokenizer_fingerprint": "other"}, "has vocabulary 128 other"),
        ({"model_id": "another"}, "came back as another in"),
        ({"dtype": "bfloat16"}, "in bfloat16 "),
        ({"quantization": "int8"}, "quantization int8"),
        ({"batch_invariant": True}, "batch-invariant"),
        ({"eos_token_ids": [3]}, r"ending at \[3\]"),
        ({"context_limit": 100}, "context limit is 100, the pool was started with 512"),
    ):
        other = pb.WorkerInfo()
        other.CopyFrom(INFO)
        other.MergeFrom(pb.WorkerInfo(**change))
        with pytest.raises(IncompatiblePair, match=message):
            reference.check_target(other, other.model_id)
    with pytest.raises(IncompatiblePair, match="another folder named model than the one the pool was started with"):
        reference.check_target(same, "/elsewhere/model")


async def test_two_models_of_one_short_name_are_told_apart_or_refused(pools: Pools) -> None:
    pools.update(Membership((CHAT, CODE, PoolSpec("more", "target")), ()))
    chat, code, more = (pools.models[name] for name in ("chat", "code", "more"))
    for model, path in ((chat, "/a/model"), (code, "/b/model")):
        model.refer(ReferenceTarget(INFO, pb.TokenizerFiles(), byte_level(), path))
    assert [model.id for model in (chat, code)] == ["model", "coder"], "one has a model_name"
    assert [model.load().target for model in (chat, code)] == ["model", "model@code"], "their rounds are counted apart"
    with pytest.raises(IncompatiblePair, match="model id 'model' of the pool more is that of the pool chat already"):
        more.refer(ReferenceTarget(INFO, pb.TokenizerFiles(), byte_level(), "/c/model"))
