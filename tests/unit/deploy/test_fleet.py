"""What becomes of workers: followed through losses, added, drained and ended. The workers themselves are played."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from deploy.actors import Refused, Started
from deploy.fleet import Fleet
from deploy.member import DRAINING, SERVING, STARTING
from deploy.ray_workers import Answer, Lost
from deploy.sightings import Seen
from outrider.v1 import common_pb2, registry_pb2
from outrider.wire.errors import ConfigError, OutriderError, Unavailable
from outrider.wire.settings.config import DraftConfig, TargetConfig
from outrider.wire.settings.pools import Pool
from outrider.wire.settings.system import START_TIMEOUT_S, ScalingConfig

DRAIN_LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def short_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.fleet.DRAIN_LIMIT_S", DRAIN_LIMIT_S)


class PlayedWorker:
    """Answers what the test says, when it says so."""

    def __init__(self) -> None:
        self.num_asked = 1
        self.num_ends = 0
        self.num_ended_by_us = 0
        self.next: Answer | None = None
        self.is_stopping = False
        self.stops_at_once = True
        self.is_killed = False

    def ask(self) -> None:
        self.num_asked += 1

    def answer(self) -> Answer | None:
        found, self.next = self.next, None
        return found

    def num_restarts(self) -> int:
        return self.num_ends

    def restart(self) -> None:
        self.num_ended_by_us += 1

    def begin_stop(self) -> None:
        self.is_stopping = True

    def has_stopped(self) -> bool:
        return self.stops_at_once

    def kill(self) -> None:
        self.is_killed = True


class Stage:
    """A fleet, its workers by name, and a clock."""

    def __init__(
        self,
        *pools: Pool,
        left_behind: Mapping[str, str] | None = None,
        room: str | None = None,
        is_refusing: bool = False,
        starts: bool = True,
        needs_drafts: bool = False,
    ) -> None:
        self.is_refusing = is_refusing
        self.now_s = 1000.0
        self.workers: dict[str, PlayedWorker] = {}
        self.watched: dict[str, str] = {}
        self.seen: list[Seen] = []
        self.told: list[tuple[str, str]] = []
        self.reports: list[registry_pb2.GatewayReport] = []
        self.room = room
        self._left_behind = left_behind or {}
        self.fleet = Fleet(
            pools,
            ScalingConfig(up_after_s=5, down_after_s=60, queue_high=1),
            self,
            self,
            lambda part, state, detail: self.told.append((part, state)),
            lambda pool: self.room,
            lambda: self.now_s,
            needs_drafts=needs_drafts,
        )
        self.membership = registry_pb2.Membership()
        if starts:
            self.fleet.start()

    def create(self, pool: Pool, member: str) -> PlayedWorker:
        if self.is_refusing:
            raise Unavailable("no actor")
        self.workers[member] = PlayedWorker()
        return self.workers[member]

    def adopt(self, pools: Iterable[Pool]) -> dict[str, tuple[Pool, PlayedWorker]]:
        by_name = {pool.name: pool for pool in pools}
        return {name: (by_name[pool], self.create(by_name[pool], name)) for name, pool in self._left_behind.items()}

    def watch(self, member: str, role: str, address: str) -> None:
        self.watched[member] = address

    def forget(self, member: str) -> None:
        self.watched.pop(member, None)

    def take(self) -> list[Seen]:
        found, self.seen = self.seen, []
        return found

    def tick(self, after_s: float = 1.0) -> None:
        self.now_s += after_s
        changed = self.fleet.tick(self.reports)
        if changed is not None:
            assert changed.version == self.membership.version + 1
            self.membership = changed

    def started(self, member: str, epoch: int = 1, port: int = 7) -> None:
        self.workers[member].next = Started(f"node:{port}", 1, epoch, f"node:{port + 1}", "node")
        self.tick(0.1)

    def answers(self, member: str, epoch: int = 1, **info: Any) -> None:
        """The next time that it is asked for its facts; nothing at all with epoch 0."""
        made = common_pb2.WorkerInfo(epoch=epoch, num_steps=1, **info) if epoch else None
        self.seen.append(Seen(member, self.watched[member], self.now_s, made, False))

    def silent(self, member: str) -> None:
        self.seen.append(Seen(member, self.watched[member], self.now_s, None, True))

    def refuses(self, member: str) -> None:
        self.seen.append(Seen(member, self.watched[member], self.now_s, None, refusal="PERMISSION_DENIED: not you"))

    def look(self, seconds: int, **how: str) -> None:
        """Once a second, by worker: answers, silent, refuses, or hangs, which is an engine at one step all the time.

        Ray says of each that its process runs.
        """
        names = {name.replace("_", "-"): what for name, what in how.items()}
        for second in range(seconds):
            for member in names.keys() - self.watched.keys():
                self.workers[member].next = Started("node:7", 1, 1, "node:8", "node")
            self.tick(0.0)
            for member, what in names.items():
                if what == "hangs":
                    self.answers(member, current_step_us=1_000_000 * second, **HUNG)
                else:
                    getattr(self, what)(member)
            self.tick(1.0)

    def ended(self) -> dict[str, int]:
        """How often the launcher ended each: those that it did."""
        return {name: worker.num_ended_by_us for name, worker in self.workers.items() if worker.num_ended_by_us}

    def serve(self, *members: str) -> None:
        for member in members or list(self.workers):
            self.started(member)
            self.answers(member)
            self.tick(0.1)

    def states(self) -> dict[str, int]:
        return {member.name: member.state for member in self.membership.members}

    def scale(self, pool: str, count: int | None) -> registry_pb2.PoolSize:
        done = self.fleet.scale(pool, count)
        self.tick(0.1)
        size: registry_pb2.PoolSize = done.result(0).pools[0]
        return size


def chat(count: int = 2, **size: Any) -> Pool:
    return Pool(name="chat", role="target", worker=TargetConfig(model="t"), count=count, **size)


def small(count: int = 1, least: int = 1) -> Pool:
    worker = DraftConfig(model="d")
    return Pool(
        name="small", role="draft", worker=worker, count=count, min=least, max=max(count, least), serves=("chat",)
    )


def test_a_worker_serves_once_it_has_answered_where_it_says_it_is() -> None:
    stage = Stage(chat(1), small())
    stage.tick()
    stage.started("target-chat-0")
    stage.answers("target-chat-0")
    stage.tick(8.0)
    assert stage.states() == {}  # gateways that knew them before go on with that
    stage.tick(2.0)
    assert stage.states() == {"target-chat-0": SERVING, "draft-small-0": STARTING}
    assert [(pool.name, list(pool.serves)) for pool in stage.membership.pools] == [("chat", []), ("small", ["chat"])]
    target = stage.membership.members[0]
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


def test_a_worker_that_is_gone_is_told_at_once_and_followed_to_another_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    stage = Stage(chat(2))
    stage.serve()
    for _ in range(2):
        stage.answers("target-chat-0", epoch=0)
    stage.tick()
    lost = stage.membership.members[0]
    assert (lost.state, lost.address, lost.node) == (STARTING, "", "")
    assert stage.workers["target-chat-0"].num_asked == 2
    stage.workers["target-chat-0"].next = Lost("restarting", is_final=False)
    stage.tick()
    stage.tick()
    assert stage.workers["target-chat-0"].num_asked == 3  # again, after a moment
    stage.started("target-chat-0", epoch=2, port=70)
    stage.answers("target-chat-0", epoch=2)
    stage.tick()
    assert (stage.membership.members[0].state, stage.membership.members[0].address) == (SERVING, "node:70")
    assert ("target-chat-0", "lost") in stage.told
    lost, back = (record for record in caplog.records if "target-chat-0" in record.getMessage())
    assert lost.levelname == "WARNING" and back.getMessage() == "target-chat-0 at node:70 is back"


def test_another_life_at_the_same_place_is_another_worker() -> None:
    stage = Stage(chat(1))
    stage.serve()
    stage.answers("target-chat-0", epoch=9)
    stage.tick()
    assert stage.states() == {"target-chat-0": STARTING}
    assert stage.workers["target-chat-0"].num_asked == 2


def test_one_answer_that_did_not_come_is_nothing() -> None:
    stage = Stage(chat(1))
    stage.serve()
    stage.answers("target-chat-0", epoch=0)
    stage.answers("target-chat-0")
    stage.answers("target-chat-0", epoch=0)
    stage.silent("target-chat-0")
    stage.answers("target-chat-0")
    stage.tick()
    assert stage.states() == {"target-chat-0": SERVING}


def test_a_worker_that_hangs_is_lost_and_then_ended_so_that_ray_starts_another() -> None:
    """Of a stopped process the first question runs out of time; by the second the connection is given up as dead."""
    stage = Stage(chat(1))
    stage.serve()
    stage.silent("target-chat-0")
    stage.tick(2.0)
    stage.answers("target-chat-0", epoch=0)
    stage.tick(2.0)
    assert stage.states() == {"target-chat-0": STARTING}
    for _ in range(20):
        stage.tick(2.0)
    assert stage.workers["target-chat-0"].num_ended_by_us == 1
    stage.started("target-chat-0", epoch=2)
    stage.answers("target-chat-0", epoch=2)
    stage.tick()
    assert stage.states() == {"target-chat-0": SERVING}


HUNG = {"busy_us": 1, "longest_step_us": 1_000_000, "num_slots_in_use": 1}
"""With a step of more than 8 s."""


def test_an_engine_that_hangs_behind_a_server_that_answers_is_lost_and_then_ended() -> None:
    stage = Stage(chat(1))
    stage.serve()
    for second in range(41):
        if "target-chat-0" not in stage.watched:
            stage.started("target-chat-0")
        stage.answers("target-chat-0", current_step_us=second * 1_000_000, **HUNG)
        stage.tick(1.0)
        if second < 8:
            assert stage.states() == {"target-chat-0": SERVING}
    assert stage.states() == {"target-chat-0": STARTING}
    assert stage.workers["target-chat-0"].num_ended_by_us == 1
    stage.workers["target-chat-0"].next = Lost("it is being restarted", is_final=False)
    stage.tick()
    stage.started("target-chat-0", epoch=2)
    stage.answers("target-chat-0", epoch=2)
    stage.tick()
    assert stage.states() == {"target-chat-0": SERVING}


def test_a_long_step_that_ends_is_not_ended() -> None:
    stage = Stage(chat(1))
    stage.serve()
    for second in range(30):
        if "target-chat-0" not in stage.watched:
            stage.started("target-chat-0")
        stage.answers("target-chat-0", current_step_us=second * 1_000_000, **HUNG)
        stage.tick(1.0)
    assert stage.states() == {"target-chat-0": STARTING}
    stage.started("target-chat-0")
    stage.answers("target-chat-0", longest_step_us=30_000_000)
    stage.tick(60.0)
    assert stage.states() == {"target-chat-0": SERVING}
    assert stage.workers["target-chat-0"].num_ended_by_us == 0


def test_one_whose_process_ended_may_load_as_long_as_it_takes() -> None:
    stage = Stage(chat(1))
    stage.serve()
    for _ in range(2):
        stage.answers("target-chat-0", epoch=0)
    stage.tick()
    assert stage.states() == {"target-chat-0": STARTING}
    stage.workers["target-chat-0"].next = Lost("it is being restarted", is_final=False)
    for _ in range(40):
        stage.tick(2.0)
    assert stage.workers["target-chat-0"].num_ended_by_us == 0


def test_whose_server_refuses_to_answer_lives() -> None:
    """With a certificate that it does not take, say. Silence before that does not count."""
    stage = Stage(chat(2))
    stage.serve()
    for _ in range(4):
        stage.look(20, target_chat_0="answers", target_chat_1="silent")
        stage.look(20, target_chat_0="answers", target_chat_1="refuses")
    assert stage.states() == {"target-chat-0": SERVING, "target-chat-1": STARTING}
    stage.look(80, target_chat_0="refuses", target_chat_1="refuses")
    assert stage.ended() == {}
    stage.look(2, target_chat_0="answers", target_chat_1="answers")
    assert set(stage.states().values()) == {SERVING}
    stage.look(40, target_chat_0="refuses", target_chat_1="silent")
    assert stage.ended() == {"target-chat-1": 1}, "whose server refuses is seen"


def test_a_launcher_that_sees_nobody_ends_nobody() -> None:
    stage = Stage(chat(2), small())
    stage.serve()
    stage.look(80, target_chat_0="silent", target_chat_1="silent", draft_small_0="silent")
    assert stage.ended() == {}
    stage.look(2, target_chat_0="answers", target_chat_1="silent", draft_small_0="silent")
    assert stage.ended() == {}, "they are to be asked again first"
    stage.look(20, target_chat_0="answers", target_chat_1="silent", draft_small_0="answers")
    assert stage.ended() == {}
    stage.look(10, target_chat_0="answers", target_chat_1="silent", draft_small_0="answers")
    assert stage.ended() == {"target-chat-1": 1}


def hears(*members: str) -> list[registry_pb2.GatewayReport]:
    return [registry_pb2.GatewayReport(gateway="g", heard=members), registry_pb2.GatewayReport(gateway="other")]


def test_who_answers_a_gateway_is_not_ended_though_the_launcher_does_not_see_it() -> None:
    stage = Stage(chat(2))
    stage.serve()
    stage.reports = hears("target-chat-0", "target-chat-1")
    stage.look(80, target_chat_0="answers", target_chat_1="silent")
    assert stage.ended() == {}
    stage.reports = hears("target-chat-0")
    stage.look(29, target_chat_0="answers", target_chat_1="silent")
    assert stage.ended() == {}
    stage.look(2, target_chat_0="answers", target_chat_1="silent")
    assert stage.ended() == {"target-chat-1": 1}


def test_one_alone_is_ended_for_silence_unless_a_gateway_hears_it() -> None:
    for reports, ended in ((hears("target-chat-0"), {}), (hears(), {"target-chat-0": 1})):
        stage = Stage(chat(1))
        stage.serve()
        stage.reports = reports
        stage.look(40, target_chat_0="silent")
        assert stage.ended() == ended


def test_a_gateway_that_hears_it_does_not_save_an_engine_that_is_seen_to_hang() -> None:
    stage = Stage(chat(2))
    stage.serve()
    stage.reports = hears("target-chat-0", "target-chat-1")
    stage.look(45, target_chat_0="answers", target_chat_1="hangs")
    assert stage.ended() == {"target-chat-1": 1}


def test_one_that_drains_unseen_is_not_ended_while_the_launcher_sees_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.fleet.DRAIN_LIMIT_S", 60.0)
    stage = Stage(chat(2))
    stage.serve()
    stage.look(2, target_chat_0="answers", target_chat_1="answers")
    stage.scale("chat", 1)
    stage.look(50, target_chat_0="silent", target_chat_1="silent")
    assert not stage.workers["target-chat-1"].is_stopping
    stage.tick(20.0)
    assert stage.workers["target-chat-1"].is_stopping, "the drain has its own limit"


def test_at_first_a_refusal_is_the_end_and_later_another_is_tried_after_a_pause() -> None:
    stage = Stage(chat(1))
    stage.workers["target-chat-0"].next = Refused("no such model")
    with pytest.raises(ConfigError, match="no such model"):
        stage.tick()
    stage = Stage(chat(1))
    stage.serve()
    assert stage.scale("chat", 2).num_starting == 0  # as it was before
    first = stage.workers["target-chat-1"]
    first.next = Refused("out of memory")
    stage.tick()
    assert list(stage.states()) == ["target-chat-0"]
    stage.tick(10)
    assert stage.workers["target-chat-1"] is first
    stage.tick(30)
    assert stage.workers["target-chat-1"] is not first
    assert first.is_killed


def test_one_that_does_not_start_again_says_why_and_is_tried_after_growing_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Until it serves; a draft as well as a target, and one that a launcher before this one started."""
    pool = Pool(name="chat", role="target", worker=TargetConfig(model="/srv/private/llama"), count=1)
    stage = Stage(pool, small(), left_behind={"draft-small-0": "small"})
    stage.serve("target-chat-0")
    worker, draft = stage.workers["target-chat-0"], stage.workers["draft-small-0"]
    draft.next = Refused("model is 'd', and there is no such folder")
    why = "model is '/srv/private/llama', and there is no such folder"

    def tries(seconds: int) -> list[int]:
        """Lose the target, whose next lives do not start. Return after how many seconds another is started."""
        for _ in range(2):
            stage.answers("target-chat-0", epoch=0)
        stage.tick(0.0)
        worker.next = Refused(why)
        found, num_ended = list[int](), worker.num_ended_by_us
        for second in range(seconds):
            stage.tick(1.0)
            if worker.num_ended_by_us > num_ended:
                num_ended = worker.num_ended_by_us
                found.append(second)
                worker.next = Refused(why)
        return found

    assert tries(45) == [1, 4, 9, 18, 29, 40]
    target, tried = stage.fleet.members[1].message(), stage.fleet.members[0].message()
    assert (target.state, target.why) == (STARTING, "model is 'llama', and there is no such folder")
    assert tried.why == "model is 'd', and there is no such folder"
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert lines.count(f"target-chat-0 does not start again: {why}") == 1
    stage.serve("target-chat-0", "draft-small-0")
    assert {member.why for member in stage.membership.members} == {""}
    assert tries(8) == [1, 4], "it has served since"


