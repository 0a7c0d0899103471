"""What the benchmark of acceptance rules calls wrong."""

from __future__ import annotations

from benchmarks.rules import BY_BLOCK, BY_TOKEN, GAINS_FROM, Counts, Key, cells, per_pass, violations

FEW: Counts = [[0.0, 1.0, 2.0], [1.0, 1.0], [0.0, 2.0]]
MORE: Counts = [[each + 1.0 for each in answer] for answer in FEW]


def found(k: int, by_block: Counts) -> dict[Key, Counts]:
    return {(1.0, k, BY_TOKEN): FEW, (1.0, k, BY_BLOCK): by_block}


def test_by_block_must_keep_more_where_there_is_much_to_look_at_together() -> None:
    assert violations(found(GAINS_FROM, MORE)) == []
    for no_more in (FEW, [[]], [[3.0]]):  # of one answer there is no interval
        assert violations(found(GAINS_FROM, no_more))[0].startswith(f"T = 1, K = {GAINS_FROM}: by block keeps ")
    assert violations(found(1, FEW)) == []


def test_answers_are_what_is_independent() -> None:
    """The same rounds in fewer answers are less sure."""
    apart = per_pass([[0.0], [0.0], [0.0], [2.0], [2.0], [2.0]])
    alike = per_pass([[0.0, 0.0, 0.0], [2.0, 2.0, 2.0]])
    assert apart.mean == alike.mean == 2.0
    assert apart.error is not None and alike.error is not None and alike.error > 1.5 * apart.error


def test_a_row_tells_the_gain_in_tokens_and_in_percent() -> None:
    made = found(4, MORE)
    assert cells(made, (1.0, 4, BY_TOKEN)) == ["1", "4", BY_TOKEN, "7", "2.000±0.000", ""]
    assert cells(made, (1.0, 4, BY_BLOCK))[-1] == "1.000±0.000 (+50.0 %)"
