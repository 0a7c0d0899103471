"""The order of a round, before scripted workers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway.generation import GenerationRequest, RoundOutput, SpeculationOptions
from gateway.rounds import verification
from gateway.rounds.decode_loop import Decoder
from gateway.rounds.session import Session
from gateway.workers.drafts.draft_use import TRIAL
from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import DeadlineExceeded, Unavailable, WorkerFault
from outrider.wire.protocol import PROTOCOL
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.settings.config import GatewayConfig
from tests.unit.gateway.scripted_pool import INFO, link_of, served_model
from tests.unit.gateway.scripted_workers import ScriptedDraft, ScriptedTarget

PROMPT = (5, 6, 7)
K = 2
CREDIT = 2 * (K + 1)


def ticket_of(lease: tpb.Verify) -> int:
    return lease.tickets[0].ticket


class Answer:
    """An answer at a target `a`, and one at a draft, with the outputs that the test takes."""

    def __init__(
        self,
        targets: dict[str, ScriptedTarget] | None = None,
        drafts: dict[str, ScriptedDraft] | None = None,
        *,
        wish: SpeculationOptions | None = None,
        stop: tuple[str, ...] = (),
        limit_s: float = 60.0,
        params: SamplingParams | None = None,
        draft_pools: int = 1,
        **settings: Any,
    ) -> None:
        self.targets = targets or {"a": ScriptedTarget()}
        self.drafts = {"draft-0": ScriptedDraft()} if drafts is None else drafts
        config = GatewayConfig(target="127.0.0.1:9", **settings)
        links = [{name: link_of(each) for name, each in part.items()} for part in (self.targets, self.drafts)]
        self.model: ServedModel = served_model(*links, gateway=config, draft_pools=draft_pools)
        wish = wish or SpeculationOptions(num_draft_tokens=K)
        request = GenerationRequest("r", "m", PROMPT, params or SamplingParams(max_tokens=50), stop, speculation=wish)
        self.session = Session(request, self.model.reference.tokenizer, 1)
        self.decoder = Decoder(self.model, self.session, time.monotonic() + limit_s)
        self.outputs: AsyncGenerator[RoundOutput] = self.decoder.run()

    @property
    def target(self) -> ScriptedTarget:
        return self.targets["a"]

    @property
    def draft(self) -> ScriptedDraft:
        return self.drafts["draft-0"]

    @contextlib.asynccontextmanager
    async def begun(self) -> AsyncGenerator[asyncio.Task[RoundOutput]]:
        """Run until the answer waits for its first verdict; gives the first output to be."""
        async with contextlib.aclosing(self.outputs), asyncio.timeout(10):
            first = self.next()
            await settled()
            yield first
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    def next(self) -> asyncio.Task[RoundOutput]:
        async def step() -> RoundOutput:
            return await anext(self.outputs)

        return asyncio.create_task(step())

    def metric(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for family in self.model.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_round_opens_leases_commits_and_lets_both_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "TOKENS_AHEAD", CREDIT)
    answer = Answer()
    async with answer.begun() as first:
        target, draft = answer.target, answer.draft
        assert target.names == ["open", "verify"] and draft.names == ["open", "advance"]
        opened, lease, told = target.all_of("open")[0], target.lease, draft.all_of("advance")[0]
        assert opened.protocol == draft.all_of("open")[0].protocol == PROTOCOL
        assert (opened.speculation.num_draft_tokens.number, opened.speculation.is_sequential) == (K, False)
        assert draft.all_of("open")[0].speculation == opened.speculation
        assert (lease.base_len, lease.lease_end_len, lease.tickets[0].is_drafted) == (3, 3 + CREDIT, True)
        assert told.ticket == ticket_of(lease) != 0 and told.base_len == 3

        target.says(3, [1, 2, 9], "aab", num_drafted=2, num_accepted=2, has_drafts=True, drafter="model")
        output = await first
        assert [token.id for token in output.tokens] == [1, 2, 9] and (output.num_drafted, output.num_accepted) == (
            2,
            2,
        )
        extend, told = target.all_of("extend")[0], draft.all_of("advance")[1]
        assert (extend.ticket, extend.lease_end_len) == (ticket_of(lease), 6 + CREDIT)
        assert (told.ticket, told.base_len, list(told.committed_ids)) == (ticket_of(lease), 3, [1, 2, 9])
        assert "truncate" not in [*target.names, *draft.names], "nothing was dropped"


async def test_waiting_verdicts_are_taken_one_by_one() -> None:
    answer = Answer()
    async with answer.begun() as first:
        answer.target.says(3, [1, 8], "ar", num_drafted=2, num_accepted=1, has_drafts=True, drafter="model")
        answer.target.says(5, [4], "p", has_drafts=False, num_wasted=1)
        assert [token.id for token in (await first).tokens] == [1, 8]
        assert [token.id for token in (await answer.next()).tokens] == [4]
        for worker in (answer.target, answer.draft):
            assert [(cut.committed_len, cut.reason) for cut in worker.all_of("truncate")] == [
                (5, pb.TRUNCATE_REASON_REJECTED)
            ]
        assert answer.session.usage.num_wasted_tokens == 1
        assert (
            answer.metric("spec_lookup_total", result="hit") == answer.metric("spec_lookup_total", result="miss") == 1
        )
        assert answer.metric("spec_plain_steps_total", reason="none_parked") == 1
        assert (answer.model.num_rounds, answer.model.num_late) == (2, 1)

        answer.target.says(6, [4], "p", has_drafts=False, fallback=tpb.FALLBACK_REASON_DOES_NOT_PAY)
        await answer.next()
        assert answer.metric("spec_plain_steps_total", reason="does_not_pay") == 1
        assert len(answer.draft.all_of("truncate")) == 1, "what the draft has may still be of use"


async def test_a_draft_of_each_of_two_pools_has_its_own_ticket() -> None:
    wish = SpeculationOptions(num_draft_tokens=K, drafter=Drafter.MODEL_AND_MODEL)
    infos = [pb.WorkerInfo.FromString(INFO.SerializeToString()) for _ in range(2)]
    for number, info in enumerate(infos):
        info.model_id = f"draft {number}"
    drafts = {f"draft-{number}": ScriptedDraft(info) for number, info in enumerate(infos)}
    answer = Answer(drafts=drafts, wish=wish, draft_pools=2)
    for name, info in zip(drafts, infos, strict=True):
        answer.model.drafts[name].link.info = info
    async with answer.begun() as first:
        lease = answer.target.lease
        assert not answer.target.all_of("open")[0].drafter
        first_ticket, other = lease.tickets
        assert first_ticket.is_drafted and other.is_drafted and other.ticket not in (0, first_ticket.ticket)
        opened = [draft.all_of("open")[0].speculation for draft in drafts.values()]
        assert [each.draft_index for each in opened] == [0, 1]
        assert [draft.all_of("advance")[0].ticket for draft in drafts.values()] == [ticket_of(lease), other.ticket]

        outcomes = [
            tpb.DraftOutcome(num_drafted=3, num_accepted=1, is_verified=True, has_drafts=True),
            tpb.DraftOutcome(num_drafted=2, is_verified=True, has_drafts=False),
            tpb.DraftOutcome(),
        ]
        rest = {"num_drafted": 5, "depth": 3, "num_accepted": 1, "outcomes": outcomes}
        answer.target.says(3, [1, 8], "ar", drafter="model&model", **rest)
        await first
        counts = [answer.metric("spec_draft_tokens_total", draft=info.model_id) for info in infos]
        assert counts == [3, 2] and answer.metric("spec_accepted_tokens_total") == 1
        assert [draft.all_of("advance")[1].is_missed for draft in drafts.values()] == [False, True]
        assert all(len(draft.all_of("truncate")) == 1 for draft in drafts.values())

        assert (
            answer.metric("spec_lookup_total", result="hit") == answer.metric("spec_lookup_total", result="miss") == 1
        )

        outcomes[1], length = tpb.DraftOutcome(has_drafts=True), 5
        for _ in range(TRIAL + 2):
            answer.target.says(length, [1, 8], "ar", drafter="model", **(rest | {"outcomes": outcomes}))
            await answer.next()
            length += 2
        assert len(drafts["draft-1"].all_of("advance")) == TRIAL + 4, "what is named is waited for, of every draft"

        outcomes[1] = tpb.DraftOutcome(is_refused=True)
        for committed_len in range(length, length + 3):
            answer.target.says(committed_len, [2], "p", fallback=tpb.FALLBACK_REASON_REFUSED, outcomes=outcomes)
            await answer.next()
        next_one = answer.next()
        await settled()
        assert [answer.model.drafts[name].health.is_down for name in drafts] == [False, True]
        last = answer.target.lease
        assert [each.is_drafted for each in last.tickets] == [True, False] and ticket_of(last) != ticket_of(lease)
        next_one.cancel()
        await asyncio.wait([next_one])
    assert all(draft.names[-1] == "close" for draft in drafts.values())


async def test_a_verdict_for_another_length_is_never_applied_and_the_target_is_set_back() -> None:
    answer = Answer()
    async with answer.begun() as first:
        before = ticket_of(answer.target.lease)
        answer.target.says(4, [1], "p")
        await settled()
        lease = answer.target.lease
        assert ticket_of(lease) != before and (lease.base_len, list(lease.committed_ids)) == (3, [])
        assert answer.draft.all_of("advance")[-1].ticket == ticket_of(lease)
        answer.target.says(3, [2], "p")
        assert [token.id for token in (await first).tokens] == [2]
        assert answer.metric("outrider_retries_total", reason="length") == 1


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"outcomes": [tpb.DraftOutcome()]}, "has 1 outcomes, must have 2"),
        ({"drafter": "nobody"}, "drafter 'nobody'"),
        ({"kinds": ""}, r"has kinds \[\], must have 1"),
        ({"kinds": "pp"}, "must have 1"),
        ({"kinds": "x"}, r"has kinds \[99\]"),
        ({"logprobs": [pb.TokenLogprobs()] * 2}, "has 2 logprobs, must have 1"),
        ({"logprobs": [pb.TokenLogprobs(top_ids=[1])]}, "1 top_ids and 0 top_logprobs"),
        ({"depth": 10**9}, "depth 1000000000"),
        ({"num_accepted": 10**9}, "num_accepted 1000000000"),
    ],
)
async def test_a_verdict_of_no_lease_is_never_applied(facts: dict[str, Any], why: str) -> None:
    answer = Answer()
    async with answer.begun() as first:
        answer.target.says(3, [1], **{"kinds": "p", **facts})
        await settled()
        assert answer.target.names.count("open") == 2 and answer.target.lease.base_len == 3
        assert answer.metric("outrider_retries_total", reason="fault") == 1
        answer.target.says(3, [1], **{"kinds": "p", **facts})
        with pytest.raises(WorkerFault, match=why):
            await first


@pytest.mark.parametrize(
    ("code", "reason", "opens_again"),
    [
        (pb.WORKER_ERROR_CODE_BEHIND, "behind", False),
        (pb.WORKER_ERROR_CODE_UNKNOWN_SLOT, "slot", True),
        (pb.WORKER_ERROR_CODE_STALE_EPOCH, "slot", True),
        (pb.WORKER_ERROR_CODE_INTERNAL, "fault", True),
    ],
)
async def test_an_error_of_the_target_is_mended(code: pb.WorkerErrorCode, reason: str, opens_again: bool) -> None:
    answer = Answer()
    async with answer.begun() as first:
        answer.target.says(3, [1], "p")
        await first
        second = answer.next()
        await settled()
        answer.target.fails(code, committed_len=2)
        await settled()
        assert answer.target.names.count("open") == 1 + opens_again
        assert answer.target.num_dropped == (code == pb.WORKER_ERROR_CODE_STALE_EPOCH)
        lease = answer.target.lease
        assert (lease.base_len, list(lease.committed_ids)) == ((4, []) if opens_again else (2, [7, 1]))
        assert answer.metric("outrider_retries_total", reason=reason) == 1
        answer.target.says(4, [2], "p")
        assert [token.id for token in (await second).tokens] == [2]


async def test_a_request_whose_time_is_up_fails() -> None:
    answer = Answer(limit_s=0.1)
    async with answer.begun() as first:
        with pytest.raises(DeadlineExceeded):
            await first
    assert answer.target.names[-1] == answer.draft.names[-1] == "close"


async def test_a_request_that_targets_keep_losing_is_not_retried_for_ever() -> None:
    answer = Answer()
    async with answer.begun() as first:
        for _ in range(9):
            answer.target.fails(pb.WORKER_ERROR_CODE_CANCELLED)
            await settled()
        with pytest.raises(Unavailable, match="keep losing"):
            await first