def draft_refuses(stage: Stage) -> None:
    stage.workers["draft-small-0"].next = Refused("model.safetensors ends early")


def draft_ends(stage: Stage) -> None:
    stage.workers["draft-small-0"].num_ends = 3


def draft_is_ended_for_good(stage: Stage) -> None:
    stage.workers["draft-small-0"].next = Lost("killed by ray kill", is_final=True)


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


def test_a_draft_that_cannot_start_at_first_says_why_and_is_tried_after_growing_pauses() -> None:
    stage = Stage(chat(1), small())
    stage.serve("target-chat-0")
    draft = stage.workers["draft-small-0"]
    draft_refuses(stage)
    stage.tick(0.0)
    found: list[int] = []
    for second in range(20):
        stage.tick(1.0)
        if draft.num_ended_by_us > len(found):
            found.append(second)
            draft_refuses(stage)
    assert found == [0, 3, 8, 17]
    assert {member.name: member.why for member in stage.membership.members} == {
        "target-chat-0": "",
        "draft-small-0": "model.safetensors ends early",
    }


def test_a_draft_that_loads_is_waited_for_but_not_for_ever() -> None:
    stage = Stage(chat(1), small())
    stage.serve("target-chat-0")
    stage.tick(START_TIMEOUT_S - 10.0)
    assert not stage.fleet.is_ready()
    stage.tick(10.0)
    assert stage.fleet.is_ready()


