"""What the benchmark of acceptance rules calls wrong."""

from __future__ import annotations

import pytest

from benchmarks.rules import BY_BLOCK, BY_TOKEN, Counts, Key, cells, gain, violations

BASE: Counts = [[1.0, 2.0, 3.0], [2.0, 4.0], [1.0, 1.0, 1.0]]
MORE: Counts = [[each + 1.0 for each in prompt] for prompt in BASE]
LESS: Counts = [[each - 1.0 for each in prompt] for prompt in BASE]


def found(temperature: float, k: int, by_block: Counts) -> dict[Key, Counts]:
    return {(temperature, k, BY_TOKEN): BASE, (temperature, k, BY_BLOCK): by_block}


def test_by_block_must_keep_more_where_there_is_much_to_look_at_together() -> None:
    assert violations(found(1.0, 4, MORE)) == []
    for no_more in (BASE, LESS):
        assert violations(found(1.0, 4, no_more))[0].startswith("T = 1, K = 4: by block keeps ")


@pytest.mark.parametrize(("temperature", "k"), [(0.6, 8), (1.0, 1)])
def test_and_never_fewer(temperature: float, k: int) -> None:
    assert violations(found(temperature, k, BASE)) == []
    assert len(violations(found(temperature, k, LESS))) == 1


@pytest.mark.parametrize("nothing", [[[], [], []], [[]]])
def test_too_few_rounds_are_a_violation(nothing: Counts) -> None:
    key = (1.0, 4, BY_TOKEN)
    assert "too few" in violations({key: nothing, (1.0, 4, BY_BLOCK): nothing})[0]


def test_a_prompt_is_its_own_control() -> None:
    """Prompts differ by far more than what every one of them gains."""
    one = gain(MORE, BASE)
    assert one.mean == pytest.approx(1.0) and one.error == pytest.approx(0.0, abs=1e-9)
    mixed = gain([[9.0, 9.0, 9.0], *BASE[1:]], BASE)
    assert mixed.mean == pytest.approx(21 / 8) and mixed.error is not None and mixed.error > 2.0


def test_a_row_tells_the_gain_in_tokens_and_in_percent() -> None:
    made = found(1.0, 4, MORE)
    assert cells(made, (1.0, 4, BY_TOKEN))[:4] == ["1", "4", BY_TOKEN, "8"]
    assert cells(made, (1.0, 4, BY_TOKEN))[-1] == ""
    assert cells(made, (1.0, 4, BY_BLOCK))[-1] == "1.000±0.000 (+53.3 %)"
