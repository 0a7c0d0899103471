"""The last rows of a slot: which are kept, whatever order they come in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from target_service.kept_rows import _PIECE_ROWS, MAX_KEPT_ROWS, KeptRows

ROW_BYTES = 2


def rows(start: int, num: int, version: int) -> bytes:
    return b"".join(bytes([(start + i) % 256, version]) for i in range(num))


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 3 * MAX_KEPT_ROWS), st.sampled_from([1, 3, _PIECE_ROWS, 200, 1000])),
        max_size=12,
    )
)
def test_against_a_map_of_all_that_came(events: list[tuple[bool, int, int]]) -> None:
    """What is here is what came last at each position, without a gap, and of the newest nearly as many as may be."""
    kept, known = KeptRows(ROW_BYTES), dict[int, bytes]()
    for version, (cuts, at, num) in enumerate(events):
        if cuts:
            kept.cut(at)
            known = {position: row for position, row in known.items() if position < at}
        else:
            start = min(at, kept.end) if at % 2 else at  # a gap sometimes
            is_joined = kept.start <= start <= kept.end
            data = rows(start, num, version)
            kept.put(start, data)
            known = {position: row for position, row in known.items() if position < start and is_joined}
            known |= {start + i: data[i * ROW_BYTES : (i + 1) * ROW_BYTES] for i in range(num)}
            assert min(len(known), MAX_KEPT_ROWS - _PIECE_ROWS) <= kept.end - kept.start <= MAX_KEPT_ROWS
            known = {position: row for position, row in known.items() if position >= kept.start}
        first, found = kept.since(0)
        assert first == kept.start and len(found) == kept.num_bytes == (kept.end - kept.start) * ROW_BYTES
        assert found == b"".join(known[position] for position in range(kept.start, kept.end))
        assert len(known) == kept.end - kept.start
    middle = (kept.start + kept.end) // 2
    assert kept.since(middle) == (middle, b"".join(known[position] for position in range(middle, kept.end)))