def test_a_process_that_ends_again_and_again_at_first_is_the_end() -> None:
    """The question for its outcome waits meanwhile: Ray alone knows how many lives there were."""
    stage = Stage(chat(1))
    for num_ends in range(3):
        stage.workers["target-chat-0"].num_ends = num_ends
        stage.tick()
    stage.workers["target-chat-0"].num_ends = 3
    with pytest.raises(Unavailable, match="the process of target-chat-0 ended 3 times while it started"):
        stage.tick()


def test_one_that_was_ended_for_good_by_somebody_is_replaced() -> None:
    stage = Stage(chat(2))
    stage.serve()
    killed = stage.workers["target-chat-1"]
    killed.next = Lost("killed by ray kill", is_final=True)
    stage.tick()
    stage.tick()
    assert stage.states() == {"target-chat-0": SERVING, "target-chat-1": STARTING}
    assert stage.workers["target-chat-1"] is not killed


def test_scaling_up_starts_one_and_scaling_down_lets_what_runs_finish() -> None:
    stage = Stage(chat(1), small(2, least=2))
    stage.serve()
    stage.scale("small", 3)
    stage.serve("draft-small-2")
    for name, slots in (("draft-small-0", 2), ("draft-small-1", 1), ("draft-small-2", 3)):
        stage.answers(name, num_slots_in_use=slots)
    stage.tick()
    assert stage.scale("small", 2).num_wanted == 2
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


