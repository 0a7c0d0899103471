"""The draft over real gRPC: what it proposes, that the rows it ships are the law it drew from, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.sampling.noise import Purpose
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.transport.codec import DenseRows, SparseRows, rows_from_proto
from tests.service.conftest import worker
from tests.service.control_client import (
    ControlClient,
    deliver,
    eventually,
    idle,
    new_ticket,
    open_slot,
    sampling,
    verify,
)
from tests.service.recorder import Recorder, started
from tests.service.reference_model import ReferenceModel, draw, uniform
from tests.stack import Process
from tests.wire_rows import decode_rows

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (12, 7, 99, 4, 31)
VOCAB = 320
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 21}
AUTO, FULL, TOPK = pb.DRAFT_LOGPROBS_AUTO, pb.DRAFT_LOGPROBS_FULL, pb.DRAFT_LOGPROBS_TOPK
ROW_BYTES = 4 * VOCAB


@pytest.fixture(scope="module")
def draft_worker(target_folder: str) -> Iterator[Process]:
    """Of the target's own model, so that one reference serves for both. `auto` has room for two whole rows a step."""
    limits = ("--max-slots", "8", f"@draft_service.active.FULL_LOGPROBS_BUDGET_BYTES={2 * ROW_BYTES}")
    with worker("draft_service", target_folder, *limits) as process:
        yield process


def propose(
    slot: int,
    base_len: int,
    ids: Any = (),
    *,
    k: int = 4,
    ticket: int | None = None,
    encoding: Any = AUTO,
    topk: int = 0,
    min_confidence: float = 0.0,
) -> dpb.Propose:
    return dpb.Propose(
        slot=slot,
        base_len=base_len,
        committed_ids=ids,
        num_draft_tokens=k,
        ticket=new_ticket() if ticket is None else ticket,
        draft_logprobs=encoding,
        draft_topk=topk,
        min_confidence=min_confidence,
    )


async def proposed(client: ControlClient, message: dpb.Propose) -> dpb.ProposeReply:
    reply = await client.ask(message)
    assert isinstance(reply, dpb.ProposeReply), reply
    return reply


def shipped(parts: list[tpb.Delivery]) -> torch.Tensor:
    """[K, V] float32 log-probs, checked as the target checks them."""
    rows = []
    for part in parts:
        ids = list(part.draft_ids)
        found = rows_from_proto(part.distributions, len(ids), VOCAB)
        rows.append(decode_rows(found, VOCAB, ids))
    return torch.cat(rows)


def forms(parts: list[tpb.Delivery]) -> set[type]:
    return {type(rows_from_proto(p.distributions, len(p.draft_ids), VOCAB)) for p in parts}


# what is proposed


async def test_nothing_is_fed_before_the_first_propose(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel
) -> None:
    prompt = list(range(30, 70))
    await draft.opened(1, prompt, deliver_to=recorder.address, target_epoch=77)
    info = await draft.info()
    assert (info.num_slots_in_use, info.num_kv_blocks_in_use) == (1, 0)
    message = propose(1, 40)
    reply = await proposed(draft, message)
    assert list(reply.draft_ids) == reference.greedy(prompt, 4)
    assert reply.num_fed_tokens == 40
    assert (await draft.info()).num_kv_blocks_in_use == 3
    parts = await recorder.complete(message.ticket)
    assert [(p.target_epoch, p.committed_len, p.start, p.num_draft_tokens) for p in parts] == [(77, 40, 0, 4)]


async def test_greedy_ships_ids_alone(draft: ControlClient, recorder: Recorder) -> None:
    await draft.opened(1, PROMPT, deliver_to=recorder.address)
    for encoding in (AUTO, FULL, TOPK):
        message = propose(1, 0, PROMPT, encoding=encoding, topk=5)
        reply = await proposed(draft, message)
        (part,) = await recorder.complete(message.ticket)
        assert list(part.draft_ids) == list(reply.draft_ids)
        assert not part.HasField("distributions")
        assert (reply.encoding, reply.payload_bytes) == ("ids", 16)


