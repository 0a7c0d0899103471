"""Proposals that are trees, at each worker alone: what a draft sends, what a target keeps, and what either refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from outrider.engine.sampling.noise import Purpose, host_slot_uniforms
from outrider.engine.sampling.tree_acceptance import ROOT, DraftTree
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.transport.codec import rows_from_proto
from tests.service.conftest import worker
from tests.service.control_client import (
    ControlClient,
    DeliverClient,
    deliver,
    delivery,
    new_ticket,
    sampling,
    verify,
)
from tests.service.recorder import Recorder
from tests.service.reference_model import ReferenceModel, draw
from tests.stack import Process
from tests.wire_rows import decode_rows

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (12, 7, 99, 4, 31)
VOCAB = 320
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}


@pytest.fixture(scope="module")
def draft_worker(target_folder: str) -> Iterator[Process]:
    """Of the target's own model, so that one reference serves for both."""
    with worker("draft_service", target_folder, "--max-slots", "4") as process:
        yield process


def propose(base_len: int, ids: Any = (), *, k: int = 4, widths: tuple[int, ...] = (), **tree: int) -> dpb.Propose:
    message = dpb.Propose(slot=1, base_len=base_len, committed_ids=ids, num_draft_tokens=k, ticket=new_ticket())
    if widths or tree:
        message.tree.CopyFrom(pb.TreeShape(widths=widths, **tree))
    return message


async def tree_of(draft: ControlClient, recorder: Recorder, message: dpb.Propose) -> tuple[DraftTree, Any]:
    """What came, checked, and its parts."""
    reply = await draft.ask(message)
    assert isinstance(reply, dpb.ProposeReply), reply
    parts = await recorder.complete(message.ticket)
    tree = DraftTree.checked([i for p in parts for i in p.draft_ids], [i for p in parts for i in p.parents])
    assert tree.ids == tuple(reply.draft_ids)
    return tree, parts


def law_after(reference: ReferenceModel, prefix: tuple[int, ...], **options: Any) -> torch.Tensor:
    return reference.laws(PROMPT, len(PROMPT), sampling(**options), prefix)[len(prefix)]


async def test_a_greedy_tree_holds_the_best(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel
) -> None:
    await draft.opened(1, PROMPT, deliver_to=recorder.address)
    tree, (part,) = await tree_of(draft, recorder, propose(0, PROMPT, k=64, widths=(3, 2, 1)))
    assert len(tree.ids) == 3 + 6 + 6 and not part.HasField("distributions")
    for node in tree.inner:
        best = law_after(reference, tree.prefix(node), temperature=1.0).argsort(descending=True)
        ids = [tree.ids[child] for child in tree.children(node)]
        assert ids == best[: len(ids)].tolist()


async def test_siblings_are_drawn_one_after_the_other_from_what_is_shipped(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel
) -> None:
    await draft.opened(1, PROMPT, deliver_to=recorder.address, **SAMPLED)
    message = propose(0, PROMPT, k=64, widths=(2, 2))
    message.draft_logprobs = pb.DRAFT_LOGPROBS_FULL
    tree, parts = await tree_of(draft, recorder, message)
    assert [len(part.draft_ids) for part in parts] == [2, 2, 2]  # a part for each law
    places: dict[int, int] = {}
    for part, node in zip(parts, tree.inner, strict=True):
        law = decode_rows(rows_from_proto(part.distributions, 1, VOCAB), VOCAB, part.draft_ids[:1])[0]
        assert torch.allclose(law, law_after(reference, tree.prefix(node), **SAMPLED), atol=1e-4)
        depth = tree.depth(node)
        for child in tree.children(node):
            place = places[depth] = places.get(depth, -1) + 1
            key = [sampling(**SAMPLED)], [len(PROMPT)], [len(PROMPT) + depth], [Purpose.DRAFT], [place]
            assert tree.ids[child] == draw(law, float(host_slot_uniforms(*key)[0, 0]))
            law[tree.ids[child]] = -torch.inf