def test_a_drain_has_a_moment_for_gateways_to_hear_of_it_and_a_limit() -> None:
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
    lost = stage.membership.members[1]
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


def test_one_that_is_lost_and_gone_is_ended_at_once() -> None:
    stage = Stage(chat(2))
    stage.serve()
    for _ in range(2):
        stage.answers("target-chat-1", epoch=0)
    stage.tick()
    stage.workers["target-chat-1"].next = Lost("killed", is_final=False)
    stage.tick()
    stage.scale("chat", 1)
    stage.tick()
    assert stage.workers["target-chat-1"].is_killed


def test_what_another_launcher_left_too_many_is_drained_once_it_is_found() -> None:
    stage = Stage(chat(1), left_behind={"target-chat-0": "chat", "target-chat-1": "chat"})
    stage.tick(5.0)
    assert not stage.workers["target-chat-1"].is_stopping, "gateways may use it"
    stage.serve("target-chat-0")
    stage.started("target-chat-1")
    assert stage.states() == {"target-chat-0": SERVING, "target-chat-1": DRAINING}
    stage.answers("target-chat-1", num_slots_in_use=1)
    stage.tick()
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


def test_one_that_was_told_to_stop_does_not_come_back() -> None:
    stage = Stage(chat(2))
    stage.serve()
    stage.workers["target-chat-1"].stops_at_once = False
    stage.scale("chat", 1)
    stage.now_s += 2.0
    stage.answers("target-chat-1")
    stage.tick()
    assert stage.workers["target-chat-1"].is_stopping
    stage.scale("chat", 2)
    assert list(stage.workers) == ["target-chat-0", "target-chat-1", "target-chat-2"]


