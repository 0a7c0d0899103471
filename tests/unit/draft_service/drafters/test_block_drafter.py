"""Drafts that say a block of positions in one go: heads over the target's newest row, and a model that fills masks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draft_service.drafters.block_drafter import MaskDrafter, MedusaDrafter
from draft_service.drafters.feeding import Feeder
from draft_service.growing.grower import Grower, MakeDrafter
from draft_service.slot_jobs import AdvanceJob, FeaturesJob, FeaturesRequest
from draft_service.slots.head_slot import HeadSlot
from outrider.engine.attention.forward_path import BLOCK_SIZE
from outrider.engine.heads.medusa import MedusaConfig, MedusaHeads
from outrider.engine.heads.network import BlockShape
from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.speculation.nodes import Delivery
from outrider.engine.worker.jobs import OpenJob
from outrider.engine.worker.open_slots import OpenSlots
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import SlotTable
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation
from outrider.wire.settings.config import DraftConfig
from outrider.wire.telemetry.metrics import WorkerMetrics
from target_service.leases.draft_buffer import DraftBuffer
from tests.tiny_models import tiny_llama
from tests.unit.target_service.step.test_step import AtOnce

WIDTH, VOCAB_SIZE, NUM_HEADS = 12, 30, 3
EPOCH, TICKET = 7, 9
PROMPT = [3 + (7 * i) % 20 for i in range(9)]


class Draft:
    """A worker's parts without the wire."""

    def __init__(self, make: Any, slots: Any, vocab_size: int, prompt: Sequence[int]) -> None:
        metrics, engine = WorkerMetrics("draft"), AtOnce()
        keeper: SlotKeeper[Any] = SlotKeeper(slots, engine, metrics, vocab_size, ())
        make_drafter: MakeDrafter = make(keeper, metrics)
        self.requests, self.request_id = list[int](), 0
        """Where the rows begin that were asked for, and the id of the last request."""
        self.grower = Grower(make_drafter, keeper, engine, self.take, metrics, self.asked)
        self.committed, self.buffer = list(prompt), DraftBuffer()
        params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
        job = OpenJob(1, 1, tuple(prompt), len(prompt), params, print, target_address="target:1", target_epoch=EPOCH)
        self.grower.handle(replace(job, speculation=Speculation(max_draft_tokens=16)))

    def asked(self, address: str, epoch: int, request: FeaturesRequest) -> None:
        assert (address, epoch, request.ticket) == ("target:1", EPOCH, TICKET)
        self.requests.append(request.start)
        self.request_id = request.id

    def send(
        self, rows: Tensor, start: int, request_id: int | None = None, ticket: int = TICKET, epoch: int = EPOCH
    ) -> None:
        """Rows of the target [n, d] bfloat16 come, of the tokens from `start` on."""
        bits = rows.view(torch.int16).numpy().view(np.uint16)
        answered = self.request_id if request_id is None else request_id
        self.grower.handle(FeaturesJob(ticket, epoch, start, bits, lambda: None, answered))

    def take(self, address: str, epoch: int, nodes: Delivery) -> None:
        self.buffer.insert(nodes, self.committed, 1 << 20)

    def tell(self, ids: Sequence[int] = (), *, is_missed: bool = False) -> None:
        base_len = len(self.committed)
        self.committed += ids
        self.buffer.advance(list(ids), base_len, None)
        self.grower.handle(AdvanceJob(1, 1, TICKET, base_len, tuple(ids), is_missed))

    def run(self) -> int:
        return next((n for n in range(60) if not self.grower.step(0.0)), 60)

    def chain(self) -> list[int]:
        return [self.buffer.tree.ids[node] for node in self.buffer.chain(9)]


@pytest.fixture(scope="module")
def heads() -> MedusaHeads:
    torch.manual_seed(1)
    sizes = {"width": WIDTH, "vocab_size": VOCAB_SIZE, "draft_vocab_size": VOCAB_SIZE}
    heads = MedusaHeads(MedusaConfig(num_heads=NUM_HEADS, num_layers=1, shares_lm_head=False, **sizes))
    return heads.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, UncachedModel]:
    folder = tiny_llama(tmp_path_factory.mktemp("model"), sharpness=3.0)
    config = DraftConfig(model=folder, device="cpu", dtype="float32", kv_cache_tokens=1024)
    return load_runner(config), UncachedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


