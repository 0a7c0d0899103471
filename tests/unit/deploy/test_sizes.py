"""When a pool grows and shrinks: decisions over a fake clock, and what they are made of."""

from collections.abc import Callable

import pytest

from deploy.sizes import PoolLoad, PoolLoads, Scaler, SizeChange
from outrider.v1 import common_pb2, registry_pb2
from outrider.wire.settings.config import DraftConfig, TargetConfig
from outrider.wire.settings.cores import Role
from outrider.wire.settings.pools import Pool
from outrider.wire.settings.system import ScalingConfig

CONFIG = ScalingConfig(queue_high=2, busy_high=0.8, busy_low=0.4, late_high=0.25, up_after_s=5, down_after_s=60)


def changes(scaler: Scaler, sight: Callable[[float], PoolLoad], until_s: int) -> list[tuple[int, SizeChange]]:
    """What is decided when it is asked every second, and when."""
    found = [(second, scaler.decide(sight(second), float(second)).change) for second in range(until_s + 1)]
    return [(second, change) for second, change in found if change is not SizeChange.STAY]


def scaler(role: Role = "target", least: int = 1, most: int = 4) -> Scaler:
    return Scaler(role, least, most, CONFIG)


def test_a_queue_grows_the_targets_after_a_few_seconds_and_again_only_after_as_many() -> None:
    sight = PoolLoad(num_serving=2, num_queued=5, busy_share=0.5)
    assert changes(scaler(), lambda now: sight, 12) == [(5, SizeChange.GROW), (11, SizeChange.GROW)]


def test_refusals_are_counted_for_seconds() -> None:
    loads = PoolLoads()
    for second in range(6):
        loads.set_reports([report("g", num_refused=70 + second), report("h", num_refused=3)], second)
    assert loads.load_of(CHAT, ["a"], num_starting=0, num_draining=0).num_refused == 5
    assert loads.load_of(SMALL, ["b"], num_starting=0, num_draining=0).num_refused == 0
    for second in range(6, 13):
        loads.set_reports([report("g", num_refused=75)], second)
    assert loads.load_of(CHAT, ["a"], num_starting=0, num_draining=0).num_refused == 0


def test_busy_targets_grow_and_busy_drafts_do_not() -> None:
    """They draft ahead whenever they can."""
    busy = PoolLoad(num_serving=1, busy_share=0.9)
    assert changes(scaler("target"), lambda now: busy, 5) == [(5, SizeChange.GROW)]
    assert changes(scaler("draft"), lambda now: busy, 99) == []


def test_drafts_do_not_look_at_the_queue_but_at_late_drafts() -> None:
    late = PoolLoad(num_serving=2, busy_share=0.6, late_share=0.3)
    assert changes(scaler("draft"), lambda now: late, 5) == [(5, SizeChange.GROW)]
    assert changes(scaler("target"), lambda now: late, 5) == []
    assert changes(scaler("draft"), lambda now: PoolLoad(num_serving=2, busy_share=0.6, late_share=0.2), 99) == []


def test_it_shrinks_after_a_minute_and_not_while_the_others_would_be_busy() -> None:
    assert changes(scaler(), lambda now: PoolLoad(num_serving=3, busy_share=0.2), 60) == [(60, SizeChange.SHRINK)]
    assert changes(scaler(), lambda now: PoolLoad(num_serving=3, busy_share=0.3), 300) == []  # 0.45 for two
    assert changes(scaler(), lambda now: PoolLoad(num_serving=3, num_queued=1, busy_share=0.1), 300) == []


def test_the_last_draft_goes_only_when_nothing_comes_at_all() -> None:
    assert changes(scaler("draft", least=0), lambda now: PoolLoad(num_serving=1, busy_share=0.01), 99) == []
    assert changes(scaler("draft", least=0), lambda now: PoolLoad(num_serving=1, busy_share=0.0), 60) == [
        (60, SizeChange.SHRINK)
    ]


def test_a_draft_comes_back_when_something_runs_for_a_while() -> None:
    none = scaler("draft", least=0)
    assert changes(none, lambda now: PoolLoad(num_serving=0), 99) == []
    assert changes(none, lambda now: PoolLoad(num_serving=0, num_choices=int(now % 5 != 4)), 99) == []
    assert changes(none, lambda now: PoolLoad(num_serving=0, num_choices=1), 5) == [(5, SizeChange.GROW)]
    unused = PoolLoad(num_serving=1, num_choices=1, busy_share=0.0)  # nobody wants to be drafted for
    assert changes(none, lambda now: unused, 300) == []
    assert changes(none, lambda now: PoolLoad(num_serving=1, busy_share=0.0), 60) == [(60, SizeChange.SHRINK)]


CHAT = Pool(name="chat", role="target", worker=TargetConfig(model="t"), max=2)
SMALL = Pool(name="small", role="draft", worker=DraftConfig(model="d"), serves=("chat",))


def report(gateway: str, **load: int) -> registry_pb2.GatewayReport:
    return registry_pb2.GatewayReport(gateway=gateway, pools=[registry_pb2.PoolLoad(pool="chat", **load)])


def test_a_busy_share_is_the_slope_of_the_workers_own_sum() -> None:
    loads = PoolLoads()
    for second in range(6):
        loads.add_info("a", common_pb2.WorkerInfo(busy_us=1_000_000 + 500_000 * second, num_steps=9), second)
        loads.add_info("b", common_pb2.WorkerInfo(busy_us=250_000 * second), second)
    sight = loads.load_of(CHAT, ["a", "b"], num_starting=0, num_draining=0)
    assert sight.busy_share == pytest.approx(0.375)
    assert loads.load_of(CHAT, ["a", "new"], num_starting=0, num_draining=0).busy_share is None
    loads.add_info("a", common_pb2.WorkerInfo(busy_us=100, num_steps=1), 6)  # another life
    assert loads.load_of(CHAT, ["a", "b"], num_starting=0, num_draining=0).busy_share is None


def test_queues_of_all_gateways_are_added() -> None:
    loads = PoolLoads()
    loads.set_reports(
        [report("g", num_queued=3, num_running=2, num_rounds=1000, num_late=1000), report("h", num_queued=4)], 0
    )
    target = loads.load_of(CHAT, ["a"], num_starting=0, num_draining=0)
    assert (target.num_queued, target.num_choices) == (7, 0)
    assert loads.load_of(SMALL, [], num_starting=0, num_draining=0).num_choices == 9
    assert loads.load_of(SMALL, ["b"], num_starting=0, num_draining=0).late_share is None
    loads.set_reports([report("g", num_rounds=1100, num_late=1010), report("h", num_rounds=100, num_late=50)], 1)
    draft = loads.load_of(SMALL, ["b"], num_starting=0, num_draining=0)
    assert (draft.num_queued, draft.late_share) == (0, pytest.approx(0.3))
    loads.set_reports([], 2)  # both gateways left
    assert loads.load_of(CHAT, ["a"], num_starting=0, num_draining=0).num_queued == 0
    assert loads.load_of(SMALL, ["b"], num_starting=0, num_draining=0).late_share is None
