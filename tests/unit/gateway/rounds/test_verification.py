"""When a request keeps its target and its draft, and when it is given others."""

import asyncio
import time
from typing import Any

import pytest

from gateway.generation import GenerationRequest
from gateway.rounds.session import Session
from gateway.rounds.verification import SlotRefused, Verification
from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import Unavailable, WorkerFault
from outrider.wire.processes.health import CallOutcome
from outrider.wire.requests.params import SamplingParams
from tests.unit.gateway.scripted_pool import connection_of, link_of, served_model
from tests.unit.gateway.scripted_workers import OPENED, ScriptedTarget, error

PROMPT = tuple(range(40))


def refusal(code: pb.WorkerErrorCode) -> tpb.TargetReply:
    return tpb.TargetReply(error=error(code))


def side_of(model: ServedModel) -> Verification:
    session = Session(GenerationRequest("r", "m", PROMPT, SamplingParams(max_tokens=200)), model.reference.tokenizer, 1)
    return Verification(model, session, time.monotonic() + 60)


async def placed(side: Verification) -> str:
    await side.place()
    return side.member.name


@pytest.fixture
async def two() -> tuple[ServedModel, Verification, str, str]:
    """A model of two targets, a request with a slot on one, that one's name and the other's."""
    model = served_model({name: link_of(ScriptedTarget()) for name in ("a", "b")}, {})
    side = side_of(model)
    target = await side.place()
    await side.open(target, None, None)
    name = side.member.name
    return model, side, name, "b" if name == "a" else "a"


Two = tuple[ServedModel, Verification, str, str]


async def test_a_request_finishes_where_it_runs_while_that_drains(two: Two) -> None:
    model, side, name, other = two
    link: Any = model.targets[name].link
    link.info = pb.WorkerInfo(is_draining=True)
    assert await placed(side) == name
    assert await placed(side_of(model)) == other, "new ones go elsewhere"


async def test_a_lost_target_is_left_and_one_whose_breaker_opens_too(two: Two) -> None:
    model, side, name, other = two
    connection, link = model.targets[name].connection, model.targets[name].link
    model.targets[name].health.note(CallOutcome.LOST)
    assert await placed(side) == other
    assert connection.names[-1] == "close", "its slot there is freed"  # type: ignore[union-attr]
    assert (model.targets[name].num_choices, model.targets[other].num_choices) == (0, 1)
    model.targets[name].health.note(CallOutcome.OK)
    model.targets[other].link.connection = None  # type: ignore[misc]
    assert link.connection is connection
    assert await placed(side) == name
    side.close()
    assert [target.num_choices for target in model.targets.values()] == [0, 0]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (pb.WORKER_ERROR_CODE_DRAINING, "draining"),
        (pb.WORKER_ERROR_CODE_EXHAUSTED, "full"),
        (pb.WORKER_ERROR_CODE_INTERNAL, "fault"),
    ],
)
async def test_a_target_that_opens_no_slot_is_changed_for_one_that_does(code: pb.WorkerErrorCode, reason: str) -> None:
    unwilling, willing = ScriptedTarget(open_reply=refusal(code)), ScriptedTarget()
    model = served_model({"a": link_of(unwilling), "b": link_of(willing)}, {})
    model.targets["b"].num_choices = 5  # so that it is placed at the first one
    side = side_of(model)
    target = await side.place()
    assert target is unwilling
    with pytest.raises(SlotRefused, match=reason):
        await side.open(target, None, None)
    target = await side.place()
    assert target is willing
    await side.open(target, None, None)
    assert willing.names == ["open"]


async def test_a_full_target_is_waited_for_when_there_is_no_other() -> None:
    target = ScriptedTarget(open_reply=refusal(pb.WORKER_ERROR_CODE_EXHAUSTED))
    side = side_of(served_model({"a": link_of(target)}, {}))
    opening = asyncio.create_task(side.open(await side.place(), None, None))
    await asyncio.sleep(0.05)
    assert not opening.done()
    target.open_reply = OPENED
    await opening


async def test_a_request_that_no_target_can_answer_fails_instead_of_trying_for_ever() -> None:
    faults = {name: ScriptedTarget() for name in ("a", "b", "c")}
    model = served_model({name: link_of(target) for name, target in faults.items()}, {})
    side, tried = side_of(model), []
    with pytest.raises(WorkerFault, match="scripted"):
        for _ in range(5):
            target = await side.place()
            tried.append(side.member.name)
            await side.open(target, None, None)
            side.begin_lease(target, drafted=[False])
            faults[tried[-1]].fails(pb.WORKER_ERROR_CODE_INTERNAL)
            assert await side.next_verdict(target) is None
            assert side.why_again == "fault"
    assert len(tried) == len(set(tried)) == 2, "another target each time"


async def test_without_a_usable_target_a_request_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.workers.served.TARGET_WAIT_S", 0.2)
    model = served_model({"a": link_of(None)}, {})
    assert model.reason() == "no target at a: not connected"
    with pytest.raises(Unavailable, match="no target at a"):
        await side_of(model).place()
    placing = asyncio.create_task(placed(side_of(model)))
    await asyncio.sleep(0)
    model.targets["a"].link.connection = connection_of()  # type: ignore[misc]
    model.note_change()
    assert await placing == "a"
