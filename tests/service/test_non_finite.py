"""Logits that are no numbers, in one slot of a batch: that request fails, the others of the same forward go on.

The model is a real one with one damaged embedding: whatever holds that token has NaN for logits, nothing else has.
"""

import asyncio
import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from tests.service.conftest import worker
from tests.service.control_client import TIMEOUT_S, ControlClient, eventually, idle, new_ticket, open_slot, verify
from tests.service.recorder import Recorder
from tests.service.reference_model import ReferenceModel
from tests.tiny_models import save

pytestmark = pytest.mark.asyncio(loop_scope="module")

POISON = 311
"""Not among the ids that a worker tests a model with at load: it would be refused there."""
PROMPTS = {1: [5, 6, 7, 8, 9], 2: [5, 6, POISON, 8, 9], 3: [9, 8, 7, 6, 5]}
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 4, "logit_bias": {POISON: -100.0}}
"""POISON is never drawn: a draft that grows ahead would come upon it sooner or later."""


@pytest.fixture(scope="module")
def poisoned_folder(target_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = math.nan
    return save(model, tmp_path_factory.mktemp("poisoned"))


@pytest.fixture(scope="module")
def poisoned(poisoned_folder: str) -> ReferenceModel:
    return ReferenceModel(poisoned_folder)


async def test_the_damage_is_to_one_token_alone(poisoned: ReferenceModel) -> None:
    assert bool(torch.isnan(poisoned.logits(PROMPTS[2])[-1]).all())
    assert bool(torch.isfinite(poisoned.logits(PROMPTS[1])).all())


async def together(client: ControlClient, items: list[Any]) -> list[Any]:
    """Started at once, they leave as one message and are taken in before the next step."""
    return await asyncio.wait_for(asyncio.gather(*(client.start(item) for item in items)), TIMEOUT_S)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_verify_fails_alone(poisoned_folder: str, poisoned: ReferenceModel, options: dict[str, Any]) -> None:
    with worker("target_service", poisoned_folder) as process:
        async with ControlClient(process.address, "target") as client:
            for slot, prompt in PROMPTS.items():
                await client.opened(slot, prompt, **options)
            first, bad, last = await together(client, [verify(slot, 5) for slot in PROMPTS])
            assert isinstance(bad, pb.WorkerError) and bad.code == pb.WORKER_ERROR_CODE_INTERNAL
            assert bad.message.startswith("verify failed: ")
            for verdict, slot in ((first, 1), (last, 3)):
                assert isinstance(verdict, tpb.Verdict) and len(verdict.token_ids) == 1
                if options is GREEDY:
                    assert list(verdict.token_ids) == poisoned.greedy(PROMPTS[slot], 1)
            # Counted without the failed one; in one forward, or this test shows nothing.
            assert await num_steps(client) == 1
            after = await client.ask(verify(1, 5, first.token_ids))
            assert isinstance(after, tpb.Verdict)
        async with ControlClient(process.address, "target") as client:
            await eventually(idle, client)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_a_tree_fails_alone(
    poisoned_folder: str, poisoned: ReferenceModel, recorder: Recorder, options: dict[str, Any]
) -> None:
    """The gateway learns it under the id of the slot's open."""
    k = 3
    with worker("draft_service", poisoned_folder) as process:
        async with ControlClient(process.address, "draft") as client:
            opened = {
                slot: client.follow(open_slot(slot, prompt, target_address=recorder.address, k=k, **options))
                for slot, prompt in PROMPTS.items()
            }
            for replies in opened.values():
                assert isinstance(await replies.next(), pb.OpenReply)
            tickets = {slot: new_ticket() for slot in PROMPTS}
            for slot, ticket in tickets.items():
                client.tell(dpb.Advance(slot=slot, base_len=5, ticket=ticket))
            error = await opened[2].next()
            assert isinstance(error, pb.WorkerError) and error.code == pb.WORKER_ERROR_CODE_INTERNAL
            assert "NaN" in error.message
            for slot in (1, 3):
                chain = await recorder.chain(tickets[slot], k)
                if options is GREEDY:
                    assert chain == poisoned.greedy(PROMPTS[slot], k)
                assert opened[slot].empty
            assert tickets[2] not in recorder.parts
        async with ControlClient(process.address, "draft") as client:
            await eventually(idle, client)


async def num_steps(client: ControlClient) -> int:
    return (await client.info()).num_steps
