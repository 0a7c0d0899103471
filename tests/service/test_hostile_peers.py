"""What a peer can do that is let in and means harm: other streams' slots, others' proposals, all the room there is."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import torch

from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import Delivery, NodeKind, write_delivery
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.transport.rpc import max_control_bytes
from tests.service.conftest import HOLD, stream_to, worker
from tests.service.control_client import (
    ControlClient,
    DeliverClient,
    advance,
    deliver,
    delivery,
    new_ticket,
    parked,
    verify,
)
from tests.service.recorder import Recorder
from tests.service.reference_model import ReferenceModel
from tests.service.test_deliver import PROMPT
from tests.stack import Process
from tests.wire_rows import encode_rows

pytestmark = pytest.mark.asyncio(loop_scope="module")

K = 3


@pytest.fixture(scope="module")
def draft_worker(target_folder: str) -> Iterator[Process]:
    with worker("draft_service", target_folder, "--max-slots", "8") as process:
        yield process


# slots of another stream


async def _unknown(stranger: ControlClient, item: Any) -> None:
    reply = await stranger.ask(item)
    assert isinstance(reply, pb.WorkerError) and reply.code == pb.WORKER_ERROR_CODE_UNKNOWN_SLOT, reply


@pytest.mark.parametrize("kind", ["verify", "extend", "truncate", "close", "open"])
async def test_a_targets_slot_is_its_streams(
    target: ControlClient, target_worker: Process, reference: ReferenceModel, kind: str
) -> None:
    """A lease of the owner's runs meanwhile: it waits for its drafts."""
    await target.opened(1, PROMPT, k=K)
    held = (await target.info()).num_kv_blocks_in_use
    ticket, drafts = secrets.randbits(64), reference.greedy(PROMPT, K)
    lease = target.start(verify(1, len(PROMPT), ticket=ticket))
    async with ControlClient(target_worker.address, "target") as stranger:
        match kind:
            case "verify":
                await _unknown(stranger, verify(1, len(PROMPT), [5]))
            case "extend":
                stranger.tell(tpb.Extend(slot=1, ticket=ticket, lease_end_len=len(PROMPT) + 20))
            case "truncate":
                stranger.tell(pb.Truncate(slot=1, committed_len=1, reason=pb.TRUNCATE_REASON_STOP))
            case "close":
                stranger.tell(pb.CloseSlot(slot=1))
            case "open":
                await stranger.opened(1, (3, 4))
                assert (await target.info()).num_slots_in_use == 2
        await stranger.taken()
        assert not lease.done() and (await target.info()).num_kv_blocks_in_use >= held
        await deliver(target, delivery(target, ticket, len(PROMPT), drafts))
        verdict = await asyncio.wait_for(lease, 30)
    assert verdict.num_accepted == K and list(verdict.token_ids) == reference.greedy(PROMPT, K + 1)


@pytest.mark.parametrize("kind", ["advance", "truncate", "close", "open"])
async def test_a_drafts_slot_is_its_streams(
    draft: ControlClient, draft_worker: Process, recorder: Recorder, reference: ReferenceModel, kind: str
) -> None:
    route = {"target_address": recorder.address, "target_epoch": 1, "k": K}
    tickets = [new_ticket(), new_ticket()]
    await draft.opened(1, PROMPT, **route)
    draft.tell(advance(1, len(PROMPT), [], tickets[0]))
    assert await recorder.chain(tickets[0], K) == reference.greedy(PROMPT, K)
    async with ControlClient(draft_worker.address, "draft") as stranger:
        match kind:
            case "advance":
                stranger.tell(advance(1, len(PROMPT), [5], tickets[1]))
            case "truncate":
                stranger.tell(pb.Truncate(slot=1, committed_len=1))
            case "close":
                stranger.tell(pb.CloseSlot(slot=1))
            case "open":
                await stranger.opened(1, (3, 4), **route)
        await stranger.taken()
        longer = reference.greedy(PROMPT, 2)
        draft.tell(advance(1, len(PROMPT), longer, tickets[1]))
        chain = await recorder.chain(tickets[1], K)
    assert chain == reference.greedy((*PROMPT, *longer), K)


