"""Proposals that are early, late, stale, broken or hostile: refused, counted, and the round a plain step at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import torch

from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.transport.codec import float32_tensor, int32_tensor
from tests.service.conftest import worker
from tests.service.control_client import (
    AT_ONCE_S,
    ControlClient,
    DeliverClient,
    deliver,
    delivery,
    eventually,
    new_ticket,
    sampling,
    verify,
)
from tests.service.reference_model import ReferenceModel
from tests.stack import Process

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (12, 7, 99, 4, 31)
VOCAB = 320
K = 3
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}


def uniform_rows(count: int = K) -> torch.Tensor:
    """[count, V] float32 log-probs: any id may have been drawn from them."""
    return torch.full((count, VOCAB), -math.log(VOCAB))


def dropped(metrics: dict[str, float], why: str) -> float:
    return metrics.get(f'outrider_worker_dropped_draft_tokens_total{{why="{why}",worker="target"}}', 0.0)


def refused(metrics: dict[str, float]) -> float:
    return metrics['outrider_worker_proposals_refused_total{worker="target"}']


# in time


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_parked_before_its_verify(
    target: ControlClient, reference: ReferenceModel, options: dict[str, Any]
) -> None:
    """Sampled too, a row at a time. The greedy one carries rows that nobody needs."""
    await target.opened(1, PROMPT, **options)
    ticket, drafts, rows = new_ticket(), reference.greedy(PROMPT, K), uniform_rows()
    async with DeliverClient(target) as stream:
        for j in range(K):
            part = delivery(target, ticket, len(PROMPT), drafts[j : j + 1], rows[j : j + 1], start=j, of=K)
            await stream.send(part)
        summary = await stream.finish()
    assert (summary.num_deliveries, summary.num_refused) == (K, 0)
    assert (await target.info()).num_tickets == 1
    verdict = await target.ask_at_once(verify(1, len(PROMPT), k=K, ticket=ticket))
    assert verdict.fallback == tpb.FALLBACK_REASON_UNSPECIFIED and verdict.num_drafted == K
    if options:
        expected = reference.verdict(PROMPT, len(PROMPT), sampling(**options), drafts, rows)
        assert (verdict.num_accepted, list(verdict.token_ids)) == expected
    else:
        assert list(verdict.token_ids) == reference.greedy(PROMPT, K + 1)
    assert verdict.wait_us == 0
    assert (await target.info()).num_tickets == 0


async def test_fewer_drafts_than_asked_for(target: ControlClient, reference: ReferenceModel) -> None:
    await target.opened(1, PROMPT)
    ticket, drafts = new_ticket(), reference.greedy(PROMPT, 2)
    await deliver(target, delivery(target, ticket, len(PROMPT), drafts))
    verdict = await target.ask_at_once(verify(1, len(PROMPT), k=5, ticket=ticket))
    assert verdict.num_drafted == 2 and list(verdict.token_ids) == reference.greedy(PROMPT, 3)


async def test_after_its_verify_timed_out(target: ControlClient, reference: ReferenceModel) -> None:
    await target.opened(1, PROMPT)
    ticket = new_ticket()
    async with DeliverClient(target) as stream:
        await stream.send(delivery(target, ticket, len(PROMPT), [5], of=K))  # only a part comes in time
        verdict = await target.ask(verify(1, len(PROMPT), k=K, ticket=ticket, budget_s=0.3))
        before = await target.metrics()
        await stream.send(delivery(target, ticket, len(PROMPT), [6, 7], start=1, of=K))
        assert (await stream.finish()).num_refused == 0
    assert verdict.fallback == tpb.FALLBACK_REASON_LATE
    assert list(verdict.token_ids) == reference.greedy(PROMPT, 1)
    after = await target.metrics()
    assert dropped(after, "late") - dropped(before, "late") == 2
    assert (await target.info()).num_tickets == 0
    committed = [*PROMPT, *verdict.token_ids]
    again = await target.ask_at_once(verify(1, len(committed)))
    assert list(again.token_ids) == reference.greedy(committed, 1)


# refused

Change = Callable[[tpb.Delivery], None]


def _tensor(name: str, **fields: Any) -> Change:
    """Replace fields of one of the distributions' tensors."""

    def change(item: tpb.Delivery) -> None:
        tensor = getattr(item.distributions, name)
        for field, value in fields.items():
            if field == "shape":
                del tensor.shape[:]
                tensor.shape.extend(value)
            else:
                setattr(tensor, field, value)

    return change