class TestMedusa:
    @pytest.fixture
    def draft(self, heads: MedusaHeads) -> Draft:
        def make(keeper: SlotKeeper[Any], metrics: WorkerMetrics) -> MakeDrafter:
            return lambda growing: MedusaDrafter(heads, keeper)

        return Draft(
            make, OpenSlots(partial(HeadSlot, WIDTH, 1, pool=KVPool(1), has_cache=False), 4, 99), VOCAB_SIZE, PROMPT
        )

    def send(self, draft: Draft, start: int, num: int) -> Tensor:
        """Return the last row."""
        rows = torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(start)).to(torch.bfloat16)
        draft.send(rows, start, request_id=1)
        return rows[-1]

    def test_each_head_drafts_its_position(self, draft: Draft, heads: MedusaHeads) -> None:
        draft.tell()
        assert draft.run() == 0 and draft.requests == [7]
        row = self.send(draft, 3, 5)
        draft.run()
        assert draft.chain() == heads(row).argmax(-1).tolist()
        slot = draft.grower._slots[1, 1].slot
        assert isinstance(slot, HeadSlot) and slot.features.num_bytes == 2 * WIDTH, "the others are not kept"

    def test_failure_concerns_the_newest_row_alone(self, draft: Draft, heads: MedusaHeads) -> None:
        """On a hit what it said of the positions before stays; beyond them the newer row speaks."""
        draft.tell()
        self.send(draft, 3, 5)
        draft.run()
        before = draft.chain()
        draft.tell(before[:2])
        assert draft.run() == 0, "the row of what was committed is not here"
        row = self.send(draft, 8, 2)
        draft.run()
        assert draft.chain()[0] == before[2]
        assert draft.chain()[1:] == heads(row).argmax(-1).tolist()[1:]

    def test_a_late_row_of_before_is_of_no_use(self, draft: Draft, heads: MedusaHeads) -> None:
        row = None
        draft.tell()
        row = self.send(draft, 3, 5)
        self.send(draft, 2, 3)
        draft.run()
        assert draft.chain() == heads(row).argmax(-1).tolist()


class TestPard:
    MASK, NUM = 5, 4
    prompt = tuple(3 + (7 * i) % 200 for i in range(40))

    @pytest.fixture
    def truth(self, model: tuple[ModelRunner, UncachedModel]) -> UncachedModel:
        return model[1]

    @pytest.fixture
    def draft(self, model: tuple[ModelRunner, UncachedModel]) -> Draft:
        return self.drafting(model[0], self.prompt, 64)

    def drafting(self, runner: ModelRunner, prompt: Sequence[int], num_blocks: int) -> Draft:
        runner.set_pool(KVPool(num_blocks, BLOCK_SIZE))

        def make(keeper: SlotKeeper[Any], metrics: WorkerMetrics) -> MakeDrafter:
            return lambda growing: MaskDrafter(
                Feeder(runner, keeper, metrics, 32, growing), BlockShape(self.NUM, self.MASK)
            )

        slots = SlotTable(runner.pool, 4, runner.facts.context_limit)
        return Draft(make, slots, runner.facts.vocab_size, prompt)

    def expected(self, truth: UncachedModel, committed: Sequence[int]) -> list[int]:
        logits = truth.forward([*committed, *[self.MASK] * (self.NUM - 1)])
        return logits[-self.NUM :].argmax(-1).tolist()

    def test_one_forward_drafts_all_positions(self, draft: Draft, truth: UncachedModel) -> None:
        draft.tell()
        draft.run()
        assert draft.chain() == self.expected(truth, draft.committed)

    @pytest.mark.parametrize("num_hit", [0, 1, 3])
    def test_masks_leave_nothing(self, draft: Draft, truth: UncachedModel, num_hit: int) -> None:
        draft.tell()
        draft.run()
        before = draft.chain()
        draft.tell([*before[:num_hit], 299], is_missed=True)
        draft.run()
        assert draft.chain() == self.expected(truth, draft.committed)

    def test_at_the_end_of_an_answer_that_fills_the_cache(
        self, model: tuple[ModelRunner, UncachedModel], truth: UncachedModel
    ) -> None:
        """Masks past the end of the answer would find no memory, and the step would fail."""
        draft = self.drafting(model[0], self.prompt[:4], 4)
        draft.tell(self.prompt)
        for token_id in range(7, 25):  # 4 + 40 + 18 of 64
            draft.tell([token_id], is_missed=True)
            draft.run()
        assert draft.chain() == self.expected(truth, draft.committed)[:1], "the target adds one of its own"
