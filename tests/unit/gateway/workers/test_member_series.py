"""Series of the workers as a gateway knows them: connected, by state, and those that are only being started."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.workers.member import State
from gateway.workers.member_series import MemberSeries
from gateway.workers.membership import Membership, MemberSpec, PoolSpec

POOLS = (PoolSpec("chat", "target"), PoolSpec("small", "draft", serves=("chat",)), PoolSpec("none", "draft"))
SPECS = (
    MemberSpec("chat-0", "chat", "target", "h:1"),
    MemberSpec("chat-1", "chat", "target", "h:2"),
    MemberSpec("small-0", "small", "draft", "", is_starting=True),
)


def member(spec: MemberSpec, state: State) -> Any:
    connection = None if state in (State.LOST, State.REFUSED) else object()
    health = SimpleNamespace(is_down=state is State.FAILING)
    return SimpleNamespace(
        spec=spec,
        name=spec.name,
        state=state,
        connection=connection,
        is_draining=spec.is_draining or state is State.DRAINING,
        health=health,
        num_choices=3,
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
    assert value("outrider_worker_connected", worker="draft", member="small-0", pool="small") == 0
    assert value("outrider_breaker_open", member="chat-0") == 0
    assert value("outrider_member_requests", member="chat-1", pool="chat") == 3


STARTING = (MemberSpec("chat-0", "chat", "target", "", is_starting=True), None)
GONE = None


def listed(state: State, *, draining: bool = False) -> tuple[MemberSpec, State]:
    return MemberSpec("chat-0", "chat", "target", "h:1", is_draining=draining), state


SERVING, LOST = listed(State.SERVING), listed(State.LOST)


@pytest.mark.parametrize(
    ("life", "lost"),
    [
        ([SERVING], 0),
        ([LOST], 1),
        ([SERVING, LOST], 1),
        ([SERVING, STARTING], 1),
        ([SERVING, listed(State.FAILING)], 1),
        ([STARTING], 0),
        ([SERVING, listed(State.DRAINING, draining=True), listed(State.LOST, draining=True)], 0),
        ([SERVING, listed(State.DRAINING), STARTING], 0),
        ([SERVING, GONE], None),
        ([SERVING, listed(State.DRAINING, draining=True), GONE, STARTING], 0),
        ([SERVING, listed(State.DRAINING), SERVING, LOST], 1),
    ],
    ids=[
        "serves",
        "not there from the beginning",
        "killed",
        "killed and started again",
        "hangs",
        "a pool grows",
        "a pool shrinks",
        "restarted in order",
        "given up",
        "a pool shrinks and grows",
        "restarted in order, then killed",
    ],
)
def test_lost_is_who_ought_to_serve_and_does_not(
    life: Sequence[tuple[MemberSpec, State | None] | None], lost: int | None
) -> None:
    now: list[tuple[MemberSpec, State | None]] = []
    series = MemberSeries(
        lambda: [member(spec, state) for spec, state in now if state is not None],
        lambda: Membership(POOLS, tuple(spec for spec, _ in now)),
    )
    registry = CollectorRegistry()
    registry.register(series)
    for at_that_time in life:
        now[:] = [] if at_that_time is None else [at_that_time]
        series.note_change()
    labels = {"worker": "target", "member": "chat-0", "pool": "chat"}
    assert registry.get_sample_value("outrider_worker_lost", labels) == lost
