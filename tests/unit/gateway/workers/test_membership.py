"""Who the workers are: command lines, registry messages, and what a change of members changes."""

import pytest

from gateway.workers.membership import PoolSpec, from_config, from_proto
from outrider.v1 import registry_pb2 as rpb
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import GatewayConfig


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


def test_a_registrys_message() -> None:
    message = rpb.WorkerList(
        pools=[
            rpb.Pool(name="chat", role=rpb.ROLE_TARGET),
            rpb.Pool(name="small", role=rpb.ROLE_DRAFT, serves=["chat"]),
            rpb.Pool(name="new", role=9),
        ],
        workers=[
            rpb.Worker(name="a", pool="chat", role=rpb.ROLE_TARGET, state=rpb.WORKER_STATE_SERVING, address="a:1"),
            rpb.Worker(name="b", pool="chat", role=rpb.ROLE_TARGET, state=rpb.WORKER_STATE_DRAINING, address="b:1"),
            rpb.Worker(name="c", pool="small", role=rpb.ROLE_DRAFT, state=rpb.WORKER_STATE_STARTING, reason="w"),
            rpb.Worker(name="d", pool="new", role=9, state=rpb.WORKER_STATE_SERVING, address="d:1"),
        ],
    )
    found = from_proto(message)
    assert found.pools == (PoolSpec("chat", "target"), PoolSpec("small", "draft", serves=("chat",)))
    assert [(m.name, m.is_starting, m.is_draining) for m in found.members] == [
        ("a", False, False),
        ("b", False, True),
        ("c", True, False),
    ]
    assert (found.members[0].deliver_address, found.members[2].why) == ("a:1", "w")
