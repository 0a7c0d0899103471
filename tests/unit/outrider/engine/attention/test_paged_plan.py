"""Plans of a forward over blocks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.attention.paged_attention import TorchAttention
from outrider.engine.attention.paged_plan import AttentionOptions, PagedPlan
from outrider.engine.kv_pool import TRASH_BLOCK, BlockTable, KVPool
from outrider.engine.memory import masks_bytes
from outrider.engine.step_plan import Row
from tests.unit.outrider.engine.attention.tables import CPU


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Tables that share a pool, so that their blocks lie anywhere; any widths, any logits."""
    pool = KVPool(64, 4)
    tables = [pool.new_table() for _ in range(draw(st.integers(1, 5)))]
    lengths = [0] * len(tables)
    for _ in range(draw(st.integers(0, 12))):  # they grow in turns
        i = draw(st.integers(0, len(tables) - 1))
        lengths[i] += draw(st.integers(1, 6))
        tables[i].reserve(lengths[i])
    made = []
    for table, length in zip(tables, lengths, strict=True):
        num_new = draw(st.integers(1, 9))
        table.reserve(length + num_new)
        ids = draw(st.lists(st.integers(0, 9), min_size=length + num_new, max_size=length + num_new))
        made.append(Row.of(table, ids, length, draw(st.integers(0, num_new))))
    return made


def place(table: BlockTable, position: int) -> int:
    return table.blocks[position // table.block_size] * table.block_size + position % table.block_size


@settings(max_examples=100)
@given(rows())
def test_a_plan_has_for_each_token_what_the_tables_have(made: list[Row]) -> None:
    plan = PagedPlan.build(made, CPU, 10, needs_gather=True)
    new = [(row, position) for row in made for position in range(row.num_cached, row.num_tokens)]
    assert plan.position_ids.tolist() == [[position for _, position in new]]
    assert plan.input_ids.tolist() == [[row.last_ids(row.num_tokens)[position] for row, position in new]]
    assert plan.write_to.tolist() == [place(row.table, position) for row, position in new]
    wanted = [row.num_tokens - position <= row.num_logits for row, position in new]
    assert plan.logits_at.tolist() == [i for i, want in enumerate(wanted) if want]
    assert plan.gather is not None
    assert plan.gather.tolist() == [place(row.table, i) for row in made for i in range(row.num_tokens)]
    assert plan.kv_lens.tolist() == [row.num_tokens for row in made]
    assert plan.cu_seq_q.diff().tolist() == [row.num_new for row in made] and plan.cu_seq_q[0] == 0
    assert plan.cu_seq_kv.diff().tolist() == plan.kv_lens.tolist() and plan.cu_seq_kv[0] == 0
    for row, blocks in zip(made, plan.block_table.tolist(), strict=True):
        assert blocks[: len(row.table.blocks)] == row.table.blocks
        assert set(blocks[len(row.table.blocks) :]) <= {TRASH_BLOCK}
    assert (plan.max_q, plan.max_kv) == (max(row.num_new for row in made), max(row.num_tokens for row in made))


def test_the_mask_of_a_piece_of_a_prompt_is_made_on_the_device_once_for_all_heads() -> None:
    """The device "meta" stands in for a GPU: nothing that the host made may be among what is attended with."""
    table = KVPool(80, 16).new_table()
    num_new, num_tokens, num_heads = 512, 1230, 8
    table.reserve(num_tokens)
    plan = PagedPlan.build([Row.of(table, [1] * num_tokens, num_tokens - num_new, 1)], CPU, 10)
    query = torch.empty(num_new, num_heads, 16, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(81, 16, 2, 16, dtype=torch.bfloat16, device="meta")
    attention = TorchAttention()
    attention.begin(plan)
    attention.attend(query, keys, keys, plan, AttentionOptions(0.3))
    assert attention._groups is not None
    (mask,) = attention._groups[0].masks.values()
    assert (mask.device.type, mask.shape) == ("meta", (1, 1, num_new, num_tokens))
    assert mask.stride(2) == 1232, "rows are aligned, or torch copies them"
    counted = masks_bytes([(None, None)], query.element_size(), num_new, num_tokens)
    assert mask.untyped_storage().nbytes() <= counted