async def test_it_catches_up_from_any_base_len(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel
) -> None:
    """All drafts kept, some kept, none kept, a round without it, history rewritten."""
    await draft.opened(1, PROMPT, deliver_to=recorder.address, max_tokens=64)
    ids = list(PROMPT)
    reply = await proposed(draft, propose(1, len(ids)))
    assert reply.num_fed_tokens == 5
    for kept, extra, num_fed in [(4, [50], 2), (2, [51], 1), (0, [52], 1), (4, [1, 2, 3, 4, 5], 6)]:
        base_len = len(ids)
        ids += [*list(reply.draft_ids)[:kept], *extra]
        reply = await proposed(draft, propose(1, base_len, ids[base_len:]))
        assert list(reply.draft_ids) == reference.greedy(ids, 4)
        assert reply.num_fed_tokens == num_fed, "only what is not in the cache is fed"
    ids[7:] = [60, 61]
    reply = await proposed(draft, propose(1, 7, [60, 61]))
    assert list(reply.draft_ids) == reference.greedy(ids, 4)
    again = await proposed(draft, propose(1, 7, [60, 61]))
    assert list(again.draft_ids) == list(reply.draft_ids)
    assert again.num_fed_tokens == 1


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {**SAMPLED, "acceptance": AcceptanceRule.COUPLED}],
    ids=["greedy", "coupled"],
)
async def test_a_proposal_ends_where_the_draft_is_not_confident_of_it(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel, options: dict[str, Any]
) -> None:
    """At the token with which the product of the probabilities falls below what was asked for, and never before."""
    least, lengths, law_params = 1e-3, set[int](), sampling(temperature=1.0)
    for slot in range(6):
        prompt = [*PROMPT, 40 + slot]
        await draft.opened(slot, prompt, deliver_to=recorder.address, **options)
        message = propose(slot, len(prompt), k=8, min_confidence=least)
        reply = await proposed(draft, message)
        parts, ids = await recorder.complete(message.ticket), list(reply.draft_ids)
        assert [token_id for part in parts for token_id in part.draft_ids] == ids
        confidence = 1.0
        for number, token_id in enumerate(ids):
            assert confidence >= least, "it should have ended"
            law = reference.laws(prompt, len(prompt), law_params, ids[:number])[-1]
            confidence *= float(law.log_softmax(0).exp()[token_id])
        assert confidence < least or len(ids) == 8
        lengths.add(len(ids))
        draft.tell(pb.CloseSlot(slot=slot))
    assert min(lengths) < 8 and len(lengths) > 1, "the slots do not exercise it"


async def test_under_rejection_no_proposal_ends_so(draft: ControlClient, recorder: Recorder) -> None:
    """When it is complete would depend on what was drawn, and what is late is not verified."""
    for slot in range(6):
        prompt = [*PROMPT, 40 + slot]
        await draft.opened(slot, prompt, deliver_to=recorder.address, **SAMPLED)
        message = propose(slot, len(prompt), k=8, min_confidence=0.9)
        assert len((await proposed(draft, message)).draft_ids) == 8
        await recorder.complete(message.ticket)
        draft.tell(pb.CloseSlot(slot=slot))


async def test_truncate(draft: ControlClient, recorder: Recorder, reference: ReferenceModel) -> None:
    prompt = list(range(20, 34))
    await draft.opened(1, prompt, deliver_to=recorder.address)
    before = await draft.metrics()
    await proposed(draft, propose(1, 14, k=8))  # 14 and 7 entries: two blocks
    assert (await draft.info()).num_kv_blocks_in_use == 2
    for _ in range(2):
        draft.tell(pb.Truncate(slot=1, committed_len=15, reason=pb.TRUNCATE_REASON_WASTED))
    await eventually(lambda info: info.num_kv_blocks_in_use == 1, draft)
    reply = await proposed(draft, propose(1, 14, [9]))
    assert list(reply.draft_ids) == reference.greedy([*prompt, 9], 4)
    after = await draft.metrics()
    arrived = 'outrider_worker_truncates_total{reason="wasted",worker="draft"}'
    freed = 'outrider_worker_truncate_freed_blocks_total{worker="draft"}'
    assert after[arrived] - before.get(arrived, 0) == 2
    assert after[freed] - before[freed] == 1


async def test_truncates_while_it_drafts_change_nothing(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel
) -> None:
    prompt = list(range(100, 140))
    await draft.opened(1, prompt, deliver_to=recorder.address, max_tokens=100)
    future = draft.start(propose(1, 40, k=48))
    for committed_len in (1, 40, 20, 41, 3) * 4:
        draft.tell(pb.Truncate(slot=1, committed_len=committed_len))
        await asyncio.sleep(0.005)
    assert list((await asyncio.wait_for(future, 60)).draft_ids) == reference.greedy(prompt, 48)


