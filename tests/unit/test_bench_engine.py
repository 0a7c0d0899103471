"""What bench-engine says batch invariance costs."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.engine import Timing, _costs

FUSED, INT8, PAGED, DENSE = (
    SimpleNamespace(name=name, batch_invariant=name.startswith("fused"))
    for name in ("fused", "fused int8", "paged", "dense")
)
TIMING = Timing("m", "float32", 1, 1, {"fused": [3.0], "fused int8": [1.0], "paged": [2.0], "dense": [4.0]})


def test_the_mode_is_compared_with_the_fastest_path_that_cannot_promise_it() -> None:
    assert _costs([FUSED, PAGED, DENSE, INT8], TIMING) == ["1.50"]


def test_with_one_kind_of_path_there_is_nothing_to_compare() -> None:
    assert _costs([FUSED, INT8], TIMING) == _costs([PAGED, DENSE], TIMING) == ["n/a"]
