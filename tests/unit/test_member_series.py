"""Series of the workers as a gateway knows them: connected, by state, and those that are only being started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.member import State
from gateway.member_series import MemberSeries
from gateway.membership import Membership, MemberSpec, PoolSpec

POOLS = (PoolSpec("chat", "target"), PoolSpec("small", "draft", serves=("chat",)), PoolSpec("none", "draft"))
SPECS = (
    MemberSpec("chat-0", "chat", "target", "h:1"),
    MemberSpec("chat-1", "chat", "target", "h:2"),
    MemberSpec("small-0", "small", "draft", "", starting=True),
)


def member(spec: MemberSpec, state: State) -> Any:
    connection = None if state in (State.LOST, State.REFUSED) else object()
    breaker = SimpleNamespace(is_open=state is State.FAILING)
    return SimpleNamespace(
        spec=spec, name=spec.name, state=state, connection=connection, breaker=breaker, num_requests=3
    )


def test_members_are_counted_by_state_and_what_is_being_started_is_one() -> None:
    members = [member(SPECS[0], State.SERVING), member(SPECS[1], State.LOST)]
    registry = CollectorRegistry()
    registry.register(MemberSeries(lambda: members, lambda: Membership(POOLS, SPECS)))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    for pool, role, expected in (
        ("chat", "target", {"serving": 1, "lost": 1}),
        ("small", "draft", {"starting": 1}),
        ("none", "draft", {}),
    ):
        for state in ("serving", "draining", "failing", "lost", "refused", "starting"):
            assert value("outrider_members", pool=pool, role=role, state=state) == expected.get(state, 0)
    assert value("outrider_worker_connected", worker="target", member="chat-0", pool="chat") == 1
    assert value("outrider_worker_connected", worker="target", member="chat-1", pool="chat") == 0
    assert value("outrider_worker_connected", worker="draft", member="small-0", pool="small") is None
    assert value("outrider_breaker_open", member="chat-0") == 0
    assert value("outrider_member_requests", member="chat-1", pool="chat") == 3
