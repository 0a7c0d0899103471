"""Deliveries that are in parts, late, stale, broken or hostile: kept, dropped or refused, counted, and exact."""

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from outrider.engine.speculation.nodes import MAX_NODES
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.transport.codec import float32_tensor, int32_tensor
from tests.service.conftest import HOLD_S, worker
from tests.service.control_client import (
    AT_ONCE_S,
    ControlClient,
    DeliverClient,
    deliver,
    delivery,
    drafted,
    new_ticket,
    parked,
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


def refused(metrics: dict[str, float]) -> float:
    return metrics['outrider_worker_proposals_refused_total{worker="target"}']


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
    rows[1, DRAFTS[1]] = -torch.inf
    rows = rows.log_softmax(dim=1)
    item.distributions.dense.CopyFrom(float32_tensor(rows.numpy().tobytes(), (K, VOCAB)))


def _sparse(ids: list[int], probs: list[float], sizes: list[int]) -> Change:
    def change(item: tpb.Delivery) -> None:
        values = torch.tensor(probs).log()
        item.distributions.CopyFrom(
            pb.TokenDistributions(
                vocab_size=VOCAB,
                sparse_ids=int32_tensor(torch.tensor(ids, dtype=torch.int32).numpy().tobytes(), (len(ids),)),
                sparse_logprobs=float32_tensor(values.numpy().tobytes(), (len(values),)),
                support_sizes=sizes,
            )
        )

    return change


def _ids(field: str, *ids: int) -> Change:
    return _fields(**{field: np.array(ids, dtype="<i4").tobytes()})


DRAFTS = (10, 20, 30)
MISSHAPEN: dict[str, Change] = {
    "stale epoch": _fields(target_epoch=4),
    "id out of range": _ids("ids", 10, VOCAB, 30),
    "negative id": _ids("ids", 10, -1, 30),
    "half an id": _fields(ids=b"12345"),
    "no ids": _ids("ids"),
    "too many ids": _ids("ids", *[1] * (MAX_NODES + 1)),
    "too few parents": _ids("parents", -1, 0),
    "its own parent": _ids("parents", -1, 1, 1),
    "a later parent": _ids("parents", 1, -1, 1),
    "a parent below the root": _ids("parents", -129, 0, 1),
    "too few ranks": _fields(ranks=b"\0\0"),
    "too few kinds": _fields(kinds=b"\2\2"),
    "unknown kind": _fields(kinds=b"\2\2\x09"),
    "unspecified kind": _fields(kinds=b"\2\2\0"),
    "too many ranks": _fields(ranks=bytes(4)),
    "half a parent": _fields(parents=b"\xff" * 11),
    "half an end": _fields(ends=b"12345"),
    "an end that is no node": _ids("ends", 0, K),
    "an end below the root": _ids("ends", -2),
    "more ends than nodes": _ids("ends", *[0] * (K + 2)),
    "fewer parents than rows": _ids("parents", -1, -1, 0),
    "no rows": lambda item: item.ClearField("distributions"),
    "empty rows": lambda item: item.distributions.Clear(),
    "other vocabulary": lambda item: setattr(item.distributions, "vocab_size", VOCAB - 1),
    "wrong dtype": _tensor("dense", dtype=pb.TENSOR_DTYPE_INT32),
    "wrong shape": _tensor("dense", shape=(VOCAB, K)),
    "huge shape": _tensor("dense", shape=(2**32 - 1, 2**32 - 1)),
    "too few bytes": _tensor("dense", data=b"\0" * (4 * K * VOCAB - 4)),
    "sparse with an empty row": _sparse([10, 20, 30], [1.0, 1.0, 1.0], [2, 1, 0]),
    "sparse sizes disagree": _sparse([10, 20, 30], [1.0, 1.0, 1.0], [1, 1, 2]),
    "sparse rows huge": _sparse([10, 20, 30], [1.0, 1.0, 1.0], [2**32 - 1] * 3),
}
WRONG_VALUES: dict[str, Change] = {
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
    "sparse NaN": _sparse([10, 20, 30], [1.0, math.nan, 1.0], [1, 1, 1]),
}


@pytest.mark.parametrize("name", [*MISSHAPEN, *WRONG_VALUES])
async def test_broken_deliveries(target: ControlClient, reference: ReferenceModel, name: str) -> None:
    """What is misshapen is refused when it comes, wrong values when they are to be verified: a plain step at once."""
    await target.opened(1, PROMPT, k=K, **SAMPLED)
    ticket, before = new_ticket(), await target.metrics()
    item = delivery(target, ticket, len(PROMPT), DRAFTS, uniform_rows())
    (MISSHAPEN | WRONG_VALUES)[name](item)
    future = target.start(verify(1, len(PROMPT), ticket=ticket))
    await target.taken()
    assert (await deliver(target, item)).num_refused == (name in MISSHAPEN)
    verdict = await asyncio.wait_for(future, AT_ONCE_S)
    params = sampling(**SAMPLED)
    assert list(verdict.token_ids) == [reference.next_id(PROMPT, len(PROMPT), params)]
    assert (verdict.num_drafted, verdict.fallback) == (0, tpb.FALLBACK_REASON_REFUSED)
    assert verdict.wait_us < 0.9 * HOLD_S * 1e6
    after = await target.metrics()
    assert refused(after) - refused(before) == 1
    assert parked(after, "refused") - parked(before, "refused") == (K if name in WRONG_VALUES else 0)
    committed = [*PROMPT, *verdict.token_ids]
    again = await target.ask_at_once(verify(1, len(committed)))
    assert list(again.token_ids) == [reference.next_id(committed, len(PROMPT), params)]


async def test_what_is_broken_above_is_sound(target: ControlClient) -> None:
    """Otherwise the cases above would pass for another reason."""
    await target.opened(1, PROMPT, k=K, **SAMPLED)
    for item_change in (lambda item: None, _sparse([10, 20, 30], [1.0, 1.0, 1.0], [1, 1, 1])):
        ticket = new_ticket()
        item = delivery(target, ticket, len(PROMPT), DRAFTS, uniform_rows())
        item_change(item)
        verdict = await drafted(target, verify(1, 0, PROMPT, ticket), item)
        assert (verdict.num_drafted, verdict.fallback) == (K, tpb.FALLBACK_REASON_UNSPECIFIED)


async def test_one_broken_delivery_spoils_no_other_slot(target: ControlClient, reference: ReferenceModel) -> None:
    await target.opened(1, PROMPT, k=K)
    await target.opened(2, PROMPT, k=K, **SAMPLED)
    good, bad = new_ticket(), new_ticket()
    futures = [target.start(verify(1, len(PROMPT), ticket=good)), target.start(verify(2, len(PROMPT), ticket=bad))]
    await target.taken()
    nan = delivery(target, bad, len(PROMPT), DRAFTS, uniform_rows())
    nan.distributions.dense.data = torch.full((K, VOCAB), math.nan).numpy().tobytes()
    await deliver(target, nan, delivery(target, good, len(PROMPT), reference.greedy(PROMPT, K)))
    first, second = [await asyncio.wait_for(future, AT_ONCE_S) for future in futures]
    assert list(first.token_ids) == reference.greedy(PROMPT, K + 1)
    assert second.fallback == tpb.FALLBACK_REASON_REFUSED


async def test_a_stream_of_garbage_ends_alone(target: ControlClient, reference: ReferenceModel) -> None:
    """Bytes that are no message, and a message over the limit, end their own stream and nothing else."""
    await target.opened(1, PROMPT, k=K)
    # no serialisers: raw bytes
    call = target.channel.stream_stream("/outrider.v1.TargetService/Deliver")  # type: ignore[call-arg]
    for garbage in (b"\xff" * 64, b"\0" * ((64 << 20) + 1)):
        attempt = call(iter([garbage]))
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(attempt.read(), 30)
    ticket = new_ticket()
    item = delivery(target, ticket, len(PROMPT), reference.greedy(PROMPT, K))
    verdict = await drafted(target, verify(1, len(PROMPT), ticket=ticket), item)
    assert verdict.num_accepted == K


# bounds


async def test_deliveries_under_a_ticket_of_nobody_are_counted(target: ControlClient) -> None:
    before = await target.metrics()
    await deliver(target, delivery(target, new_ticket(), 9, [1, 2, 3], uniform_rows()))
    await target.taken()
    assert parked(await target.metrics(), "expired") - parked(before, "expired") == 3
    assert (await target.info()).num_leases == 0


@pytest.fixture(scope="module")
def bounded(target_folder: str) -> Iterator[Process]:
    """A target that parks little."""
    with worker("tests.service.bounded_target", target_folder) as process:
        yield process


async def test_a_draft_that_fills_its_budget_with_rubbish_harms_only_its_own_slots(
    bounded: Process, reference: ReferenceModel
) -> None:
    """It is counted and given up; beside it drafts come and are kept, and both texts are the target's."""
    async with ControlClient(bounded.address, "target") as client, DeliverClient(client) as rubbish:
        before, expected = await client.metrics(), reference.greedy(PROMPT, 13)
        for slot in (1, 2):
            await client.opened(slot, PROMPT, k=K, max_tokens=13)
        messages = {slot: verify(slot, len(PROMPT), ticket=new_ticket(), num_steps=13) for slot in (1, 2)}
        replies = {slot: client.follow(message) for slot, message in messages.items()}
        await client.taken()
        wrong, ids = [(expected[0] + 1) % VOCAB, 5, 6], list[int]()
        while len(ids) < len(expected):
            root_len = len(PROMPT) + len(ids)
            for first in range(40):  # 40 trees that say something else, of the largest size that is read
                chain = [(wrong[0] + first) % VOCAB, *[7] * (MAX_NODES - 1)]
                await rubbish.send(delivery(client, messages[1].tickets[0].ticket, root_len, chain))
            await deliver(client, delivery(client, messages[2].tickets[0].ticket, root_len, expected[len(ids) :][:K]))
            (verdict,) = await replies[2].verdicts(1)
            room = len(expected) - len(ids) - 1
            assert verdict.num_drafted == verdict.num_accepted == min(K, room)
            ids += verdict.token_ids
        assert ids == expected
        harmed = list[int]()
        while len(harmed) < len(expected):
            harmed += (await replies[1].verdicts(1))[0].token_ids
        assert harmed == expected, "the text is the target's"
        await rubbish.finish()
        await client.taken()
        assert parked(await client.metrics(), "pruned") - parked(before, "pruned") > 40 * MAX_NODES
        assert (await client.info()).num_leases == 0
