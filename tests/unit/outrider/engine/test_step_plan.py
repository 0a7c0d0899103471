"""Rows of a step, and how they are grouped."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.kv_pool import KVPool
from outrider.engine.step_plan import FORWARD_COST_TOKENS, Row, group_rows


@st.composite
def feeds(draw: st.DrawFn) -> list[Row]:
    """Rows of every mixture of lengths; grouping looks at nothing else."""
    table = KVPool(1).new_table()
    rows = []
    for _ in range(draw(st.integers(1, 24))):
        num_new = draw(st.one_of(st.integers(1, 8), st.integers(1, 600)))
        num_cached = draw(st.one_of(st.just(0), st.integers(0, 700)))
        rows.append(Row.of(table, range(num_cached + num_new), num_cached, 1))
    return rows


@settings(max_examples=80)
@given(feeds())
def test_grouping_takes_each_row_once_and_never_pads_queries(rows: list[Row]) -> None:
    groups = group_rows(rows)
    assert sorted(i for group in groups for i in group) == list(range(len(rows)))
    for group in groups:
        width = max(rows[i].num_new for i in group)
        assert all(rows[i].num_tokens >= width for i in group)
    # Never dearer than the two plain ways: a forward per distinct width, or one for all when that is allowed.
    cost = sum(FORWARD_COST_TOKENS + max(rows[i].num_new for i in group) * len(group) for group in groups)
    if all(row.num_tokens >= max(r.num_new for r in rows) for row in rows):
        widths = Counter(row.num_new for row in rows)
        assert cost <= sum(FORWARD_COST_TOKENS + width * count for width, count in widths.items())
        assert cost <= FORWARD_COST_TOKENS + max(widths) * len(rows)