def test_one_that_is_taken_back_unseen_is_not_told_to_serve() -> None:
    stage = Stage(chat(2))
    stage.serve()
    stage.scale("chat", 1)
    for _ in range(4):
        stage.silent("target-chat-1")
        stage.tick(2.0)
    stage.scale("chat", 2)
    assert stage.states()["target-chat-1"] == STARTING
    stage.serve("target-chat-1")
    assert stage.states()["target-chat-1"] == SERVING


def test_one_that_is_not_needed_before_it_serves_is_ended_at_once() -> None:
    stage = Stage(chat(1))
    stage.serve()
    stage.scale("chat", 2)
    stage.scale("chat", 1)
    stage.tick()
    assert stage.states() == {"target-chat-0": SERVING}
    assert stage.workers["target-chat-1"].is_killed


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


@pytest.mark.parametrize(
    ("pool", "count", "message"),
    [
        ("nobody", 1, "there is no pool 'nobody'; there are chat, small"),
        ("chat", 5, "chat cannot have 5 workers: from 1 to 4, its min and max"),
        ("small", 1001, "from 0 to 1000"),
    ],
)
def test_what_cannot_be_is_refused(pool: str, count: int, message: str) -> None:
    stage = Stage(chat(1, min=1, max=4), small())
    with pytest.raises(ConfigError, match=message):
        stage.scale(pool, count)


