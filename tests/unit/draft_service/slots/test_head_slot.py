"""A draft that is an EAGLE head: what it guesses is what the head says of the rows that came, whenever they came."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig

from draft_service.drafters.feeding import Feeder
from draft_service.drafters.model_drafter import ModelDrafter
from draft_service.growing.grower import MakeDrafter
from draft_service.slots import head_slot
from draft_service.slots.head_slot import HeadSlot
from outrider.engine.attention.forward_path import BLOCK_SIZE
from outrider.engine.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.engine.heads.head_path import HeadPath
from outrider.engine.heads.joined import JoinedConfig, JoinedHead
from outrider.engine.heads.network import CarryHead
from outrider.engine.kv_pool import KVPool
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.worker.jobs import TruncateJob
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import SlotTable
from outrider.wire.telemetry.metrics import WorkerMetrics
from tests.unit.draft_service.drafters.test_block_drafter import EPOCH, TICKET
from tests.unit.draft_service.drafters.test_block_drafter import Draft as BlockDraft

VOCAB_SIZE, WIDTH = 40, 16


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def head(request: pytest.FixtureRequest) -> CarryHead:
    torch.manual_seed(0)
    head = eagle3() if request.param == "eagle3" else mtp()
    for parameter in head.parameters():
        parameter.data.normal_(std=0.5)
    return head.eval().requires_grad_(False)


LLAMA: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "intermediate_size": 24, "head_dim": 8}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
SIZES: dict[str, int] = {"width": WIDTH, "vocab_size": VOCAB_SIZE, "draft_vocab_size": VOCAB_SIZE}


def mtp() -> JoinedHead:
    """Over a layer with latent attention, which reads all that is cached at each step."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1}
    ranks = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 12}
    widths = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 1}
    layers = DeepseekV3Config(**sizes, **ranks, **widths)
    return JoinedHead(JoinedConfig(layers=layers, **SIZES, has_join_norms=True))


def eagle3() -> Eagle3Head:
    layers = LlamaConfig(**LLAMA, num_hidden_layers=1)
    return Eagle3Head(Eagle3Config(layers=layers, **SIZES, taps=(1, 2, 3), target_width=WIDTH))


ROWS = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
"""What a target would send of the first tokens."""


class Draft(BlockDraft):
    """A head that drafts token by token."""

    def __init__(self, head: CarryHead, prompt: Sequence[int], num_blocks: int = 64) -> None:
        path = HeadPath(head)
        facts = ModelFacts("head", VOCAB_SIZE, 512, "float32", "cpu", (), 1)
        self.runner = ModelRunner(path, facts, KVPool(num_blocks, BLOCK_SIZE), torch.device("cpu"))
        self.runner.tree_refusal = None
        self.table = SlotTable(self.runner.pool, 4, 512, partial(HeadSlot, WIDTH, 1))

        def make(keeper: SlotKeeper[Any], metrics: WorkerMetrics) -> MakeDrafter:
            return lambda growing: ModelDrafter(Feeder(self.runner, keeper, metrics, 32, growing), path)

        super().__init__(make, self.table, VOCAB_SIZE, prompt)

    def send_rows(self, start: int, end: int, **how: int) -> None:
        self.send(ROWS[start:end], start, **how)

    def chain(self) -> list[int]:
        return super().chain()[:4]

    @property
    def slot(self) -> HeadSlot:
        slot = self.table.get(1, 1)
        assert isinstance(slot, HeadSlot)
        return slot


def expected(head: CarryHead, committed: Sequence[int], num: int, first: int = 1) -> list[int]:
    """The head's best guesses behind the committed tokens, each from the carry of the one before it."""
    ids, features = list(committed[first:]), ROWS[first - 1 : len(committed) - 1].float()
    guesses: list[int] = []
    for _ in range(num):
        output = head(torch.tensor([ids]), features[None])
        guesses.append(int(output.logits[0, -1].argmax()))
        ids.append(guesses[-1])
        features = torch.cat([features, output.hidden[0, -1:]])
    return guesses


PROMPT = [3 + (7 * i) % 30 for i in range(9)]
LONG = [3 + (7 * i) % 30 for i in range(75)]


@pytest.mark.parametrize("prompt", [PROMPT, LONG, PROMPT[:2]], ids=["short", "pieces", "two"])
def test_it_drafts_the_head_s_tokens(head: CarryHead, prompt: list[int]) -> None:
    draft = Draft(head, prompt)
    draft.tell()
    assert draft.run() == 0 and draft.requests == [0], "nothing is here yet, and is asked for"
    draft.send_rows(0, len(prompt) - 1)
    draft.run()
    assert draft.chain() == expected(head, draft.committed, 4)


