"""What ranks say to each other."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.kv_pool import KVPool
from outrider.engine.parallel import rank_messages
from outrider.engine.step_plan import Row


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=5))
def test_a_rank_reads_of_a_row_what_a_path_may_read(sizes: list[tuple[int, int, int]]) -> None:
    pool, rows = KVPool(64, 4), []
    for num_cached, num_new, num_logits in sizes:
        table = pool.new_table()
        table.reserve(num_cached + num_new)
        row = Row.of(table, list(range(100, 100 + num_cached + num_new)), num_cached, min(num_logits, num_new))
        rows.append(replace(row, parents=[-1, *[0] * (num_new - 1)] if num_new % 2 else None))
    widest = max(row.num_new for row in rows)
    for with_past in (False, True):
        kind, (said,) = rank_messages.decode(rank_messages.encode_forward(rows, with_past=with_past))
        assert kind == rank_messages.FORWARD
        for row, found in zip(rows, said, strict=True):
            assert (list(found.new_ids), found.num_cached, found.num_logits) == (
                *(list(row.new_ids), row.num_cached, row.num_logits),
            )
            assert (found.table.blocks, found.table.block_size) == (row.table.blocks, 4)
            width = min(widest, row.num_tokens) if with_past else row.num_new
            assert found.last_ids(width) == row.last_ids(width)
            assert found.parents == row.parents