def test_who_asks_for_a_size_and_leaves_changes_nothing() -> None:
    stage = Stage(chat(1, min=1, max=4))
    stage.serve()
    assert stage.fleet.scale("chat", 2).cancel()
    stage.tick()
    assert list(stage.workers) == ["target-chat-0"]


def test_where_there_is_no_room_no_worker_is_asked_for() -> None:
    stage = Stage(chat(1), room="the workers cannot be placed")
    stage.serve()
    with pytest.raises(OutriderError, match="the workers cannot be placed"):
        stage.scale("chat", 2)
    assert list(stage.workers) == ["target-chat-0"]


def test_a_queue_at_the_gateways_grows_a_pool_to_its_max_one_by_one() -> None:
    stage = Stage(chat(1, min=1, max=3))
    stage.serve()
    load = registry_pb2.PoolLoad(pool="chat", num_queued=50)
    stage.reports = [registry_pb2.GatewayReport(gateway="g", pools=[load])]
    for _ in range(30):
        stage.tick()
    assert stage.states() == {"target-chat-0": SERVING, "target-chat-1": STARTING}
    stage.serve("target-chat-1")
    for _ in range(30):
        stage.tick()
    stage.serve("target-chat-2")
    for _ in range(30):
        stage.tick()
    assert len(stage.states()) == 3


