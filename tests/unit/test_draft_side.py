"""What the draft's answers teach the gateway. Rounds between real workers: tests/e2e."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from gateway.generation import GenerationRequest, SpeculationOptions
from gateway.rounds.drafting import Drafting
from gateway.rounds.session import Session
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.params import SamplingParams
from outrider.wire.settings.config import GatewayConfig
from tests.unit.scripted_pool import INFO, connection_of, link_of, served_model

STEPS = itertools.count(1)

PROMPT = tuple(range(40))


class ScriptedDraft:
    """A connection whose replies the test makes."""

    alive, epoch, info = True, 7, pb.WorkerInfo(context_limit=512)

    def __init__(self) -> None:
        self.calls: list[tuple[dpb.DraftRequest, asyncio.Future[dpb.DraftReply]]] = []

    def call(self, request: dpb.DraftRequest) -> asyncio.Future[dpb.DraftReply]:
        self.calls.append((request, asyncio.get_running_loop().create_future()))
        return self.calls[-1][1]

    def send(self, request: dpb.DraftRequest) -> None:
        """One way."""


def side_of(
    draft: ScriptedDraft, speculation: SpeculationOptions, max_tokens: int = 2000, **settings: Any
) -> tuple[Drafting, Any]:
    """A request at a target, and that target's member."""
    target, config = link_of(connection_of()), GatewayConfig(target="127.0.0.1:9", **settings)
    model = served_model({"target-0": target}, {"draft-0": link_of(draft)}, gateway=config)
    request = GenerationRequest("r", "m", PROMPT, SamplingParams(max_tokens=max_tokens), speculation=speculation)
    member = model.targets["target-0"]
    member.planner.num_slots = 1
    return Drafting(model, Session(request, model.reference.tokenizer, 1)), member


async def round_of(draft: ScriptedDraft, side: Drafting, member: Any, ticket: int, wait_s: float) -> int:
    """One whose draft tokens are all refused, with a step of 5 ms. Returns K."""
    k = side.propose(ticket, member.connection, member)
    if k:
        reply = dpb.ProposeReply(draft_ids=range(k), compute_us=int(1e6 * wait_s), num_fed_tokens=1)
        draft.calls[-1][1].set_result(dpb.DraftReply(propose=reply))
        await side.let_reply_arrive()
    wait_us = int(1e6 * wait_s) if k else 0
    verdict = tpb.Verdict(
        num_drafted=k, wait_us=wait_us, forward_us=5000 + ticket, batch_size=1, num_batch_tokens=1 + k
    )
    step_s = verdict.forward_us / 1e6
    is_new_step = member.planner.note_step(next(STEPS), verdict.batch_size, verdict.num_batch_tokens, 0, step_s)
    side.note_verdict(verdict, ticket, step_s + wait_us / 1e6 + 0.001, is_new_step)
    return k


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        (SpeculationOptions(num_draft_tokens=5), {5}),
        (SpeculationOptions(num_draft_tokens=0), {0}),
        (SpeculationOptions(enabled=False), {0}),
        (SpeculationOptions(enabled=False, adaptive=True), {0}),
    ],
)
async def test_a_request_that_says_how_much_is_drafted_gets_it_though_that_costs_more(
    speculation: SpeculationOptions, expected: set[int]
) -> None:
    """Under one seed its rounds, and so its draws, are the same each time."""
    draft = ScriptedDraft()
    side, member = side_of(draft, speculation)
    assert {await round_of(draft, side, member, ticket, wait_s=0.1) for ticket in range(1, 31)} == expected
    assert (not draft.calls) is (expected == {0})


async def test_a_draft_without_a_free_slot_is_not_asked_again_before_it_has_said_how_it_is() -> None:
    """Each time would cost a wait for nothing."""
    draft, target = ScriptedDraft(), connection_of()
    link = link_of(draft)
    config = GatewayConfig(target="127.0.0.1:9", num_draft_tokens=5)
    model = served_model({"target-0": link_of(target)}, {"draft-0": link}, gateway=config)
    session = Session(GenerationRequest("r", "m", PROMPT, SamplingParams(max_tokens=200)), model.reference.tokenizer, 1)
    side = Drafting(model, session)
    assert side.propose(1, target, model.targets["target-0"]) == 5
    for _, future in draft.calls:
        future.set_result(dpb.DraftReply(error=pb.WorkerError(code=pb.WORKER_ERROR_CODE_EXHAUSTED, message="full")))
    await side.let_reply_arrive()
    side.note_verdict(tpb.Verdict(fallback=tpb.FALLBACK_REASON_LATE), 1, 0.02, True)
    num_asked = len(draft.calls)
    assert [side.propose(ticket, target, model.targets["target-0"]) for ticket in range(2, 20)] == [0] * 18
    assert (len(draft.calls), side.why_plain, model.drafts["draft-0"].num_requests) == (num_asked, "no_draft", 0)
    link.info = pb.WorkerInfo()
    link.info.CopyFrom(INFO)
    model.drafts["draft-0"].heard(link.info)
    assert side.propose(20, target, model.targets["target-0"]) == 5


@pytest.mark.parametrize(("fixed", "expected"), [(None, 0.25), (5, 0.0)])
async def test_a_draft_may_end_early_unless_the_request_says_how_much_is_drafted(
    fixed: int | None, expected: float
) -> None:
    draft = ScriptedDraft()
    side, member = side_of(draft, SpeculationOptions(num_draft_tokens=fixed), num_draft_tokens=5, min_confidence=0.25)
    assert side.propose(1, member.connection, member) == 5
    assert draft.calls[-1][0].propose.min_confidence == expected