def _fields(**fields: Any) -> Change:
    def change(item: tpb.Delivery) -> None:
        for field, value in fields.items():
            setattr(item, field, value)

    return change


def _row_value(value: float, column: int = 200) -> Change:
    """Overwrite one log-prob of the second row."""

    def change(item: tpb.Delivery) -> None:
        rows = torch.frombuffer(bytearray(item.distributions.dense.data), dtype=torch.float32).view(K, VOCAB)
        rows[1, column] = value
        item.distributions.dense.CopyFrom(float32_tensor(rows.numpy().tobytes(), (K, VOCAB)))

    return change


def _no_mass_on_draft(item: tpb.Delivery) -> None:
    rows = uniform_rows()
    rows[1, item.draft_ids[1]] = -torch.inf
    rows = rows.log_softmax(dim=1)
    item.distributions.dense.CopyFrom(float32_tensor(rows.numpy().tobytes(), (K, VOCAB)))


def _sparse(ids: list[int], probs: list[float], sizes: list[int]) -> Change:
    def change(item: tpb.Delivery) -> None:
        values = torch.tensor(probs).log()
        item.distributions.CopyFrom(
            pb.TokenDistributions(
                vocab_size=VOCAB,
                sparse_ids=int32_tensor(torch.tensor(ids, dtype=torch.int32).numpy().tobytes(), (len(ids),)),
                sparse_log_probs=float32_tensor(values.numpy().tobytes(), (len(values),)),
                row_sizes=sizes,
            )
        )

    return change


def _ids(*ids: int) -> Change:
    def change(item: tpb.Delivery) -> None:
        del item.draft_ids[:]
        item.draft_ids.extend(ids)

    return change


DRAFTS = (10, 20, 30)
BROKEN: dict[str, Change] = {
    "wrong committed length": _fields(committed_len=len(PROMPT) + 1),
    "stale epoch": _fields(target_epoch=4),
    "id out of range": _ids(10, VOCAB, 30),
    "no ids": _ids(),
    "more ids than announced": _fields(num_draft_tokens=2),
    "announces none": _fields(num_draft_tokens=0),
    "announces too many": _fields(num_draft_tokens=65),
    "does not begin at the beginning": _fields(start=1),
    "fewer ids than rows": _ids(10, 20),
    "no rows": lambda item: item.ClearField("distributions"),
    "empty rows": lambda item: item.distributions.Clear(),
    "other vocabulary": lambda item: setattr(item.distributions, "vocab_size", VOCAB - 1),
    "wrong dtype": _tensor("dense", dtype=pb.TENSOR_DTYPE_INT32),
    "wrong shape": _tensor("dense", shape=(VOCAB, K)),
    "huge shape": _tensor("dense", shape=(2**32 - 1, 2**32 - 1)),
    "too few bytes": _tensor("dense", data=b"\0" * (4 * K * VOCAB - 4)),
    "NaN": _row_value(math.nan),
    "infinite": _row_value(math.inf),
    "mass over 1": _row_value(0.0),
    "mass under 1": lambda item: _tensor("dense", data=(uniform_rows() - 1.0).numpy().tobytes())(item),
    "no mass at all": _tensor("dense", data=torch.full((K, VOCAB), -torch.inf).numpy().tobytes()),
    "drafted id without mass": _no_mass_on_draft,
    "sparse id repeated": _sparse([10, 10, 20, 30], [0.5, 0.5, 1.0, 1.0], [2, 1, 1]),
    "sparse id out of range": _sparse([10, 20, 320], [1.0, 1.0, 1.0], [1, 1, 1]),
    "sparse without the drafted id": _sparse([10, 21, 30], [1.0, 1.0, 1.0], [1, 1, 1]),
    "sparse unnormalised": _sparse([10, 11, 20, 30], [0.5, 0.4, 1.0, 1.0], [2, 1, 1]),
    "sparse with an empty row": _sparse([10, 20, 30], [1.0, 1.0, 1.0], [2, 1, 0]),
    "sparse sizes disagree": _sparse([10, 20, 30], [1.0, 1.0, 1.0], [1, 1, 2]),
    "sparse rows huge": _sparse([10, 20, 30], [1.0, 1.0, 1.0], [2**32 - 1] * 3),
    "sparse NaN": _sparse([10, 20, 30], [1.0, math.nan, 1.0], [1, 1, 1]),
}


