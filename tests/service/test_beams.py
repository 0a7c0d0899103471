"""Beam searches over real gRPC: what verdicts hold, and what is refused of peers that send what nobody should."""

from collections.abc import Iterator
from typing import Any

import pytest

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.requests.params import BeamParams
from outrider.wire.requests.speculation import Speculation
from tests.service.conftest import worker
from tests.service.control_client import ControlClient, deliver, delivery, new_ticket, open_slot, verify
from tests.service.recorder import Recorder
from tests.stack import Process

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (12, 7, 99, 4, 31)
WIDTH, MAX_TOKENS = 3, 10
SEARCH: dict[str, Any] = {"beams": BeamParams(WIDTH), "max_tokens": MAX_TOKENS}
SOUND = pb.BeamLevel(parents=[0, 0, 0], ids=[5, 6, 7], sums=[-1.0, -2.0, -3.0])
BROKEN = {
    "not as many sums as ids": pb.BeamLevel(parents=[0, 0], ids=[5, 6], sums=[-1.0]),
    "an id out of range": pb.BeamLevel(parents=[0], ids=[320], sums=[-1.0]),
    "a sum that is none": pb.BeamLevel(parents=[0], ids=[5], sums=[float("nan")]),
    "a beam that is not there": pb.BeamLevel(parents=[3], ids=[5], sums=[-1.0]),
    "more beams than anybody asks for": pb.BeamLevel(parents=[0] * 129, ids=[5] * 129, sums=[0.0] * 129),
}


@pytest.fixture(scope="module")
def draft_worker(target_folder: str) -> Iterator[Process]:
    with worker("draft_service", target_folder, "--max-slots", "8") as process:
        yield process


def lease(slot: int, levels: list[pb.BeamLevel], ticket: int | None = None, num_steps: int = 100) -> tpb.Verify:
    message = verify(slot, len(PROMPT), (), ticket, num_steps=num_steps)
    message.levels.extend(levels)
    return message


async def searched(target: ControlClient, slot: int, levels: list[pb.BeamLevel]) -> list[tpb.Verdict]:
    replies, found = target.follow(lease(slot, levels)), list[tpb.Verdict]()
    while not found or not found[-1].hypotheses:
        found.append(await replies.next())
        assert isinstance(found[-1], tpb.Verdict), found[-1]
    return found


async def test_verdicts_hold_a_level_a_step_and_the_answers_at_the_end(target: ControlClient) -> None:
    await target.opened(1, PROMPT, **SEARCH)
    verdicts = await searched(target, 1, [])
    assert [verdict.committed_len for verdict in verdicts] == [len(PROMPT) + step for step in range(MAX_TOKENS)]
    assert all(not verdict.token_ids and len(verdict.levels) == 1 for verdict in verdicts)
    assert [len(verdict.levels[0].ids) for verdict in verdicts] == [WIDTH] * (MAX_TOKENS - 1) + [0]
    *_, last = verdicts
    assert last.finish_reason == pb.FINISH_REASON_LENGTH and len(last.hypotheses) == WIDTH
    scores = [each.score for each in last.hypotheses]
    assert scores == sorted(scores, reverse=True)
    levels = [level for verdict in verdicts for level in verdict.levels]
    await target.opened(1, PROMPT, **SEARCH)
    again = await searched(target, 1, levels[:6])
    assert len(again) == MAX_TOKENS - 6 and again[-1].hypotheses == last.hypotheses


def advance(slot: int, base_len: int, levels: list[pb.BeamLevel], ticket: int) -> dpb.Advance:
    return dpb.Advance(slot=slot, base_len=base_len, levels=levels, ticket=ticket)


async def test_a_draft_grows_under_live_beams_and_tells_what_it_cannot(
    draft: ControlClient, recorder: Recorder
) -> None:
    options = SEARCH | {"target_address": recorder.address, "target_epoch": 7, "speculation": Speculation(2, 24)}
    replies, ticket = draft.follow(open_slot(1, PROMPT, **options)), new_ticket()
    assert isinstance(await replies.next(), pb.OpenReply)
    draft.tell(advance(1, len(PROMPT), [SOUND], ticket))
    await recorder.until(lambda: any(part.ends for part in recorder.parts.get(ticket, ())))
    parts = recorder.parts[ticket]
    assert {part.root_len for part in parts} == {len(PROMPT) + 1}
    assert sum(len(part.ids) // 4 for part in parts) >= 24
    draft.tell(advance(1, len(PROMPT) + 3, [SOUND], ticket))
    behind = await replies.next()
    assert (behind.code, behind.committed_len) == (pb.WORKER_ERROR_CODE_BEHIND, len(PROMPT) + 1)
    for broken in (*BROKEN.values(), pb.BeamLevel()):
        draft.tell(advance(1, len(PROMPT) + 1, [broken], ticket))
        assert (await replies.next()).code == pb.WORKER_ERROR_CODE_INVALID
    assert (await draft.info()).supports_beams


async def test_a_draft_that_is_no_model_refuses_a_search(target_folder: str) -> None:
    with worker("draft_service", target_folder, "--drafter", "ngram") as process:
        async with ControlClient(process.address, "draft") as client:
            reply = await client.ask(open_slot(1, PROMPT, target_address="127.0.0.1:1", target_epoch=7, **SEARCH))
            assert isinstance(reply, pb.WorkerError) and "is a model" in reply.message
            assert not (await client.info()).supports_beams


async def test_deliveries_for_beams_to_a_slot_without_them_change_nothing(target: ControlClient) -> None:
    await target.opened(1, PROMPT)
    ticket = new_ticket()
    future = target.start(verify(1, len(PROMPT), (), ticket, num_steps=3))
    await target.taken()
    await deliver(target, delivery(target, ticket, len(PROMPT), [5, 6], parents=[-3, 0]))
    assert isinstance(await future, tpb.Verdict)
