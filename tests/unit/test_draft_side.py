"""What the draft's answers teach the gateway. Rounds between real workers: tests/e2e."""

from __future__ import annotations

import asyncio

import pytest

from gateway.draft_side import DraftSide
from gateway.generation import GenerationRequest, SpeculationOptions
from gateway.session import Session
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.config import GatewayConfig
from outrider.wire.params import SamplingParams
from tests.unit.scripted_pool import connection_of, link_of, served_model

PROMPT = tuple(range(40))


class ScriptedDraft:
    """A connection whose replies the test makes."""

    alive, epoch, info = True, 7, pb.WorkerInfo(context_limit=512)

    def __init__(self) -> None:
        self.calls: list[tuple[dpb.DraftRequest, asyncio.Future[dpb.DraftReply]]] = []

    def call(self, request: dpb.DraftRequest) -> asyncio.Future[dpb.DraftReply]:
        self.calls.append((request, asyncio.get_running_loop().create_future()))
        return self.calls[-1][1]


async def test_only_proposals_that_fed_no_prompt_teach_how_long_one_takes() -> None:
    """One whose cache was taken for others meanwhile has waited for memory, and fed its prompt again."""
    draft = ScriptedDraft()
    config = GatewayConfig(target="127.0.0.1:9", wait_budget_min_ms=1e-6)  # so that every observation shows
    target = connection_of()
    model = served_model({"target-0": link_of(target)}, {"draft-0": link_of(draft)}, gateway=config)
    member = model.drafts["draft-0"]
    session = Session(GenerationRequest("r", "m", PROMPT, SamplingParams(max_tokens=200)), model.tokenizer, 1)
    side = DraftSide(model, session)

    async def taught(num_committed: int, num_fed: int) -> list[str]:
        """By the proposal after so many more tokens, that had to feed so many."""
        budgets = {"first": member.first_wait_budget, "other": member.wait_budget}
        before = {name: budget.seconds for name, budget in budgets.items()}
        session.committed.extend(range(num_committed))
        assert side.propose(1, target, model.targets["target-0"])
        request, future = draft.calls[-1]
        assert len(request.propose.committed_ids) == num_committed
        future.set_result(dpb.DraftReply(propose=dpb.ProposeReply(draft_ids=range(5), num_fed_tokens=num_fed)))
        await side.let_reply_arrive()
        return [name for name, budget in budgets.items() if budget.seconds != before[name]]

    assert await taught(0, len(PROMPT)) == ["first"]
    assert await taught(3, 1) == ["other"]
    assert await taught(6, 2) == ["other"]
    assert await taught(65, 66) == ["other"], "what plain rounds have made is for the next proposal to feed"
    assert await taught(3, len(PROMPT) + 77) == ["first"]
    assert await taught(3, 4) == ["other"]


@pytest.mark.parametrize("fixed", [None, 5])
async def test_a_request_that_says_how_much_is_drafted_gets_it_though_waiting_costs_more(fixed: int | None) -> None:
    """Under one seed its rounds, and so its draws, are the same each time."""
    draft, target = ScriptedDraft(), connection_of()
    model = served_model({"target-0": link_of(target)}, {"draft-0": link_of(draft)})
    request = GenerationRequest(
        "r", "m", PROMPT, SamplingParams(max_tokens=200), speculation=SpeculationOptions(num_draft_tokens=fixed)
    )
    side = DraftSide(model, Session(request, model.tokenizer, 1))
    num_plain = 0
    for ticket in range(1, 31):
        num_drafted = side.propose(ticket, target, model.targets["target-0"])
        num_plain += not num_drafted
        if num_drafted:
            draft.calls[-1][1].set_result(dpb.DraftReply(propose=dpb.ProposeReply(draft_ids=range(5))))
            await side.let_reply_arrive()
            verdict = tpb.Verdict(num_drafted=5, num_accepted=0, wait_us=100_000)
            side.note_verdict(verdict, ticket, total_s=0.11)
    assert (num_plain == 0) is (fixed is not None)


async def test_a_draft_that_has_nothing_to_say_is_no_worse_for_it_and_said_to_be_so() -> None:
    draft, target = ScriptedDraft(), connection_of()
    model = served_model({"target-0": link_of(target)}, {"draft-0": link_of(draft)})
    side = DraftSide(
        model, Session(GenerationRequest("r", "m", PROMPT, SamplingParams(max_tokens=200)), model.tokenizer, 1)
    )
    for ticket in range(1, 31):
        assert side.propose(ticket, target, model.targets["target-0"])
        draft.calls[-1][1].set_result(dpb.DraftReply(propose=dpb.ProposeReply()))
        await side.let_reply_arrive()
        side.note_verdict(tpb.Verdict(wait_us=100), ticket, total_s=0.01)
        assert side.why_plain == "nothing" and side.member_name == "draft-0"