@pytest.mark.parametrize(("parked", "name"), [(at % 2 == 0, name) for at, name in enumerate(BROKEN)])
async def test_broken_proposals(target: ControlClient, reference: ReferenceModel, name: str, parked: bool) -> None:
    """Every other one is there before its round is, the rest while it waits: both are checked by the same code."""
    await target.opened(1, PROMPT, **SAMPLED)
    ticket, before = new_ticket(), await target.metrics()
    item = delivery(target, ticket, len(PROMPT), DRAFTS, uniform_rows())
    BROKEN[name](item)
    message = verify(1, len(PROMPT), k=K, ticket=ticket)
    if parked:
        await deliver(target, item)
        verdict = await target.ask_at_once(message)
    else:
        future = target.start(message)
        await eventually(lambda info: info.num_tickets == 1, target)
        await deliver(target, item)
        verdict = await asyncio.wait_for(future, AT_ONCE_S)
    params = sampling(**SAMPLED)
    assert list(verdict.token_ids) == [reference.next_id(PROMPT, len(PROMPT), params)]
    assert (verdict.num_drafted, verdict.fallback) == (0, tpb.FALLBACK_REASON_REFUSED)
    after = await target.metrics()
    assert refused(after) - refused(before) == 1
    assert dropped(after, "refused") - dropped(before, "refused") == len(item.draft_ids)
    assert (await target.info()).num_tickets == 0
    committed = [*PROMPT, *verdict.token_ids]
    again = await target.ask_at_once(verify(1, len(committed)))
    assert list(again.token_ids) == [reference.next_id(committed, len(PROMPT), params)]


async def test_the_proposal_that_is_broken_above_is_sound(target: ControlClient) -> None:
    """Otherwise the cases above would pass for another reason."""
    await target.opened(1, PROMPT, **SAMPLED)
    for item_change in (lambda item: None, _sparse([10, 20, 30], [1.0, 1.0, 1.0], [1, 1, 1])):
        ticket = new_ticket()
        item = delivery(target, ticket, len(PROMPT), DRAFTS, uniform_rows())
        item_change(item)
        assert (await deliver(target, item)).num_refused == 0
        verdict = await target.ask_at_once(verify(1, 0, PROMPT, k=K, ticket=ticket))
        assert (verdict.num_drafted, verdict.fallback) == (K, tpb.FALLBACK_REASON_UNSPECIFIED)


@pytest.mark.parametrize(
    "second",
    [
        {"start": 2, "ids": (30,)},
        {"start": 0, "ids": (10,)},
        {"start": 1, "ids": (20, 30, 40)},
        {"start": 1, "ids": (20, 30), "of": 5},
        {"start": 1, "ids": (20, 30), "committed_len": len(PROMPT) + 1},
        {"start": 1, "ids": (20, 30), "log_probs": None},
        {"start": 1, "ids": ()},
    ],
    ids=["gap", "repeated", "too many", "other K", "other length", "rows stop", "no ids"],
)
async def test_parts_that_do_not_fit_together(
    target: ControlClient, reference: ReferenceModel, second: dict[str, Any]
) -> None:
    await target.opened(1, PROMPT, **SAMPLED)
    ticket, before = new_ticket(), await target.metrics()
    future = target.start(verify(1, len(PROMPT), k=K, ticket=ticket))
    ids = second["ids"]
    options = {"of": K, "committed_len": len(PROMPT), "log_probs": uniform_rows(len(ids)), **second}
    del options["ids"]
    first = delivery(target, ticket, len(PROMPT), (10,), uniform_rows(1), of=K)
    part = delivery(target, ticket, ids=ids, **{**options, "log_probs": options["log_probs"] if ids else None})
    summary = await deliver(target, first, part)
    assert (summary.num_deliveries, summary.num_refused) == (2, 1)
    verdict = await asyncio.wait_for(future, AT_ONCE_S)
    assert verdict.fallback == tpb.FALLBACK_REASON_REFUSED
    assert list(verdict.token_ids) == [reference.next_id(PROMPT, len(PROMPT), sampling(**SAMPLED))]
    dropped_now = dropped(await target.metrics(), "refused") - dropped(before, "refused")
    assert dropped_now == 1 + len(ids), "the part that had been taken is lost as well"