# deliveries under others' leases


async def test_deliveries_under_guessed_tickets_change_nothing_but_counters(
    target: ControlClient, target_worker: Process, reference: ReferenceModel
) -> None:
    """A draft that is let in sprays deliveries: tickets near the true ones, and thousands at random."""
    await target.opened(1, PROMPT, k=K)
    expected = reference.greedy(PROMPT, 6 * (K + 1))
    before = await target.metrics()
    committed = list(PROMPT)

    async with ControlClient(target_worker.address, "target") as stranger, DeliverClient(stranger) as spray:
        tickets: list[int] = []

        async def spray_some(count: int) -> None:
            near = [(ticket + by) % 2**64 for ticket in tickets[-2:] for by in (-1, 1)]
            guesses = [*near, *(secrets.randbits(64) for _ in range(count))]
            wrong = [(committed[-1] + 7) % 320] * K
            await spray.send(*(delivery(stranger, guess, len(committed), wrong) for guess in guesses))

        async def spray_for_ever() -> None:
            while True:
                await spray_some(50)
                await asyncio.sleep(0.02)

        for _ in range(2):
            await spray_some(1000)
        spraying = asyncio.create_task(spray_for_ever())
        for _ in range(6):
            tickets.append(secrets.randbits(64))
            lease = target.start(verify(1, 0, committed, tickets[-1]))
            await asyncio.sleep(0.05)
            await target.taken()
            drafts = expected[len(committed) - len(PROMPT) :][:K]
            await deliver(target, delivery(target, tickets[-1], len(committed), drafts))
            verdict = await asyncio.wait_for(lease, 30)
            assert (verdict.num_drafted, verdict.num_accepted) == (K, K)
            committed += verdict.token_ids
        spraying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await spraying
    assert committed == [*PROMPT, *expected]
    assert (await target.info()).num_leases == 1
    num_dropped = parked(await target.metrics(), "expired") - parked(before, "expired")
    assert num_dropped > 1024 * K


KINDS_OF_REQUESTS: dict[str, tuple[Speculation, dict[str, Any]]] = {
    "greedy": (Speculation(max_draft_tokens=8), {}),
    "greedy, K": (Speculation(num_draft_tokens=K, max_draft_tokens=K), {}),
    "greedy, tree": (Speculation(max_draft_tokens=8, tree=TreeShape((2, 2))), {}),
    "rejection": (Speculation(max_draft_tokens=8), {"temperature": 1.0}),
    "rejection, K": (Speculation(num_draft_tokens=K, max_draft_tokens=K), {"temperature": 1.0}),
    "rejection, tree": (Speculation(max_draft_tokens=8, tree=TreeShape((2, 2))), {"temperature": 1.0}),
    "coupled": (Speculation(max_draft_tokens=8), {"temperature": 1.0, "acceptance": AcceptanceRule.COUPLED}),
    "lenient": (Speculation(max_draft_tokens=8), {"temperature": 0.8, "lenience": 0.5}),
}