def test_drafts_go_when_nothing_runs_and_come_back_when_something_does() -> None:
    stage = Stage(
        chat(1),
        Pool(name="small", role="draft", worker=DraftConfig(model="d"), count=1, min=0, max=1, serves=("chat",)),
    )
    stage.serve()

    def run(num_running: int, seconds: int) -> None:
        load = registry_pb2.PoolLoad(pool="chat", num_running=num_running)
        stage.reports = [registry_pb2.GatewayReport(gateway="g", pools=[load])]
        for _ in range(seconds):
            for name in stage.watched:
                stage.answers(name, busy_us=1)
            stage.tick()

    run(1, 200)
    assert len(stage.states()) == 2
    run(0, 80)
    assert list(stage.states()) == ["target-chat-0"]
    run(0, 80)
    assert list(stage.states()) == ["target-chat-0"]
    run(1, 8)
    assert stage.states() == {"target-chat-0": SERVING, "draft-small-0": STARTING}
    stage.serve("draft-small-0")
    run(1, 200)
    assert stage.states() == {"target-chat-0": SERVING, "draft-small-0": SERVING}


def test_at_the_end_all_are_drained_and_ended() -> None:
    stage = Stage(chat(2))
    stage.serve("target-chat-0")
    stage.answers("target-chat-0", num_slots_in_use=1)
    stage.tick()
    changed = stage.fleet.drain_all()
    assert changed is not None
    assert {member.name: member.state for member in changed.members} == {"target-chat-0": DRAINING}
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


def test_the_end_does_not_wait_for_one_that_is_gone_or_hangs() -> None:
    stage = Stage(chat(2))
    stage.serve()
    for name in stage.workers:
        stage.answers(name, num_slots_in_use=1)
    stage.tick()
    stage.fleet.drain_all()
    for _ in range(2):
        stage.answers("target-chat-0", epoch=0)
    stage.silent("target-chat-1")
    assert not stage.fleet.is_idle()
    stage.workers["target-chat-0"].next = Lost("killed", is_final=False)
    assert not stage.fleet.is_idle()
    stage.now_s += 30.0
    assert stage.fleet.is_idle()


def test_a_start_that_fails_ends_only_what_it_started() -> None:
    stage = Stage(chat(2), left_behind={"target-chat-0": "chat"})
    stage.workers["target-chat-1"].next = Refused("no such model")
    with pytest.raises(ConfigError):
        stage.tick()
    stage.fleet.end_all(but_what_was_there=True)
    assert {name: worker.is_killed for name, worker in stage.workers.items()} == {
        "target-chat-0": False,
        "target-chat-1": True,
    }


def test_a_ray_that_takes_no_actor_is_asked_again_later() -> None:
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


def test_a_reply_tells_all_pools_by_state() -> None:
    stage = Stage(chat(2), small())
    stage.serve("target-chat-0")
    done: concurrent.futures.Future[registry_pb2.ScaleReply] = stage.fleet.scale("", None)
    stage.tick()
    found = {size.pool: (size.num_wanted, size.num_starting, size.num_serving) for size in done.result(0).pools}
    assert found == {"chat": (2, 1, 1), "small": (1, 1, 0)}
