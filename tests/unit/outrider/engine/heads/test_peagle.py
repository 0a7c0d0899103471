"""P-EAGLE heads: EAGLE-3's tensors in several layers, and masks in one pass behind what is committed."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_service.drafters.block_drafter import MaskDrafter
from draft_service.drafters.feeding import Feeder
from draft_service.drafters.loading import HeadState, load_draft
from draft_service.slots.head_slot import HeadSlot
from outrider.engine.attention.forward_path import BLOCK_SIZE
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.eagle3 import Eagle3Head, read_peagle
from outrider.engine.heads.head_loader import load_head
from outrider.engine.heads.head_path import HeadPath
from outrider.engine.heads.kinds import PEAGLE, kind_of
from outrider.engine.heads.wiring import score_head, text_logits
from outrider.engine.kv_pool import KVPool
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import SlotTable
from outrider.wire.settings.config import DraftConfig
from outrider.wire.telemetry.metrics import WorkerMetrics
from tests.unit.draft_service.drafters.test_block_drafter import Draft
from tests.unit.outrider.engine.heads.layouts import DRAFT_VOCAB, LAYERS, SHAPE, VOCAB, WIDTH, Eagle3, hidden_states
from tests.unit.outrider.engine.heads.test_eagle3 import PROMPT, TOLERANCE, difference
from tests.unit.outrider.engine.heads.test_wiring import NUM_TOKENS, seen_with

MASK, NUM_MASKS = 7, 3
BASE = {**SHAPE, "model_type": "llama", "num_hidden_layers": 3, "draft_vocab_size": DRAFT_VOCAB}
VLLM = {**BASE, "architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True, "pard_token": MASK}
SPECULATORS = {
    "speculators_model_type": "peagle",
    "architectures": ["PEagleSpeculator"],
    "mask_token_id": MASK,
    "norm_before_residual": True,
    "transformer_layer_config": BASE,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vLLM": (VLLM, {}),
    "speculators": (SPECULATORS, {"residual_normed": True}),
    "norms of the taps": ({**VLLM, "fc_norm": True}, {"projection_norm": "each"}),
}


def made(**more: Any) -> Eagle3:
    head = Eagle3(num_layers=3, **more)
    head.tensors["mask_hidden"] = torch.randn(1, 1, 3 * WIDTH, generator=torch.Generator().manual_seed(2))
    return head


def expected(head: Eagle3, rows: Tensor, ids: list[int]) -> Tensor:
    """Return the logits [1 + NUM_MASKS, Vd] of the last id and of the masks behind it."""
    hidden = torch.zeros(LAYERS + 1, 1, WIDTH, dtype=torch.float64)
    hidden[list(head.taps), 0] = head.tensors["mask_hidden"].double().view(3, WIDTH)
    features = torch.cat([rows, *[head.rows(hidden)] * NUM_MASKS])
    return head.forward(features, [*ids, *[MASK] * NUM_MASKS])[0][-1 - NUM_MASKS :]


@pytest.mark.parametrize("name", CASES)
def test_a_head_fills_masks_as_it_was_trained(name: str, target_folder: str, tmp_path: Path) -> None:
    """In one pass behind a cached prompt, from which the masks are then dropped again."""
    config, more = CASES[name]
    head = made(**more)
    files = Checkpoint(head.write(tmp_path, config, midlayer=name != "speculators"))
    assert kind_of(files) is PEAGLE
    read = read_peagle(files, TargetFiles(target_folder))
    network = Eagle3Head.of(
        read.facts, {n: t.double() if t.is_floating_point() else t for n, t in read.tensors.items()}
    )
    path, facts = HeadPath(network), ModelFacts("head", VOCAB, 128, "float64", "cpu", (), 0)
    runner = ModelRunner(path, facts, KVPool(16, path.block_size), torch.device("cpu"))
    taps = torch.stack([hidden_states(len(PROMPT))[tap] for tap in read.projection.spec.taps], dim=1)
    rows = read.projection.double().exact(taps)
    assert network.block is not None and network.block.feature is not None and network.block.mask_id == MASK
    table, logits = runner.pool.new_table(), []
    for first, end in ((0, 5), (5, 8)):
        ids = [*PROMPT[first:end], *[MASK] * NUM_MASKS]
        fed = torch.cat([rows[first:end], network.block.feature.expand(NUM_MASKS, -1)])
        logits.append(runner.forward([Row(table, ids, first, 1 + NUM_MASKS, PROMPT, features=fed)])[:, head.ids])
        table.truncate(end)
    truth = torch.cat([expected(head, head.rows(hidden_states(len(PROMPT)))[:end], PROMPT[:end]) for end in (5, 8)])
    assert difference(torch.cat(logits), truth) < TOLERANCE


def settings(folder: str, **more: Any) -> DraftConfig:
    return DraftConfig(model=folder, device="cpu", max_slots=2, kv_cache_tokens=512, dtype="float32", **more)


def test_a_loaded_head_has_its_mask(target_folder: str, tmp_path: Path) -> None:
    head = made()
    folder = head.write(tmp_path, VLLM)
    state = load_draft(settings(folder, target_model=target_folder), 1, lambda error: None)
    assert isinstance(state, HeadState) and state.block is not None and state.block.feature is not None
    assert (state.block.mask_id, state.block.feature.dtype) == (MASK, torch.float32)
    fc = head.tensors["fc.weight"]
    torch.testing.assert_close(state.block.feature, fc @ head.tensors["mask_hidden"].flatten())


@pytest.mark.parametrize("is_normed", [False, True])
@torch.inference_mode()
def test_what_files_leave_open_is_decided_by_masks(is_normed: bool, target_folder: str, tmp_path: Path) -> None:
    """A head that carries nothing is scored two tokens ahead as it drafts."""
    config = {key: value for key, value in SPECULATORS.items() if key != "norm_before_residual"}
    loaded = load_head(settings(made().write(tmp_path, config, midlayer=False)), target_folder, PEAGLE)
    assert loaded.undecided == ("norm_before_residual",)
    truth = made(residual_normed=is_normed)
    blank = seen_with(torch.zeros(NUM_TOKENS - 1, dtype=torch.long))
    rows = loaded.projection(torch.stack([blank.taps[tap] for tap in truth.taps], dim=1))[:-1]
    best = [
        truth.ids[expected(truth, rows[: i + 1].double(), list(blank.token_ids[1 : i + 2]))[1].argmax()]
        for i in range(NUM_TOKENS - 2)
    ]
    seen = seen_with(torch.stack([torch.tensor(0), *best]))
    outcome = score_head(loaded, seen)
    assert loaded.network.facts.norm_before_residual is is_normed
    second = text_logits(loaded, seen, loaded.projection.spec.taps, ahead=2)
    assert second.argmax(-1).tolist() == torch.stack(best).tolist()
    assert {way.label for way in outcome.others} >= {"with the norms of embedding and features swapped"}


# The drafter.

ROWS = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
"""What a target would send of the first tokens."""
LONG = [3 + (7 * i) % 30 for i in range(75)]
NUM = 4


class TestDrafter:
    @pytest.fixture
    def head(self) -> Eagle3:
        return made(draft_vocab=VOCAB)

    @pytest.fixture
    def draft(self, head: Eagle3, target_folder: str, tmp_path: Path) -> Draft:
        files = Checkpoint(head.write(tmp_path, {**VLLM, "draft_vocab_size": VOCAB}))
        read = read_peagle(files, TargetFiles(target_folder))
        path, facts = (
            HeadPath(Eagle3Head.of(read.facts, read.tensors)),
            ModelFacts("p", VOCAB, 512, "float32", "cpu", (), 1),
        )
        runner, shape = ModelRunner(path, facts, KVPool(64, BLOCK_SIZE), torch.device("cpu")), path.head.block
        assert shape is not None
        shape = replace(shape, size=NUM)

        def make(keeper: SlotKeeper[Any], metrics: WorkerMetrics) -> Any:
            return lambda growing: MaskDrafter(Feeder(runner, keeper, metrics, 32, growing), shape)

        self.table = SlotTable(runner.pool, 4, 512, partial(HeadSlot, WIDTH, 1))
        return Draft(make, self.table, VOCAB, LONG)

    def send(self, draft: Draft, start: int, end: int, request_id: int = 1) -> None:
        draft.send(ROWS[start:end], start, request_id)

    def expected(self, head: Eagle3, committed: list[int], first: int = 1) -> list[int]:
        rows = ROWS[first - 1 : len(committed) - 1].double()
        return expected(head, rows, committed[first:]).argmax(-1).tolist()

    def slot(self) -> HeadSlot:
        slot = self.table.get(1, 1)
        assert isinstance(slot, HeadSlot)
        return slot

    def test_one_forward_drafts_all_positions(self, draft: Draft, head: Eagle3) -> None:
        draft.tell()
        assert draft.run() == 0 and draft.requests == [0], "nothing is here yet, and is asked for"
        self.send(draft, 0, 74)
        draft.run()
        assert draft.chain() == self.expected(head, draft.committed)
        assert self.slot().cached == LONG[1:] and self.slot().table.num_tokens == 74, "masks leave nothing"

    @pytest.mark.parametrize("num_hit", [0, 1, 3])
    def test_after_a_miss_it_is_made_of_rows(self, draft: Draft, head: Eagle3, num_hit: int) -> None:
        draft.tell()
        self.send(draft, 0, 74)
        draft.run()
        before = draft.chain()
        other = (before[num_hit] + 1) % VOCAB
        draft.tell([*before[:num_hit], other], is_missed=True)
        assert draft.run() == 0, "rows of these tokens are not here"
        self.send(draft, 74, 75 + num_hit)
        draft.run()
        assert draft.chain() == self.expected(head, draft.committed)