# the law it drew from


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
        {"logit_bias": {5: 4.0}, "bad_words": ((8,), (9, 10)), "min_tokens": 3, "ignore_eos": False},
    ],
    ids=["plain", "penalties", "bans"],
)
async def test_full_rows_are_the_law_it_drew_from(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel, options: dict[str, Any]
) -> None:
    """Redrawn from the shipped rows with the same uniforms: the same ids. And the law is the model's, processed."""
    for seed in range(4):
        own = {**SAMPLED, **options, "seed": seed}
        params = sampling(**own)
        await draft.opened(seed, PROMPT, deliver_to=recorder.address, **own)
        message = propose(seed, 5, k=6, encoding=FULL)
        reply = await proposed(draft, message)
        parts = await recorder.complete(message.ticket)
        assert [p.start for p in parts] == list(range(6)), "whole rows leave one by one"
        rows = shipped(parts)
        redrawn = [draw(row, uniform(params, 5, 5 + j, Purpose.DRAFT)) for j, row in enumerate(rows)]
        assert redrawn == list(reply.draft_ids)
        laws = reference.laws(PROMPT, len(PROMPT), params, redrawn)[:-1]
        assert torch.allclose(rows.exp(), laws.exp(), atol=1e-5)
        assert (rows == -torch.inf).equal(laws == -torch.inf)
        assert reply.encoding == "full" and reply.payload_bytes == 6 * (ROW_BYTES + 4)
        assert forms(parts) == {DenseRows}


@pytest.mark.parametrize("n", [1, 7, 128])
async def test_topk_is_cut_and_renormalised_before_the_draw(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel, n: int
) -> None:
    for seed in range(4):
        params = sampling(**{**SAMPLED, "temperature": 1.5, "seed": seed})
        await draft.opened(seed, PROMPT, deliver_to=recorder.address, temperature=1.5, seed=seed)
        message = propose(seed, 5, encoding=TOPK, topk=n)
        reply = await proposed(draft, message)
        parts = await recorder.complete(message.ticket)
        assert len(parts) == 1 and forms(parts) == {SparseRows}
        rows = shipped(parts)
        assert list(parts[0].distributions.row_sizes) == [n] * 4
        assert torch.allclose(rows.double().exp().sum(dim=1), torch.ones(4, dtype=torch.float64), atol=1e-6)
        ids = list(reply.draft_ids)
        assert [draw(row, uniform(params, 5, 5 + j, Purpose.DRAFT)) for j, row in enumerate(rows)] == ids
        laws = reference.laws(PROMPT, len(PROMPT), params, ids)[:-1]
        kept = rows > -torch.inf
        masked = laws.masked_fill(~kept, -torch.inf)
        assert bool((laws.masked_fill(kept, -torch.inf).amax(dim=1) <= masked.amax(dim=1)).all())
        assert torch.allclose(rows.exp(), masked.softmax(dim=1), atol=1e-5)
        assert (reply.encoding, reply.payload_bytes) == ("topk", 4 * (8 * n + 4))


async def test_a_wide_topk_leaves_in_parts(draft: ControlClient, recorder: Recorder) -> None:
    """64 rows of 320 entries are 160 KiB as one part; a target with small messages would lose its stream."""
    await draft.opened(1, PROMPT, deliver_to=recorder.address, max_tokens=100, **SAMPLED)
    message = propose(1, 5, k=64, encoding=TOPK, topk=300)
    reply = await proposed(draft, message)
    parts = await recorder.complete(message.ticket)
    assert len(parts) > 1 and max(part.ByteSize() for part in parts) < 80_000
    assert [i for part in parts for i in part.draft_ids] == list(reply.draft_ids)
    assert len(shipped(parts)) == 64


@pytest.mark.parametrize("encoding", [AUTO, FULL])
@pytest.mark.parametrize("options", [{"top_k": 9}, {"top_p": 0.5, "temperature": 0.5}], ids=["top_k", "top_p"])
async def test_the_requests_own_support_is_shipped_sparse(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel, options: dict[str, Any], encoding: Any
) -> None:
    own = {**SAMPLED, **options}
    await draft.opened(1, PROMPT, deliver_to=recorder.address, **own)
    message = propose(1, 5, encoding=encoding)
    reply = await proposed(draft, message)
    parts = await recorder.complete(message.ticket)
    assert forms(parts) == {SparseRows}
    laws = reference.laws(PROMPT, len(PROMPT), sampling(**own), list(reply.draft_ids))[:-1]
    assert (shipped(parts) == -torch.inf).equal(laws == -torch.inf)
    assert torch.allclose(shipped(parts).exp(), laws.exp(), atol=1e-5)


