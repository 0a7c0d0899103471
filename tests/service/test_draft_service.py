"""The draft over real gRPC: what it delivers, that the laws it ships are what it drew from, and what it refuses."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from outrider.engine.sampling.noise import NoiseStream
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.requests.speculation import Speculation
from outrider.wire.transport.codec import DenseDistributions
from tests.service.conftest import worker
from tests.service.control_client import ControlClient, advance, eventually, idle, open_slot, sampling
from tests.service.recorder import Grown, Recorder, started
from tests.service.reference_model import ReferenceModel, draw, uniform
from tests.stack import Process

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (12, 7, 99, 4, 31)
VOCAB = 320
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 21}
AUTO, FULL, TOPK = DraftLogprobs.AUTO, DraftLogprobs.FULL, DraftLogprobs.TOPK
BUDGET_SLOTS = 2


@pytest.fixture(scope="module")
def draft_worker(target_folder: str) -> Iterator[Process]:
    """Of the target's own model, so that one reference serves for both. `auto` has room for two slots' whole laws."""
    budget = f"@draft_service.growing.grower.MAX_WHOLE_IDS={BUDGET_SLOTS * VOCAB}"
    with worker("draft_service", target_folder, "--max-slots", "8", budget) as process:
        yield process


def chain_of(k: int, encoding: DraftLogprobs = AUTO, topk: int = 128) -> Speculation:
    """A chain of K tokens and nothing else."""
    return Speculation(k, k, None, encoding, topk, is_sequential=True)


async def grown(
    draft: ControlClient, recorder: Recorder, slot: int, ids: Any, speculation: Speculation, **options: Any
) -> Grown:
    """Open a slot, tell it that this much is committed, and return the tree once it is told to be complete."""
    await draft.opened(slot, ids, target_address=recorder.address, target_epoch=77, speculation=speculation, **options)
    message = advance(slot, len(ids))
    draft.tell(message)
    return await recorder.grown(message.ticket, lambda each: bool(each.ended))


async def test_a_draft_is_not_paired_with_a_target_that_says_nothing_of_its_tokens(draft: ControlClient) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="does not say what its tokens are") as caught:
        await draft.stub.Pair(dpb.PairRequest(target_address="127.0.0.1:1", target_epoch=7), timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    info = await draft.info()
    assert (info.needs_features, info.supports_retokenization, len(info.shared_vocabularies)) == (False, True, 0)


# what grows


async def test_nothing_is_fed_before_the_first_advance(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel
) -> None:
    prompt = list(range(30, 70))
    await draft.opened(1, prompt, target_address=recorder.address, target_epoch=77, speculation=chain_of(4))
    info = await draft.info()
    assert (info.num_slots_in_use, info.num_kv_blocks_in_use) == (1, 0)
    message = advance(1, 40)
    draft.tell(message)
    found = await recorder.grown(message.ticket, lambda each: bool(each.ended))
    assert found.chain() == reference.greedy(prompt, 4)
    assert (await draft.info()).num_kv_blocks_in_use == 3
    assert {(part.target_epoch, part.root_len) for part in found.parts} == {(77, 40)}


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
        found = await grown(draft, recorder, seed, PROMPT, chain_of(6, FULL), **own)
        chain, rows = found.chain(), found.drawn(6)
        assert [draw(row, uniform(params, 5, 5 + j, NoiseStream.DRAFT)) for j, row in enumerate(rows)] == chain
        laws = reference.laws(PROMPT, len(PROMPT), params, chain)[:-1]
        assert torch.allclose(rows.exp(), laws.exp(), atol=1e-5)
        assert (rows == -torch.inf).equal(laws == -torch.inf)
        assert found.forms == {DenseDistributions}


# refused


@pytest.mark.parametrize(
    "message, code, named",
    [
        (advance(1, 0, [*PROMPT, VOCAB]), pb.WORKER_ERROR_CODE_INVALID, "320"),
        (advance(1, 3), pb.WORKER_ERROR_CODE_INVALID, "3 tokens"),
        (advance(1, 5, [3] * 32), pb.WORKER_ERROR_CODE_INVALID, "37 tokens"),
        (advance(1, 9), pb.WORKER_ERROR_CODE_BEHIND, "5 tokens"),
    ],
    ids=["id", "part of the prompt", "past max_tokens", "behind"],
)
async def test_a_wrong_advance_is_told_under_the_opens_id_and_changes_nothing(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel, message: Any, code: Any, named: str
) -> None:
    replies = draft.follow(open_slot(1, PROMPT, target_address=recorder.address, k=4))
    assert isinstance(await replies.next(), pb.OpenReply)
    draft.tell(message)
    error = await replies.next()
    assert error.code == code and named in error.message
    assert error.committed_len == (5 if code == pb.WORKER_ERROR_CODE_BEHIND else 0)
    good = advance(1, 5)
    draft.tell(good)
    assert await recorder.chain(good.ticket, 4) == reference.greedy(PROMPT, 4)
    assert message.ticket not in recorder.parts and replies.empty


async def test_stale_epoch(draft: ControlClient, recorder: Recorder) -> None:
    old = draft.epoch ^ 8
    assert (await draft.ask(open_slot(1, PROMPT), epoch=old)).code == pb.WORKER_ERROR_CODE_STALE_EPOCH
    assert idle(await draft.info())
    await draft.opened(1, PROMPT, target_address=recorder.address, k=4)
    stale = advance(1, 5)
    draft.tell(stale, epoch=old)
    draft.tell(pb.CloseSlot(slot=1), epoch=old)
    await draft.taken()
    assert (await draft.info()).num_slots_in_use == 1 and (await draft.info()).num_kv_blocks_in_use == 0
    assert stale.ticket not in recorder.parts


async def test_a_stream_that_ends_while_it_drafts_frees_everything(
    draft: ControlClient, draft_worker: Process, recorder: Recorder
) -> None:
    async with ControlClient(draft_worker.address, "draft") as other:
        for slot in range(3):
            route = {"target_address": recorder.address, "max_tokens": 100}
            await other.opened(slot, list(range(40)), k=64, **route)
            other.tell(advance(slot, 40))
        await eventually(lambda info: info.num_kv_blocks_in_use > 0, draft)
    await eventually(idle, draft)


# targets that are not there


@pytest.mark.parametrize("address", ["127.0.0.1:1", "", "not an address", "192.0.2.1:50051", "unix:///no/such/socket"])
async def test_a_target_out_of_reach_does_not_hurt(
    draft: ControlClient, draft_worker: Process, recorder: Recorder, reference: ReferenceModel, address: str
) -> None:
    """What is for another target is delivered, and nothing piles up."""
    await draft.opened(1, PROMPT, target_address=address, speculation=chain_of(4))
    await draft.opened(2, PROMPT, target_address=recorder.address, speculation=chain_of(4))
    num_files = _num_files(draft_worker)
    for _ in range(20):
        message = advance(2, 5)
        draft.tell(advance(1, 5))
        draft.tell(message)
        assert await recorder.chain(message.ticket, 4) == reference.greedy(PROMPT, 4)
    assert _num_files(draft_worker) <= num_files + 4


def _num_files(process: Process) -> int:
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


async def test_a_target_that_comes_back_gets_deliveries_again(draft: ControlClient) -> None:
    """Same address, new life, as after a restart."""
    first = Recorder()
    server = await started(first)
    await draft.opened(1, PROMPT, target_address=first.address, speculation=chain_of(4))
    message = advance(1, 5)
    draft.tell(message)
    await first.chain(message.ticket, 4)
    await server.stop(None)
    for _ in range(3):
        draft.tell(advance(1, 5))
    second = Recorder()
    server = await started(second, port=int(first.address.rsplit(":", 1)[1]))
    try:
        async with asyncio.timeout(30):
            while not second.parts:
                draft.tell(advance(1, 5))
                await asyncio.sleep(0.1)
    finally:
        await server.stop(None)