async def test_a_complete_proposal_cannot_be_spoilt(target: ControlClient, reference: ReferenceModel) -> None:
    """Whatever comes under its ticket afterwards is refused, the proposal is verified as it was."""
    await target.opened(1, PROMPT, **SAMPLED)
    ticket = new_ticket()
    good = delivery(target, ticket, len(PROMPT), DRAFTS, uniform_rows())
    stale = delivery(target, ticket, len(PROMPT), DRAFTS, uniform_rows())
    stale.target_epoch = 7
    more = delivery(target, ticket, len(PROMPT), (1,), uniform_rows(1), start=3, of=4)
    assert (await deliver(target, good, good, stale, more)).num_refused == 3
    verdict = await target.ask_at_once(verify(1, len(PROMPT), k=K, ticket=ticket))
    expected = reference.verdict(PROMPT, len(PROMPT), sampling(**SAMPLED), DRAFTS, uniform_rows())
    assert (verdict.num_accepted, list(verdict.token_ids)) == expected


async def test_drafts_past_max_tokens_are_refused(target: ControlClient, reference: ReferenceModel) -> None:
    await target.opened(1, PROMPT, max_tokens=3)
    ticket = new_ticket()
    await deliver(target, delivery(target, ticket, len(PROMPT), reference.greedy(PROMPT, 3)))
    verdict = await target.ask_at_once(verify(1, len(PROMPT), k=3, ticket=ticket))
    assert verdict.fallback == tpb.FALLBACK_REASON_REFUSED
    assert list(verdict.token_ids) == reference.greedy(PROMPT, 1)


async def test_one_broken_proposal_spoils_no_other_slot(target: ControlClient, reference: ReferenceModel) -> None:
    await target.opened(1, PROMPT)
    await target.opened(2, PROMPT, **SAMPLED)
    good, bad = new_ticket(), new_ticket()
    futures = [
        target.start(verify(1, len(PROMPT), k=K, ticket=good)),
        target.start(verify(2, len(PROMPT), k=K, ticket=bad)),
    ]
    nan = delivery(target, bad, len(PROMPT), DRAFTS, torch.full((K, VOCAB), math.nan))
    await deliver(target, nan, delivery(target, good, len(PROMPT), reference.greedy(PROMPT, K)))
    first, second = [await asyncio.wait_for(future, AT_ONCE_S) for future in futures]
    assert list(first.token_ids) == reference.greedy(PROMPT, K + 1)
    assert second.fallback == tpb.FALLBACK_REASON_REFUSED


async def test_a_stream_of_garbage_ends_alone(target: ControlClient, reference: ReferenceModel) -> None:
    """Bytes that are no message, and a message over the limit, end their own stream and nothing else."""
    await target.opened(1, PROMPT)
    call = target.channel.stream_unary("/outrider.v1.TargetService/Deliver")  # no serialisers: raw bytes
    for garbage in (b"\xff" * 64, b"\0" * ((64 << 20) + 1)):
        attempt = call(iter([garbage]))
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(attempt, 30)
    ticket = new_ticket()
    await deliver(target, delivery(target, ticket, len(PROMPT), reference.greedy(PROMPT, K)))
    verdict = await target.ask_at_once(verify(1, len(PROMPT), k=K, ticket=ticket))
    assert verdict.num_accepted == K


# bounds