async def test_auto_keeps_a_steps_payload_under_the_budget(draft: ControlClient, recorder: Recorder) -> None:
    """Two whole rows fit. Of four proposals that are drafted together two are cut; one alone never is."""
    for slot in range(4):
        await draft.opened(slot, PROMPT, deliver_to=recorder.address, max_tokens=100, temperature=1.0, seed=slot)
    alone = await proposed(draft, propose(0, 5))
    assert alone.encoding == "full"
    messages = [propose(slot, 5, k=32, topk=16) for slot in range(4)]
    replies = await asyncio.gather(*(draft.start(message) for message in messages))
    assert sorted(reply.encoding for reply in replies) == ["full", "full", "topk", "topk"]
    for message, reply in zip(messages, replies, strict=True):
        parts = await recorder.complete(message.ticket)
        assert forms(parts) == {DenseRows if reply.encoding == "full" else SparseRows}


# refused


@pytest.mark.parametrize(
    "message, code, named",
    [
        (propose(1, 5, k=0), pb.WORKER_ERROR_CODE_INVALID, "num_draft_tokens is 0"),
        (propose(1, 5, min_confidence=1.0), pb.WORKER_ERROR_CODE_INVALID, "min_confidence is 1, must be"),
        (propose(1, 5, min_confidence=float("nan")), pb.WORKER_ERROR_CODE_INVALID, "min_confidence is nan"),
        (propose(1, 5, k=65), pb.WORKER_ERROR_CODE_INVALID, "from 1 to 64"),
        (propose(1, 5, k=32), pb.WORKER_ERROR_CODE_INVALID, "from 1 to 31"),
        (propose(1, 5, encoding=9), pb.WORKER_ERROR_CODE_INVALID, "draft_logprobs is 9"),
        (propose(1, 5, encoding=TOPK, topk=0), pb.WORKER_ERROR_CODE_INVALID, "draft_topk is 0"),
        (propose(1, 5, encoding=TOPK, topk=321), pb.WORKER_ERROR_CODE_INVALID, "draft_topk is 321"),
        (propose(1, 0, [*PROMPT, 320]), pb.WORKER_ERROR_CODE_INVALID, "320"),
        (propose(1, 3), pb.WORKER_ERROR_CODE_INVALID, "3 tokens"),
        (propose(1, 9), pb.WORKER_ERROR_CODE_BEHIND, "5 tokens"),
        (propose(2, 5), pb.WORKER_ERROR_CODE_UNKNOWN_SLOT, "slot 2"),
        (None, pb.WORKER_ERROR_CODE_INVALID, "no item"),
    ],
    ids=[
        "k 0",
        "sure",
        "not a number",
        "k 65",
        "k past max_tokens",
        "unknown encoding",
        "topk 0",
        "topk 321",
        "id",
        "short",
        "behind",
        "unknown",
        "no item",
    ],
)
async def test_refusals(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel, message: Any, code: Any, named: str
) -> None:
    await draft.opened(1, PROMPT, deliver_to=recorder.address)
    error = await draft.ask(message)
    assert error.code == code and named in error.message
    assert error.known_len == (5 if code == pb.WORKER_ERROR_CODE_BEHIND else 0)
    reply = await proposed(draft, propose(1, 5))
    assert list(reply.draft_ids) == reference.greedy(PROMPT, 4)


async def test_stale_epoch(draft: ControlClient, recorder: Recorder) -> None:
    for message in (open_slot(1, PROMPT), propose(1, 5)):
        error = await draft.ask(message, epoch=draft.epoch ^ 8)
        assert error.code == pb.WORKER_ERROR_CODE_STALE_EPOCH
    assert idle(await draft.info())