def any_nodes(random: Random, ticket: int, committed: Sequence[int], likely: Sequence[int]) -> Delivery:
    """A tree of the right shape that no draft would grow: kinds, places, ends and laws by chance."""
    num, root_len = random.randint(0, 6), len(committed) - random.randint(0, 2)
    path = [*committed[root_len:], *random.choices(likely, k=random.choice([0, 0, 0, 1, 2]))]
    start = len(path)
    parents = [random.choice([index - 1, random.randint(ROOT, index - 1)]) for index in range(start, start + num)]
    parents = [*range(ROOT, start - 1), *parents]
    kinds = random.choice(
        [[NodeKind.SAMPLED] * num, [NodeKind.DETERMINISTIC] * num, random.choices(list(NodeKind), k=num)]
    )
    kinds = [*[NodeKind.REFERENCE] * start, *kinds]
    num_laws = len({parent for parent, kind in zip(parents, kinds, strict=True) if kind is NodeKind.SAMPLED})
    noise = torch.randn(num_laws, 320, generator=torch.Generator().manual_seed(random.randrange(1 << 30)))
    return Delivery(
        ticket=ticket,
        root_len=root_len,
        ids=[*path, *random.choices(likely, k=num)],
        parents=parents,
        ranks=random.choices([0, 0, 0, 1, 2, 255], k=start + num),
        kinds=kinds,
        rows=encode_rows(noise.log_softmax(1), prefer_sparse=False) if num_laws else None,
        ends=[random.randrange(ROOT, start + num) for _ in range(random.choice([0, 0, 1, 2]))][: start + num],
        vocab_size=320,
    )


@pytest.fixture(scope="module")
def hasty_worker(target_folder: str) -> Iterator[Process]:
    """A target that hardly waits for what trees by chance lack."""
    with worker("target_service", target_folder, f"@{HOLD}=0.01") as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module")
async def hasty(hasty_worker: Process) -> AsyncIterator[ControlClient]:
    async with stream_to(hasty_worker, "target") as client:
        yield client


@pytest.mark.parametrize("kind", KINDS_OF_REQUESTS)
async def test_trees_by_chance_fail_no_step(hasty: ControlClient, reference: ReferenceModel, kind: str) -> None:
    """Each of them is refused, dropped or verified; greedy text is the target's whatever came."""
    speculation, options = KINDS_OF_REQUESTS[kind]
    random, num_drafted, expected = Random(kind), 0, reference.greedy(PROMPT, 16)
    for slot in range(4):
        await hasty.opened(slot, PROMPT, speculation=speculation, max_tokens=16, seed=slot, **options)
        message, committed = verify(slot, len(PROMPT)), list(PROMPT)
        replies = hasty.follow(message)
        while len(committed) < len(PROMPT) + 16:
            (verdict,) = await replies.verdicts(1)
            assert verdict.committed_len == len(committed)
            committed += verdict.token_ids
            num_drafted += verdict.num_drafted
            trees = [any_nodes(random, message.tickets[0].ticket, committed, [*expected[:6], 3, 4]) for _ in range(3)]
            await deliver(hasty, *(write_delivery(each, hasty.epoch) for each in trees))
            hasty.tell(tpb.Extend(slot=slot, ticket=message.tickets[0].ticket, lease_end_len=len(committed) + 1))
        assert options or committed == [*PROMPT, *expected]
        hasty.tell(pb.CloseSlot(slot=slot))
    assert num_drafted > 10 or not speculation.is_fixed, "what is not named is verified where it pays on this machine"


async def test_a_control_message_larger_than_any_can_be_is_refused_before_it_is_parsed(
    target: ControlClient, target_worker: Process
) -> None:
    limit = max_control_bytes((await target.info()).context_limit)
    huge = tpb.TargetRequest(id=1, epoch=target.epoch, open=pb.OpenSlot(slot=1, committed_ids=[5] * (limit + 1)))
    stub = target_pb2_grpc.TargetServiceStub(target.channel)
    call: Any = stub.Control(timeout=60.0)
    await call.write(tpb.TargetRequestBatch(items=[huge]))
    with pytest.raises(grpc.aio.AioRpcError, match="at most") as refused:
        await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_more_ids_than_a_context_are_refused_for_their_number(target: ControlClient) -> None:
    limit = (await target.info()).context_limit
    reply = await target.ask(verify(1, 0, [5] * (limit + 1)))
    assert reply.code == pb.WORKER_ERROR_CODE_INVALID
    assert reply.message == f"{limit + 1} committed ids, the context limit is {limit}"