@pytest.mark.parametrize(
    "kind, why, num_tokens", [("half", "expired", 2), ("whole", "expired", 3), ("stale", "refused", 1)]
)
async def test_parked_proposals_expire_while_the_target_idles(
    target: ControlClient, kind: str, why: str, num_tokens: int
) -> None:
    """Nothing else happens that would wake it; the fixture's target keeps proposals for 2 s."""
    before, ticket = await target.metrics(), new_ticket()
    items = {
        "half": delivery(target, ticket, 9, [1, 2], of=5),
        "whole": delivery(target, ticket, 9, [1, 2, 3], uniform_rows()),
        "stale": delivery(target, ticket, 9, [1]),
    }
    items["stale"].target_epoch = 3
    await deliver(target, items[kind])
    assert (await target.info()).num_tickets == 1
    await eventually(lambda info: info.num_tickets == 0, target)
    assert dropped(await target.metrics(), why) - dropped(before, why) == num_tokens


async def test_a_verify_for_an_expired_proposal_goes_at_once(target: ControlClient, reference: ReferenceModel) -> None:
    await target.opened(1, PROMPT)
    ticket = new_ticket()
    await deliver(target, delivery(target, ticket, len(PROMPT), [1, 2]))
    await eventually(lambda info: info.num_tickets == 0, target)
    verdict = await target.ask_at_once(verify(1, len(PROMPT), k=2, ticket=ticket))
    assert verdict.fallback == tpb.FALLBACK_REASON_LATE
    assert list(verdict.token_ids) == reference.greedy(PROMPT, 1)


@dataclass
class Bounded:
    """A target that parks little."""

    process: Process
    max_tickets: int = 4
    max_bytes: int = 12_000


@pytest.fixture(scope="module")
def bounded(target_folder: str) -> Any:
    limits = (
        "@target_service.tickets.MAX_PARKED_TICKETS=4",
        "--max-parked-bytes",
        "12000",
        "@target_service.tickets.PARKED_TTL_S=60",
    )
    with worker("target_service", target_folder, *limits) as process:
        yield Bounded(process)


async def test_bound_of_count(bounded: Bounded, reference: ReferenceModel) -> None:
    async with ControlClient(bounded.process.address, "target") as client:
        await client.opened(1, PROMPT)
        tickets = [new_ticket() for _ in range(6)]
        drafts = reference.greedy(PROMPT, 2)
        summary = await deliver(client, *(delivery(client, t, len(PROMPT), drafts) for t in tickets))
        assert (summary.num_refused, (await client.info()).num_tickets) == (0, 4)
        assert dropped(await client.metrics(), "overflow") == 4, "the first two gave way"
        lost = await client.ask_at_once(verify(1, 0, PROMPT, k=2, ticket=tickets[0]))
        assert lost.num_drafted == 0 and list(lost.token_ids) == drafts[:1]
        for ticket in tickets[2:]:
            kept = await client.ask_at_once(verify(1, 0, PROMPT, k=2, ticket=ticket))
            assert kept.num_accepted == 2
        assert (await client.info()).num_tickets == 0


async def test_bound_of_bytes(bounded: Bounded) -> None:
    """A dense row takes 1280 bytes: three proposals of three rows fit into 12,000 bytes."""
    async with ControlClient(bounded.process.address, "target") as client:
        await client.opened(1, PROMPT, **SAMPLED)
        before = await client.metrics()
        tickets = [new_ticket() for _ in range(4)]
        items = [delivery(client, t, len(PROMPT), DRAFTS, uniform_rows()) for t in tickets]
        summary = await deliver(client, *items)
        assert summary.num_refused == 0
        assert dropped(await client.metrics(), "overflow") - dropped(before, "overflow") == K
        lost = await client.ask_at_once(verify(1, 0, PROMPT, k=K, ticket=tickets[0]))
        assert (lost.num_drafted, lost.fallback) == (0, tpb.FALLBACK_REASON_LATE)
        for ticket in tickets[1:]:
            assert (await client.ask_at_once(verify(1, 0, PROMPT, k=K, ticket=ticket))).num_drafted == K
        assert (await deliver(client, delivery(client, new_ticket(), 5, DRAFTS, uniform_rows()))).num_refused == 0