async def test_a_cut_tree_goes_as_one_part(draft: ControlClient, recorder: Recorder) -> None:
    await draft.opened(1, PROMPT, deliver_to=recorder.address, **SAMPLED)
    message = propose(0, PROMPT, k=64, num_nodes=9, max_depth=3)
    message.draft_logprobs, message.draft_topk = pb.DRAFT_LOGPROBS_TOPK, 6
    tree, (part,) = await tree_of(draft, recorder, message)
    rows = rows_from_proto(part.distributions, len(tree.inner), VOCAB)
    assert len(tree.ids) == 9 and rows.num_rows == len(tree.inner)


async def test_no_node_is_taken_for_a_committed_token(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel
) -> None:
    """Siblings lie side by side in the cache. A text that says them one after the other was never fed."""
    await draft.opened(1, PROMPT, deliver_to=recorder.address)
    tree, _ = await tree_of(draft, recorder, propose(0, PROMPT, k=64, widths=(4, 1, 1)))
    committed = [*PROMPT, *tree.ids[:3]]
    assert tree.parents[:3] == (ROOT,) * 3
    message = propose(len(PROMPT), tree.ids[:3])
    reply = await draft.ask(message)
    assert list(reply.draft_ids) == reference.greedy(committed, 4)
    await recorder.complete(message.ticket)


async def test_what_a_draft_refuses(draft: ControlClient) -> None:
    await draft.opened(1, PROMPT, deliver_to="127.0.0.1:1", max_tokens=4)
    for message, why in (
        (propose(0, PROMPT, k=8, widths=(2, 1, 1, 1)), "at most 3 deep"),
        (propose(0, PROMPT, k=8, widths=(2,), num_nodes=2, max_depth=1), "both widths and num_nodes"),
        (propose(0, PROMPT, k=8, widths=(65,)), "from 1 to 64"),
        (propose(0, PROMPT, k=8, max_depth=2), "from 1 to 64"),
    ):
        error = await draft.ask(message)
        assert isinstance(error, pb.WorkerError) and error.code == pb.WORKER_ERROR_CODE_INVALID
        assert why in error.message


async def test_a_target_keeps_the_path_that_fits(target: ControlClient, reference: ReferenceModel) -> None:
    """A wrong guess before the right one at each depth; then it goes on from there, and from where a path ended."""
    await target.opened(1, PROMPT)
    right = reference.greedy(PROMPT, 4)
    wrong = [(token_id + 1) % VOCAB for token_id in right]
    ticket = new_ticket()
    item = delivery(target, ticket, len(PROMPT), [wrong[0], right[0], wrong[1], right[1], wrong[2], wrong[2]])
    item.parents.extend([ROOT, ROOT, 1, 1, 2, 3])
    await deliver(target, item)
    verdict = await target.ask_at_once(verify(1, len(PROMPT), k=8, ticket=ticket))
    assert (verdict.num_drafted, verdict.num_accepted) == (6, 2)
    assert list(verdict.token_ids) == right[:3]
    assert list(verdict.kinds) == [pb.TOKEN_KIND_ACCEPTED, pb.TOKEN_KIND_ACCEPTED, pb.TOKEN_KIND_RECOVERED]
    committed = [*PROMPT, *right[:3]]
    ticket = new_ticket()
    item = delivery(target, ticket, len(committed), [wrong[3], right[3]])
    item.parents.extend([ROOT, ROOT])
    await deliver(target, item)
    verdict = await target.ask_at_once(verify(1, len(committed), k=8, ticket=ticket))
    assert list(verdict.token_ids) == reference.greedy(committed, 2)
    assert list(verdict.kinds) == [pb.TOKEN_KIND_ACCEPTED, pb.TOKEN_KIND_BONUS]
    committed += verdict.token_ids
    assert list((await target.ask_at_once(verify(1, len(committed)))).token_ids) == reference.greedy(committed, 1)


Change = Callable[[tpb.Delivery], None]


def _parents(*parents: int) -> Change:
    def change(item: tpb.Delivery) -> None:
        del item.parents[:]
        item.parents.extend(parents)

    return change


