"""Trees of a named shape, at each worker alone: what a draft sends and what a target keeps."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.engine.sampling.noise import NoiseStream, host_slot_uniforms
from outrider.engine.speculation.nodes import NodeKind
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.requests.speculation import Speculation
from outrider.wire.requests.tree_shape import TreeShape
from tests.service.conftest import worker
from tests.service.control_client import ControlClient, advance, sampling
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
