"""Opens whose grammar is compiled: whatever happens to that, they are answered, and nothing is left of them."""

import asyncio
from types import SimpleNamespace
from typing import Any

from outrider.engine.worker import worker_service
from outrider.engine.worker.jobs import JobError, JobFault
from outrider.engine.worker.worker_service import WorkerService
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.protocol import PROTOCOL
from outrider.wire.requests.params import SamplingParams
from tests.unit.outrider.engine.worker.compiling import _Slow


class _Panic(BaseException):
    """As pyo3 raises one."""


class _Failing:
    """Grammars that break while one is compiled."""

    def get(self, text: str) -> None:
        return None

    def compile(self, text: str) -> None:
        raise _Panic("index out of bounds")


async def test_a_compile_that_breaks_is_answered_and_what_waits_for_it_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(worker_service, "MAX_WAITING", 2)
    info = pb.WorkerInfo(context_limit=64, vocab_size=9)
    taken, said = list[int](), list[Any]()
    service = WorkerService(SimpleNamespace(), lambda: info, pb.TokenizerFiles(), 1, _Failing())  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=4, grammar="{}").to_proto()
    message = pb.OpenSlot(slot=1, committed_ids=[3], num_prompt_tokens=1, params=params, protocol=PROTOCOL)
    service._dispatch(1, tpb.TargetRequest(id=1, epoch=1, open=message), said.append, lambda *_: None)
    for number in range(3):
        item = tpb.TargetRequest(id=2 + number, epoch=1, verify=tpb.Verify(slot=1))
        service._dispatch(1, item, said.append, lambda owner, item, respond: taken.append(item.id))
    assert [each.fault for each in said] == [JobFault.INVALID] and "2 messages" in said[0].message
    for opening in list(service._compiling.values()):
        assert opening.task is not None
        await opening.task
    assert (
        isinstance(said[1], JobError)
        and said[1].fault is JobFault.INTERNAL
        and "index out of bounds" in said[1].message
    )
    assert taken == [2, 3] and not service._compiling and service.num_opening == 0


async def test_a_slot_that_is_closed_waits_for_no_grammar() -> None:
    info = pb.WorkerInfo(context_limit=64, vocab_size=9)
    said, jobs = list[Any](), list[Any]()
    grammars, engine = _Slow(), SimpleNamespace(submit=jobs.append)
    service = WorkerService(engine, lambda: info, pb.TokenizerFiles(), 1, grammars)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=4, grammar="{}").to_proto()
    for slot in (1, 2):
        message = pb.OpenSlot(slot=slot, committed_ids=[3], num_prompt_tokens=1, params=params, protocol=PROTOCOL)
        service._dispatch(1, tpb.TargetRequest(id=slot, epoch=1, open=message), said.append, lambda *_: None)
    await asyncio.sleep(0.01)
    service._dispatch(1, tpb.TargetRequest(epoch=1, close=pb.CloseSlot(slot=2)), said.append, lambda *_: None)
    assert [each.fault for each in said] == [JobFault.CANCELLED] and list(service._compiling) == [(1, 1)]
    service._gone(1)
    grammars.may_go_on.set()
    await asyncio.sleep(0.05)
    assert not service._compiling and service.num_opening == 0 and len(grammars.compiled) == 1
    assert [type(job).__name__ for job in jobs] == ["CloseJob", "CloseOwnerJob"]
