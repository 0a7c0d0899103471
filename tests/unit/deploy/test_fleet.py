"""What becomes of workers: followed through losses, added, drained and ended. The workers themselves are played."""

from collections.abc import Callable

import pytest

from deploy.actors import StartFailure
from deploy.pool_member import DRAINING, SERVING, STARTING
from deploy.ray_workers import ActorLost
from outrider.v1 import registry_pb2
from outrider.wire.errors import ConfigError, OutriderError, Unavailable
from tests.unit.deploy.played import DRAIN_LIMIT_S, Stage, chat, small


def draft_refuses(stage: Stage) -> None:
    stage.workers["draft-small-0"].next = StartFailure("model.safetensors ends early")


def draft_ends(stage: Stage) -> None:
    stage.workers["draft-small-0"].num_ends = 3


def draft_is_ended_for_good(stage: Stage) -> None:
    stage.workers["draft-small-0"].next = ActorLost("killed by ray kill", is_final=True)


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (draft_refuses, "model.safetensors ends early"),
        (draft_ends, "the process of draft-small-0 ended 3 times while it started"),
        (draft_is_ended_for_good, "the process of draft-small-0 ended for good: killed by ray kill"),
    ],
)
def test_a_start_needs_no_draft_unless_it_was_named_by_hand(
    fails: Callable[[Stage], None], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(chat(1), small(), needs_drafts=True)
    fails(stage)
    with pytest.raises(OutriderError, match=why):
        stage.tick()
    caplog.clear()
    stage = Stage(chat(1), small())
    fails(stage)
    stage.tick()
    assert not stage.fleet.is_ready()
    stage.serve("target-chat-0")
    assert stage.fleet.is_ready()
    assert stage.states()["target-chat-0"] == SERVING
    assert [why in record.getMessage() for record in caplog.records] == [True]
    stage.tick(30.0)
    stage.serve("draft-small-0")
    assert set(stage.states().values()) == {SERVING}


def test_scaling_up_starts_one_and_scaling_down_lets_what_runs_finish() -> None:
    stage = Stage(chat(1), small(2, least=2))
    stage.serve()
    stage.scale("small", 3)
    stage.serve("draft-small-2")
    for name, slots in (("draft-small-0", 2), ("draft-small-1", 1), ("draft-small-2", 3)):
        stage.answers(name, num_slots_in_use=slots)
    stage.tick()
    assert stage.scale("small", 2).num_desired == 2
    assert stage.states()["draft-small-1"] == DRAINING  # it had the fewest
    worker = stage.workers["draft-small-1"]
    for _ in range(10):
        stage.answers("draft-small-1", num_slots_in_use=1)
        stage.tick()
    assert not worker.is_stopping
    stage.answers("draft-small-1", num_slots_in_use=0)
    stage.tick()
    assert worker.is_killed
    stage.tick()
    assert list(stage.states()) == ["target-chat-0", "draft-small-0", "draft-small-2"]
    stage.scale("small", 3)
    stage.tick()
    assert "draft-small-1" in stage.states()  # the name is free again


def test_a_drain_leaves_time_to_notify_gateways_and_has_a_limit() -> None:
    stage = Stage(chat(2))
    stage.serve()
    for name in stage.workers:
        stage.answers(name, num_slots_in_use=4)
    stage.tick()
    stage.scale("chat", 1)
    worker = stage.workers["target-chat-1"]
    stage.answers("target-chat-1")
    stage.tick(1.0)
    assert not worker.is_stopping  # a slot may have been opened meanwhile
    stage.answers("target-chat-1", num_slots_in_use=4)
    stage.tick(DRAIN_LIMIT_S - 5)
    assert not worker.is_stopping
    stage.tick(5.0)
    assert worker.is_stopping


def test_one_that_is_lost_is_drained_for_gateways_that_still_see_it() -> None:
    """The launcher alone may be cut off from it: gateways with a stream use it on."""
    stage = Stage(chat(2))
    stage.serve()
    for _ in range(4):
        stage.answers("target-chat-0")
        stage.silent("target-chat-1")
        stage.tick(2.0)
    assert stage.states()["target-chat-1"] == STARTING
    stage.scale("chat", 1)
    lost = stage.membership.workers[1]
    assert (lost.name, lost.state, lost.address) == ("target-chat-1", DRAINING, "node:7")
    stage.tick(5.0)
    assert not stage.workers["target-chat-1"].is_stopping
    stage.started("target-chat-1")
    stage.answers("target-chat-1", num_slots_in_use=1)
    stage.tick(5.0)
    assert not stage.workers["target-chat-1"].is_stopping
    stage.answers("target-chat-1")
    stage.tick()
    assert stage.workers["target-chat-1"].is_killed


def test_load_that_rises_while_one_drains_takes_it_back_before_another_is_started() -> None:
    stage = Stage(chat(2, min=1, max=3))
    stage.serve()
    stage.scale("chat", 1)
    assert stage.states()["target-chat-1"] == DRAINING
    stage.room = "nothing is free"  # it has its place
    load = registry_pb2.PoolLoad(pool="chat", num_queued=50)
    stage.reports = [registry_pb2.GatewayReport(gateway="g", pools=[load])]
    for _ in range(8):
        stage.answers("target-chat-0")
        stage.answers("target-chat-1", num_slots_in_use=4)
        stage.tick()
    assert stage.states() == {"target-chat-0": SERVING, "target-chat-1": SERVING}
    stage.room = None
    for _ in range(8):
        stage.tick()
    assert list(stage.states()) == ["target-chat-0", "target-chat-1", "target-chat-2"]


def test_a_worker_that_does_not_stop_is_killed_after_a_while() -> None:
    stage = Stage(chat(2))
    stage.serve()
    stage.workers["target-chat-1"].stops_at_once = False
    stage.scale("chat", 1)
    for _ in range(4):
        if "target-chat-1" in stage.watched:
            stage.answers("target-chat-1")
        stage.tick()
    assert stage.workers["target-chat-1"].is_stopping
    assert not stage.workers["target-chat-1"].is_killed
    stage.tick(10)
    assert stage.workers["target-chat-1"].is_killed


def test_at_the_end_all_are_drained_and_ended() -> None:
    stage = Stage(chat(2))
    stage.serve("target-chat-0")
    stage.answers("target-chat-0", num_slots_in_use=1)
    stage.tick()
    changed = stage.fleet.drain_all()
    assert changed is not None
    assert {member.name: member.state for member in changed.workers} == {"target-chat-0": DRAINING}
    assert not stage.fleet.is_idle()
    stage.now_s += 2.0
    stage.answers("target-chat-0")
    assert stage.fleet.is_idle()
    stage.fleet.end_all()
    assert all(worker.is_killed for worker in stage.workers.values())


def test_the_end_trusts_nothing_that_was_seen_before_gateways_knew_of_it() -> None:
    stage = Stage(chat(1))
    stage.serve()
    stage.fleet.drain_all()
    stage.now_s += 1.0
    stage.answers("target-chat-0")
    stage.now_s += 1.0
    assert not stage.fleet.is_idle(), "a slot may have been opened since"
    stage.answers("target-chat-0", num_slots_in_use=1)
    assert not stage.fleet.is_idle()
    stage.answers("target-chat-0")
    assert stage.fleet.is_idle()
    stage = Stage(chat(1))
    stage.serve()
    stage.fleet.drain_all(notice_s=0.0)
    assert not stage.fleet.is_idle(), "what is known of it is old"
    stage.answers("target-chat-0")
    assert stage.fleet.is_idle()


def test_a_start_that_fails_ends_only_what_it_started() -> None:
    stage = Stage(chat(2), left_behind={"target-chat-0": "chat"})
    stage.workers["target-chat-1"].next = StartFailure("no such model")
    with pytest.raises(ConfigError):
        stage.tick()
    stage.fleet.end_all(keeps_taken_over=True)
    assert {name: worker.is_killed for name, worker in stage.workers.items()} == {
        "target-chat-0": False,
        "target-chat-1": True,
    }


def test_an_actor_that_ray_refuses_is_created_again_later() -> None:
    stage = Stage(chat(1))
    stage.serve()
    stage.is_refusing = True
    stage.scale("chat", 2)
    stage.tick(10)
    assert list(stage.workers) == ["target-chat-0"]
    stage.is_refusing = False
    stage.tick(30)
    assert list(stage.workers) == ["target-chat-0", "target-chat-1"]
    stage = Stage(chat(1), is_refusing=True, starts=False)
    with pytest.raises(Unavailable, match="no actor"):
        stage.fleet.start()