async def test_newer_messages_cancel_a_proposal(draft: ControlClient, recorder: Recorder) -> None:
    """By another propose, a reopen and a close. What it had drafted is worth nothing, what is asked now is answered."""
    for newer in (propose(1, 5, k=1), open_slot(1, PROMPT, deliver_to=recorder.address, max_tokens=100)):
        await draft.opened(1, PROMPT, deliver_to=recorder.address, max_tokens=100)
        old, new = draft.start(propose(1, 5, k=64)), draft.start(newer)
        assert (await asyncio.wait_for(old, 30)).code == pb.WORKER_ERROR_CODE_CANCELLED
        assert not isinstance(await asyncio.wait_for(new, 30), pb.WorkerError)
    old = draft.start(propose(1, 5, k=64))
    draft.tell(pb.CloseSlot(slot=1))
    assert (await asyncio.wait_for(old, 30)).code == pb.WORKER_ERROR_CODE_CANCELLED
    assert idle(await draft.info())


async def test_slot_limit(draft: ControlClient) -> None:
    for slot in range(8):
        await draft.opened(slot, PROMPT, max_tokens=2)
    error = await draft.ask(open_slot(8, PROMPT, max_tokens=2))
    assert error.code == pb.WORKER_ERROR_CODE_EXHAUSTED and "8 slots" in error.message
    assert (await draft.info()).num_slots_in_use == 8


async def test_a_stream_that_ends_mid_proposal_frees_everything(
    draft: ControlClient, draft_worker: Process, recorder: Recorder
) -> None:
    async with ControlClient(draft_worker.address, "draft") as other:
        for slot in range(3):
            await other.opened(slot, list(range(40)), deliver_to=recorder.address, max_tokens=100)
            other.start(propose(slot, 40, k=64))
        await eventually(lambda info: info.num_kv_blocks_in_use > 0, draft)
    await eventually(idle, draft)


# targets that are not there


@pytest.mark.parametrize("address", ["127.0.0.1:1", "", "not an address", "192.0.2.1:50051", "unix:///no/such/socket"])
async def test_a_target_out_of_reach_does_not_hurt(
    draft: ControlClient, draft_worker: Process, recorder: Recorder, reference: ReferenceModel, address: str
) -> None:
    """The reply still comes, proposals for another target are delivered, and nothing piles up."""
    await draft.opened(1, PROMPT, deliver_to=address)
    await draft.opened(2, PROMPT, deliver_to=recorder.address)
    num_files = _num_files(draft_worker)
    for _ in range(20):
        lost, message = propose(1, 5), propose(2, 5)
        replies = await asyncio.gather(proposed(draft, lost), proposed(draft, message))
        assert all(list(reply.draft_ids) == reference.greedy(PROMPT, 4) for reply in replies)
        await recorder.complete(message.ticket)
    assert _num_files(draft_worker) <= num_files + 4


def _num_files(process: Process) -> int:
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


async def test_a_target_that_comes_back_gets_proposals_again(draft: ControlClient) -> None:
    """Same address, new life, as after a restart."""
    first = Recorder()
    server = await started(first)
    await draft.opened(1, PROMPT, deliver_to=first.address)
    message = propose(1, 5)
    await proposed(draft, message)
    await first.complete(message.ticket)
    await server.stop(None)
    for _ in range(3):
        await proposed(draft, propose(1, 5))
    second = Recorder()
    server = await started(second, port=int(first.address.rsplit(":", 1)[1]))
    try:
        async with asyncio.timeout(30):
            while not second.parts:
                await proposed(draft, propose(1, 5))
                await asyncio.sleep(0.1)
    finally:
        await server.stop(None)


async def test_draft_and_target_together(draft: ControlClient, target: ControlClient, target_worker: Process) -> None:
    """Both services and the wire between them: same model and temperature 0, so that all is accepted."""
    for client in (draft, target):
        route = {"deliver_to": target_worker.address, "target_epoch": target.epoch} if client is draft else {}
        await client.opened(1, PROMPT, max_tokens=64, **route)
    ids = list(PROMPT)
    for _ in range(5):
        ticket = new_ticket()
        verdict = target.start(verify(1, 0, ids, k=4, ticket=ticket))
        reply = await proposed(draft, propose(1, 0, ids, ticket=ticket))
        decided = await asyncio.wait_for(verdict, 30)
        assert (decided.num_drafted, decided.num_accepted) == (4, 4)
        assert list(decided.token_ids)[:4] == list(reply.draft_ids)
        ids += decided.token_ids
    assert (await target.info()).num_tickets == 0
    summary = await deliver(target)
    assert summary.num_deliveries == 0
