"""Features of a slot: which are kept, whatever order they come in."""

from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.feature_buffer import FeatureBuffer

TOKEN_BYTES = 2


def features(start: int, num: int, version: int) -> bytes:
    return b"".join(bytes([(start + i) % 256, version]) for i in range(num))


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "truncate", "drop"]), st.integers(0, 300), st.sampled_from([1, 3, 32, 200])),
        max_size=12,
    )
)
def test_against_a_map_of_all_that_came(events: list[tuple[str, int, int]]) -> None:
    """What is here is what came last at each position, without a gap."""
    buffer, known = FeatureBuffer(TOKEN_BYTES), dict[int, bytes]()
    for version, (what, at, num) in enumerate(events):
        if what == "truncate":
            buffer.truncate(at)
            known = {position: data for position, data in known.items() if position < at}
        elif what == "drop":
            buffer.drop_before(at)
            known = {position: data for position, data in known.items() if position >= at}
            assert buffer.start >= at
        else:
            start = min(at, buffer.end) if at % 2 else at  # a gap sometimes
            is_joined = buffer.start <= start <= buffer.end
            data = features(start, num, version)
            buffer.put(start, data)
            known = {position: found for position, found in known.items() if position < start and is_joined}
            known |= {start + i: data[i * TOKEN_BYTES : (i + 1) * TOKEN_BYTES] for i in range(num)}
        assert buffer.num_bytes == len(known) * TOKEN_BYTES and buffer.end - buffer.start == len(known)
        positions = range(buffer.start, buffer.end)
        assert buffer.read(buffer.start, buffer.end) == b"".join(known[position] for position in positions)
    middle = (buffer.start + buffer.end) // 2
    assert buffer.read(middle, buffer.end) == b"".join(known[position] for position in range(middle, buffer.end))
