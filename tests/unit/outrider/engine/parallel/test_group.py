"""Two ranks agree on numbers, in processes of their own."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from outrider.engine.parallel.group import join_group
from outrider.wire.errors import ConfigError
from tests.forked import CONTEXT


def as_rank(store: Path, rank: int) -> tuple[int, str]:
    """-> the smallest number of all ranks, and what is said of values that differ."""
    group = join_group(store, rank, 2, "cpu")
    smallest = group.smallest((70, 40)[rank])
    group.check_same("dtype", "float32")
    said = ""
    try:
        group.check_same("attention path", ("paged", "dense")[rank])
    except ConfigError as error:
        said = error.message
    group.close()
    group.close()
    return smallest, said


def test_ranks_take_the_smallest_number_and_name_what_differs(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=CONTEXT) as pool:
        found = list(pool.map(as_rank, [tmp_path / "store"] * 2, range(2), timeout=60))
    assert found == [
        (40, "the ranks differ in attention path: rank 0 has 'paged'; use tensor_parallel 1"),
        (40, "the ranks differ in attention path: rank 1 has 'dense'; use tensor_parallel 1"),
    ]