def test_rows_in_any_cut_late_repeated_and_for_others(head: CarryHead) -> None:
    draft = Draft(head, LONG)
    draft.tell()
    draft.send_rows(0, 9, ticket=TICKET + 1)
    draft.send_rows(0, 9, epoch=EPOCH + 1)
    assert draft.run() == 0
    for start, end in ((0, 20), (10, 30), (0, 5), (30, 30), (30, 60)):
        draft.send_rows(start, end)
        draft.run()
    draft.tell([5])
    assert draft.requests[-1] == draft.slot.next_position > 0, "what is fed already is not asked for"
    draft.send_rows(60, 75)
    draft.run()
    assert draft.chain() == expected(head, draft.committed, 4)


def test_after_a_miss_the_way_is_made_of_rows(head: CarryHead) -> None:
    """Three tokens as guessed and one that was not: their entries were made of carries."""
    draft = Draft(head, PROMPT)
    draft.tell()
    draft.send_rows(0, 8)
    draft.run()
    guessed = draft.chain()[:3]
    other = (expected(head, [*PROMPT, *guessed], 1, first=1)[0] + 1) % VOCAB_SIZE
    tree: Any = draft.grower._slots[1, 1].tree
    while tree.child(ROOT, other) is not None:
        other = (other + 1) % VOCAB_SIZE
    draft.send_rows(8, 12)
    draft.tell([*guessed, other], is_missed=True)
    draft.run()
    assert draft.chain() == expected(head, draft.committed, 4)
    assert draft.slot.next_position >= len(draft.committed) - 1, "all committed tokens are sound"


def test_after_an_accepted_token_it_continues_without_features(head: CarryHead) -> None:
    draft = Draft(head, PROMPT)
    draft.tell()
    draft.send_rows(0, 8)
    draft.run()
    before = draft.chain()
    draft.tell(before[:2])
    assert draft.chain()[:2] == before[2:4], "what hung below is parked"
    assert draft.requests[-1] == draft.slot.next_position, "rows of these tokens are wanted all the same"
    draft.run()
    assert len(draft.chain()) == 4
    assert all(draft.buffer.tokens[node].kind is NodeKind.DETERMINISTIC for node in draft.buffer.chain(4))


def test_begins_behind_a_gap(head: CarryHead) -> None:
    """The target had the beginning in its prefix cache: there are rows from the 33rd on."""
    draft = Draft(head, LONG)
    draft.tell()
    draft.send_rows(32, 74)
    draft.run()
    assert draft.slot.first == 33
    assert draft.chain() == expected(head, draft.committed, 4, first=33)


def test_begins_anew_with_the_newest_rows_where_too_many_wait(head: CarryHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_slot, "MAX_FEATURE_BYTES", 50 * ROWS[0].nbytes)
    draft = Draft(head, LONG)
    draft.tell()
    for start in range(0, 74, 20):
        draft.send_rows(start, min(start + 20, 74))
        assert draft.slot.features.end - draft.slot.features.start <= 50
    draft.send_rows(60, 74)
    draft.run()
    assert draft.slot.first == 41
    assert draft.chain() == expected(head, draft.committed, 4, first=41)


def test_features_are_requested_again_after_a_preemption(head: CarryHead) -> None:
    draft = Draft(head, LONG)
    draft.runner.pool.prefix.enabled = False
    draft.tell()
    draft.send_rows(0, 74)
    draft.run()
    before = draft.request_id
    draft.slot.free_cache()
    draft.tell([38, 39], is_missed=True)
    assert draft.requests[-1] == 0
    draft.run()
    draft.send_rows(75, 76, request_id=before)  # of a step that ran when it was asked for
    assert draft.slot.first == 1, "what was asked for is to come"
    draft.send_rows(20, 76)  # the target remembers no more
    draft.run()
    assert draft.slot.first == 21
    assert draft.chain() == expected(head, draft.committed, 4, first=21)


def test_an_end_frees_all(head: CarryHead) -> None:
    draft = Draft(head, LONG)
    draft.tell()
    draft.send_rows(0, 74)
    draft.run()
    draft.grower.handle(TruncateJob(1, 1, len(LONG), "stop"))
    draft.send_rows(74, 76)
    assert draft.run() == 0
    draft.table.close(1, 1)
    assert draft.runner.pool.num_in_use == 0