def _ids(*ids: int) -> Change:
    def change(item: tpb.Delivery) -> None:
        del item.draft_ids[:]
        item.draft_ids.extend(ids)

    return change


def _rows(count: int) -> torch.Tensor:
    return torch.full((count, VOCAB), -torch.log(torch.tensor(float(VOCAB))))


BROKEN: dict[str, Change] = {
    "a parent of its own": _parents(-1, 1, 0),
    "a parent that comes later": _parents(2, -1, -1),
    "a parent far away": _parents(-1, -1, 2**31 - 1),
    "below the root": _parents(-1, -2, 0),
    "fewer parents than tokens": _parents(-1, -1),
    "more parents than tokens": _parents(-1, -1, 0, 0),
    "siblings alike": _ids(10, 10, 30),
    "more rows than parents": _parents(-1, -1, -1),
    "fewer rows than parents": _parents(-1, 0, 1),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_trees(target: ControlClient, reference: ReferenceModel, name: str) -> None:
    await target.opened(1, PROMPT, **SAMPLED)
    ticket = new_ticket()
    item = delivery(target, ticket, len(PROMPT), (10, 20, 30), _rows(2))
    _parents(-1, -1, 0)(item)
    BROKEN[name](item)
    await deliver(target, item)
    verdict = await target.ask_at_once(verify(1, len(PROMPT), k=3, ticket=ticket))
    assert (verdict.num_drafted, verdict.fallback) == (0, tpb.FALLBACK_REASON_REFUSED)
    assert list(verdict.token_ids) == [reference.next_id(PROMPT, len(PROMPT), sampling(**SAMPLED))]


async def test_the_tree_that_is_broken_above_is_sound(target: ControlClient) -> None:
    await target.opened(1, PROMPT, **SAMPLED)
    ticket = new_ticket()
    item = delivery(target, ticket, len(PROMPT), (10, 20, 30), _rows(2))
    _parents(-1, -1, 0)(item)
    await deliver(target, item)
    verdict = await target.ask_at_once(verify(1, len(PROMPT), k=3, ticket=ticket))
    assert (verdict.num_drafted, verdict.fallback) == (3, tpb.FALLBACK_REASON_UNSPECIFIED)


@pytest.mark.parametrize("second", [(), (-1,)], ids=["a chain goes on", "a parent has two laws"])
async def test_parts_of_a_tree_that_do_not_fit(target: ControlClient, second: tuple[int, ...]) -> None:
    await target.opened(1, PROMPT, **SAMPLED)
    ticket = new_ticket()
    first = delivery(target, ticket, len(PROMPT), (10, 20), _rows(1), of=3)
    _parents(-1, -1)(first)
    last = delivery(target, ticket, len(PROMPT), (30,), _rows(1), start=2, of=3)
    _parents(*second)(last)
    async with DeliverClient(target) as stream:
        await stream.send(first)
        await stream.send(last)
        await stream.finish()
    verdict = await target.ask_at_once(verify(1, len(PROMPT), k=3, ticket=ticket))
    assert (verdict.num_drafted, verdict.fallback) == (0, tpb.FALLBACK_REASON_REFUSED)


@pytest.mark.parametrize(
    ("options", "parents"),
    [({"max_tokens": 2}, (-1, -1, 0)), ({"lenience": 0.5}, (-1, -1, 0)), ({"max_tokens": 3}, (-1, 0, 1))],
    ids=["too deep", "lenient", "a branch too deep"],
)
async def test_trees_that_a_slot_has_no_use_for(
    target: ControlClient, options: dict[str, Any], parents: tuple[int, ...]
) -> None:
    await target.opened(1, PROMPT, **options)
    ticket = new_ticket()
    item = delivery(target, ticket, len(PROMPT), (10, 20, 30))
    _parents(*parents)(item)
    await deliver(target, item)
    verdict = await target.ask_at_once(verify(1, len(PROMPT), k=3, ticket=ticket))
    assert (verdict.num_drafted, verdict.fallback) == (0, tpb.FALLBACK_REASON_REFUSED)
