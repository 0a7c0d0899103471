"""A plan of fixed buffers: what a captured graph reads after each load, worked out by hand."""

import pytest
import torch

from outrider.engine.cuda.static_plan import StaticPlan
from outrider.engine.kv_pool import KVPool
from outrider.engine.step_plan import Row
from outrider.wire.errors import InvalidRequest

BLOCK, VOCAB = 256, 30


@pytest.fixture
def plan() -> StaticPlan:
    return StaticPlan(2, 2, table_width=3, block_size=BLOCK, vocab_size=VOCAB, device=torch.device("cpu"))


def row_of(blocks: list[int], ids: list[int], num_cached: int, num_logits: int) -> Row:
    table = KVPool(16, BLOCK).new_table()
    table.blocks = blocks
    return Row.of(table, ids, num_cached, num_logits)


def loaded(plan: StaticPlan, name: str) -> list[int]:
    return list(plan.inputs[name].tolist())


def test_a_short_row_feeds_a_cached_token_again_and_a_missing_one_is_made_up(plan: StaticPlan) -> None:
    before = plan.plan.write_to.data_ptr()
    assert plan.load([row_of([7], [20, 21, 22, 23, 24], 4, 1)], made_up_id=9) == 1
    assert loaded(plan, "ids") == [23, 24, 9, 9]
    assert loaded(plan, "positions") == [3, 4, 0, 1]
    assert loaded(plan, "write_to") == [0, 7 * BLOCK + 4, 0, 1]
    assert loaded(plan, "kv_lens") == [5, 2] and loaded(plan, "cu_seq_kv") == [0, 5, 7]
    assert plan.inputs["table"].tolist() == [[7, 0, 0], [0, 0, 0]]
    assert plan.logits_at.tolist()[:1] == [1]
    assert plan.plan.write_to.data_ptr() == before and plan.plan.write_to.tolist() == loaded(plan, "write_to")


def test_a_second_load_leaves_nothing_of_the_first_and_rows_cross_blocks(plan: StaticPlan) -> None:
    plan.load([row_of([7, 2, 5], list(range(20)) * 30, 598, 2)])
    ids = [1] * BLOCK + [2]
    assert plan.load([row_of([3], [4, 5], 0, 2), row_of([6, 1], ids, BLOCK - 1, 1)]) == 3
    assert loaded(plan, "ids") == [4, 5, 1, 2]
    assert loaded(plan, "write_to") == [3 * BLOCK, 3 * BLOCK + 1, 6 * BLOCK + 255, 1 * BLOCK]
    assert plan.inputs["table"].tolist() == [[3, 0, 0], [6, 1, 0]]
    assert plan.logits_at.tolist()[:3] == [0, 1, 3]


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_refused_by_its_id(plan: StaticPlan, bad: int) -> None:
    with pytest.raises(InvalidRequest, match=str(bad)):
        plan.load([row_of([7], [1, bad], 0, 1)])
