"""Trees of a named shape, at each worker alone: what a draft sends and what a target keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.engine.sampling.noise import NoiseStream, host_slot_uniforms
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import NodeKind
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape
from tests.service.conftest import HOLD_S, worker
from tests.service.control_client import (
    ControlClient,
    advance,
    deliver,
    delivery,
    drafted,
    new_ticket,
    sampling,
    verify,
)
from tests.service.recorder import Grown, Recorder
from tests.service.reference_model import ReferenceModel, draw
from tests.stack import Process

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (12, 7, 99, 4, 31)
VOCAB = 320
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}


@pytest.fixture(scope="module")
def draft_worker(target_folder: str) -> Iterator[Process]:
    """Of the target's own model, so that one reference serves for both."""
    with worker("draft_service", target_folder, "--max-slots", "4") as process:
        yield process


def shaped(text: str, encoding: DraftLogprobs = DraftLogprobs.AUTO, topk: int = 128) -> Speculation:
    """A tree of this shape and nothing else."""
    return Speculation("auto", 64, TreeShape.parse(text), encoding, topk, is_sequential=True)


async def grown(draft: ControlClient, recorder: Recorder, speculation: Speculation, **options: Any) -> Grown:
    """What came once all of it had."""
    await draft.opened(1, PROMPT, target_address=recorder.address, speculation=speculation, **options)
    message = advance(1, len(PROMPT))
    draft.tell(message)
    return await recorder.grown(message.ticket, lambda each: bool(each.ended))


def law_after(reference: ReferenceModel, prefix: tuple[int, ...], **options: Any) -> torch.Tensor:
    return reference.laws(PROMPT, len(PROMPT), sampling(**options), prefix)[len(prefix)]


# what a draft sends


async def test_siblings_are_drawn_one_after_the_other_from_what_is_shipped(
    draft: ControlClient, recorder: Recorder, reference: ReferenceModel
) -> None:
    found = await grown(draft, recorder, shaped("2x2", DraftLogprobs.FULL), **SAMPLED)
    assert set(found.kinds.values()) == {NodeKind.SAMPLED} and len(found.laws) == 3
    for path, law in found.laws.items():
        assert torch.allclose(law, law_after(reference, path, **SAMPLED), atol=1e-4)
        left, ids = law.clone(), found.children(path)
        assert len(ids) == 2
        for rank, token_id in enumerate(ids):
            key = [sampling(**SAMPLED)], [len(PROMPT)], [len(PROMPT) + len(path)], [NoiseStream.DRAFT], [rank]
            assert token_id == draw(left, float(host_slot_uniforms(*key)[0, 0]))
            left[token_id] = -torch.inf


# what a target keeps


@pytest.mark.parametrize("is_shaped", [True, False], ids=["named", "what pays"])
async def test_a_target_keeps_the_path_that_fits(
    target: ControlClient, reference: ReferenceModel, is_shaped: bool
) -> None:
    """A wrong guess before the right one at each depth; then it goes on from there, and from where a path ended."""
    shape = TreeShape(num_nodes=6, max_depth=3) if is_shaped else None
    await target.opened(1, PROMPT, speculation=Speculation(max_draft_tokens=8, tree=shape))
    right = reference.greedy(PROMPT, 8)
    wrong = [(token_id + 1) % VOCAB for token_id in right]
    ticket, committed = new_ticket(), list(PROMPT)
    first = delivery(
        target,
        ticket,
        len(PROMPT),
        [wrong[0], right[0], wrong[1], right[1], wrong[2], wrong[2]],
        parents=[ROOT, ROOT, 1, 1, 2, 3],
        ranks=[0, 1, 0, 1, 0, 0],
    )
    replies = target.follow(verify(1, len(PROMPT), ticket=ticket, num_steps=8))
    await target.taken()
    if is_shaped:  # held for
        await deliver(target, first)
        (verdict,) = await replies.verdicts(1)
        assert (verdict.num_drafted, verdict.num_accepted, verdict.depth) == (6, 2, 3)
        assert list(verdict.kinds) == [pb.TOKEN_KIND_ACCEPTED, pb.TOKEN_KIND_ACCEPTED, pb.TOKEN_KIND_RECOVERED]
        committed += verdict.token_ids
        assert committed == [*PROMPT, *right[:3]]
        second = delivery(
            target,
            ticket,
            len(committed),
            [wrong[3], right[3]],
            parents=[ROOT, ROOT],
            ranks=[0, 1],
            ends=[ROOT],
        )
        await deliver(target, second)
        (verdict,) = await replies.verdicts(1)
        assert list(verdict.kinds) == [pb.TOKEN_KIND_ACCEPTED, pb.TOKEN_KIND_BONUS]
        committed += verdict.token_ids
    else:
        await deliver(target, first)
    while len(committed) < len(PROMPT) + 8:
        (verdict,) = await replies.verdicts(1)
        committed += verdict.token_ids
    assert committed == [*PROMPT, *reference.greedy(PROMPT, len(committed) - len(PROMPT))]


def uniform_rows(count: int) -> torch.Tensor:
    return torch.full((count, VOCAB), -torch.log(torch.tensor(float(VOCAB))))


async def test_a_sampled_tree_is_verified_whole(target: ControlClient) -> None:
    """Siblings that are alike are one; what lies outside the shape is left out."""
    await target.opened(1, PROMPT, speculation=Speculation(max_draft_tokens=8, tree=TreeShape((2, 1))), **SAMPLED)
    ticket = new_ticket()
    item = delivery(
        target,
        ticket,
        len(PROMPT),
        (10, 20, 30, 10, 40, 50, 60),
        uniform_rows(4),
        parents=(ROOT, ROOT, 0, ROOT, 0, 2, 1),
        ranks=(0, 1, 0, 0, 1, 0, 0),
    )
    verdict = await drafted(target, verify(1, len(PROMPT), ticket=ticket), item)
    assert (verdict.num_drafted, verdict.depth, verdict.fallback) == (4, 2, tpb.FALLBACK_REASON_UNSPECIFIED)
    assert verdict.wait_us < 0.9 * HOLD_S * 1e6
