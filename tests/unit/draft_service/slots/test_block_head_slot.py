"""Drafts that are heads of blocks: what they guess is what the head says of the rows that came, whenever they came."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from draft_service.drafters.block_drafter import MaskDrafter, SequentialDrafter
from draft_service.drafters.feeding import Feeder
from draft_service.growing.grower import MakeDrafter
from draft_service.slots.head_slot import HeadSlot
from outrider.engine.attention.forward_path import BLOCK_SIZE
from outrider.engine.heads.dflash import DFlashConfig, DFlashHead, MarkovKind
from outrider.engine.heads.head_path import HeadPath
from outrider.engine.heads.network import BlockShape
from outrider.engine.kv_pool import KVPool
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import SlotTable
from outrider.wire.telemetry.metrics import WorkerMetrics
from tests.unit.draft_service.drafters.test_block_drafter import Draft
from tests.unit.draft_service.slots.test_head_slot import LLAMA, LONG, PROMPT, ROWS, SIZES, VOCAB_SIZE, WIDTH

BLOCK, MASK, RANK, LIMIT = 5, 39, 4, 256


def head_of(kind: MarkovKind | None, *, from_anchor: bool = False) -> DFlashHead:
    torch.manual_seed(0)
    facts = DFlashConfig(
        **SIZES,
        layers=LlamaConfig(**LLAMA, num_hidden_layers=2),
        taps=(1, 2),
        target_width=WIDTH,
        windows=(None, None),
        causal=(False, False),
        block=BlockShape(BLOCK, MASK, from_anchor),
        markov_rank=0 if kind is None else RANK,
        markov_kind=kind or "vanilla",
    )
    head = DFlashHead(facts)
    for parameter in head.parameters():
        parameter.data.normal_(std=0.5)
    return head.eval().requires_grad_(False)


HEADS = {
    "DFlash": head_of(None),
    "vanilla": head_of("vanilla", from_anchor=True),
    "gated": head_of("gated", from_anchor=True),
    "rnn": head_of("rnn", from_anchor=True),
}


class Drafting(Draft):
    """A worker's parts over a head."""

    def __init__(self, head: DFlashHead, prompt: Sequence[int], num_blocks: int = 64) -> None:
        path = HeadPath(head)
        facts = ModelFacts("head", VOCAB_SIZE, LIMIT, "float32", "cpu", (), 1)
        self.head, self.runner = head, ModelRunner(path, facts, KVPool(num_blocks, BLOCK_SIZE), torch.device("cpu"))
        self.table = SlotTable(self.runner.pool, 4, LIMIT, partial(HeadSlot, WIDTH, 0))

        drafter = MaskDrafter if head.markov_head is None else SequentialDrafter

        def make(keeper: SlotKeeper[Any], metrics: WorkerMetrics) -> MakeDrafter:
            return lambda growing: drafter(Feeder(self.runner, keeper, metrics, 32, growing), head.block)

        super().__init__(make, self.table, VOCAB_SIZE, prompt)

    def begin(self) -> None:
        """Draft behind the prompt."""
        self.tell()
        self.send_rows(0, len(PROMPT) - 1)
        self.run()

    def send_rows(self, start: int, end: int) -> None:
        self.send(ROWS[start:end], start)

    @property
    def slot(self) -> HeadSlot:
        slot = self.grower._slots[1, 1].slot
        assert isinstance(slot, HeadSlot)
        return slot


def said(head: DFlashHead, committed: Sequence[int], path: Sequence[int], first: int = 0) -> Tensor:
    """Return the logits after the last committed token and each of a path behind it, without a cache."""
    num = len(path) + 1
    block = torch.tensor([[committed[-1], *[MASK] * (BLOCK - 1)]])
    output = head(block, ROWS[None, first : len(committed) - 1].float())
    start = 0 if head.block.from_anchor else 1
    logits, hidden = (each[0, start : start + num] for each in (output.logits, output.hidden))
    return head.biased(logits, hidden, [committed[-1], *path])


def expected(head: DFlashHead, committed: Sequence[int], first: int = 0, path: Sequence[int] = ()) -> list[int]:
    """The best guess after each token, given the one before it; what follows a path that is known already."""
    path = list(path)
    while len(path) < head.block.num_drafts:
        path.append(int(said(head, committed, path, first)[-1].argmax()))
    return path


@pytest.fixture(params=HEADS)
def head(request: pytest.FixtureRequest) -> DFlashHead:
    return HEADS[request.param]


@pytest.mark.parametrize("prompt", [PROMPT, LONG, PROMPT[:2], PROMPT[:1]], ids=["short", "pieces", "two", "one"])
def test_it_drafts_the_head_s_tokens(head: DFlashHead, prompt: list[int]) -> None:
    draft = Drafting(head, prompt)
    draft.tell()
    if len(prompt) > 1:
        assert draft.run() == 0 and draft.requests == [0], "nothing is here yet, and is asked for"
        draft.send_rows(0, len(prompt) - 1)
    draft.run()
    assert draft.chain() == expected(head, draft.committed)
    assert len(draft.slot.cached) == len(prompt) - 1, "blocks leave nothing"


@pytest.mark.parametrize("num_hit", [0, 1, 3])
def test_the_next_block_is_made_of_the_rows_of_what_was_committed(head: DFlashHead, num_hit: int) -> None:
    draft = Drafting(head, PROMPT)
    draft.begin()
    hit = draft.chain()[:num_hit]
    missed = next(i for i in range(38) if i not in _following(draft, hit))
    draft.tell([*hit, missed], is_missed=True)
    assert draft.run() == 0 and draft.requests[-1] == len(PROMPT) - 1
    draft.send_rows(len(PROMPT) - 1, len(draft.committed) - 1)
    draft.run()
    assert draft.chain() == expected(head, draft.committed)


def _following(draft: Drafting, path: Sequence[int]) -> list[int]:
    """What is thought to follow a path, made a child or not."""
    tree: Any = draft.grower._slots[1, 1].tree
    node = ROOT
    for token_id in path:
        node = tree.child(node, token_id)
    return [*(tree.ids[child] for child in tree.children(node)), *tree.ranked[node]]


def test_continues_below_an_accepted_token(head: DFlashHead) -> None:
    """What was said stays, and what is behind it is said by the new block: a state goes along the whole way there."""
    draft = Drafting(head, PROMPT)
    draft.begin()
    before = draft.chain()
    draft.tell(before[:2])
    assert draft.chain() == before[2:]
    draft.send_rows(len(PROMPT) - 1, len(draft.committed) - 1)
    draft.run()
    assert draft.chain() == expected(head, draft.committed, path=before[2:])


def test_a_tree_has_the_best_after_each_node(head: DFlashHead) -> None:
    draft = Drafting(head, PROMPT)
    draft.begin()
    tree: Any = draft.grower._slots[1, 1].tree
    num_siblings = 0
    for node in [ROOT, *tree.fed]:
        ids = [tree.ids[child] for child in tree.children(node)]
        if ids:
            path = tree.prefix(node)
            best = said(head, PROMPT, path)[-1].argsort(descending=True)[: len(ids)]
            assert ids == best.tolist()
            num_siblings += len(ids) > 1
    assert num_siblings > 2
