"""A worker that starts, is lost and is followed to another place."""

import pytest

from deploy.actors import StartFailure
from deploy.pool_member import SERVING, STARTING
from deploy.ray_workers import ActorLost
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from outrider.wire.settings.pools import Pool
from tests.unit.deploy.played import Stage, chat, small


def test_a_worker_serves_once_it_has_replied_at_its_address() -> None:
    stage = Stage(chat(1), small())
    stage.tick()
    stage.started("target-chat-0")
    stage.answers("target-chat-0")
    stage.tick(8.0)
    assert stage.states() == {}  # gateways that knew them before go on with that
    stage.tick(2.0)
    assert stage.states() == {"target-chat-0": SERVING, "draft-small-0": STARTING}
    assert [(pool.name, list(pool.serves)) for pool in stage.membership.pools] == [("chat", []), ("small", ["chat"])]
    target = stage.membership.workers[0]
    assert (target.address, target.metrics_address, target.node) == ("node:7", "node:8", "node")
    stage.started("draft-small-0")
    assert stage.states()["draft-small-0"] == STARTING
    assert not stage.fleet.is_ready()
    stage.answers("draft-small-0")
    stage.tick()
    assert stage.fleet.is_ready()
    version = stage.membership.version
    stage.tick()
    assert stage.membership.version == version  # nothing changed


def test_a_lost_worker_is_reported_at_once_and_followed_to_another_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    stage = Stage(chat(2))
    stage.serve()
    for _ in range(2):
        stage.answers("target-chat-0", epoch=0)
    stage.tick()
    lost = stage.membership.workers[0]
    assert (lost.state, lost.address, lost.node) == (STARTING, "", "")
    assert stage.workers["target-chat-0"].num_queries == 2
    stage.workers["target-chat-0"].next = ActorLost("restarting", is_final=False)
    stage.tick()
    stage.tick()
    assert stage.workers["target-chat-0"].num_queries == 3  # again, after a moment
    stage.started("target-chat-0", epoch=2, port=70)
    stage.answers("target-chat-0", epoch=2)
    stage.tick()
    assert (stage.membership.workers[0].state, stage.membership.workers[0].address) == (SERVING, "node:70")
    assert ("target-chat-0", "lost") in stage.told
    lost_record, back = (record for record in caplog.records if "target-chat-0" in record.getMessage())
    assert lost_record.levelname == "WARNING" and back.getMessage() == "target-chat-0 at node:70 is back"


def test_at_first_a_refusal_is_the_end_and_later_another_is_tried_after_a_pause() -> None:
    stage = Stage(chat(1))
    stage.workers["target-chat-0"].next = StartFailure("no such model")
    with pytest.raises(ConfigError, match="no such model"):
        stage.tick()
    stage = Stage(chat(1))
    stage.serve()
    assert stage.scale("chat", 2).num_starting == 0  # as it was before
    first = stage.workers["target-chat-1"]
    first.next = StartFailure("out of memory")
    stage.tick()
    assert list(stage.states()) == ["target-chat-0"]
    stage.tick(10)
    assert stage.workers["target-chat-1"] is first
    stage.tick(30)
    assert stage.workers["target-chat-1"] is not first
    assert first.is_killed


def test_a_failed_restart_reports_the_reason_and_is_tried_after_growing_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Until it serves; a draft as well as a target, and one that a launcher before this one started."""
    pool = Pool(name="chat", role="target", worker=TargetConfig(model="/srv/private/llama"), count=1)
    stage = Stage(pool, small(), left_behind={"draft-small-0": "small"})
    stage.serve("target-chat-0")
    worker, draft = stage.workers["target-chat-0"], stage.workers["draft-small-0"]
    draft.next = StartFailure("model is 'd', and there is no such folder")
    why = "model is '/srv/private/llama', and there is no such folder"

    def tries(seconds: int) -> list[int]:
        """Lose the target, whose next lives do not start. Return after how many seconds another is started."""
        for _ in range(2):
            stage.answers("target-chat-0", epoch=0)
        stage.tick(0.0)
        worker.next = StartFailure(why)
        found, num_ended = list[int](), worker.num_ended_by_us
        for second in range(seconds):
            stage.tick(1.0)
            if worker.num_ended_by_us > num_ended:
                num_ended = worker.num_ended_by_us
                found.append(second)
                worker.next = StartFailure(why)
        return found

    assert tries(45) == [1, 4, 9, 18, 29, 40]
    target, tried = stage.fleet.members[1].message(), stage.fleet.members[0].message()
    assert (target.state, target.reason) == (STARTING, "model is 'llama', and there is no such folder")
    assert tried.reason == "model is 'd', and there is no such folder"
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert lines.count(f"target-chat-0 does not start again: {why}") == 1
    stage.serve("target-chat-0", "draft-small-0")
    assert {member.reason for member in stage.membership.workers} == {""}
    assert tries(8) == [1, 4], "it has served since"
