"""Penalties and biases by column, as the output grows and draft tokens are counted with it."""

import pytest

from outrider.engine.sampling.column_edits import ColumnEdits, Columns
from outrider.wire.requests.params import SamplingParams

PARAMS = SamplingParams(
    repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={3: 1.0, 9: -1.0}
)


def by_id(edits: ColumnEdits | None) -> dict[int, tuple[float, float]]:
    """Return the factor and offset of each id."""
    assert edits is not None and len(set(edits.ids.tolist())) == len(edits.ids)
    return dict(zip(edits.ids.tolist(), zip(edits.factor.tolist(), edits.offset.tolist(), strict=True), strict=True))


BEGUN = {3: (2.0, 1.0), 5: (2.0, 0.0), 9: (1.0, -1.0)}
"""After a prompt of 3 and 5, which are repetitions but no output."""


def test_draft_tokens_count_in_their_own_branch_alone() -> None:
    columns = Columns(PARAMS, [3, 5])
    columns.add_output([7])
    committed = BEGUN | {7: (2.0, -0.75)}
    assert by_id(columns.after((9, 7, 7))) == committed | {7: (2.0, -1.75), 9: (2.0, -1.75)}
    assert by_id(columns.after((8,))) == committed | {8: (2.0, -0.75)}
    assert by_id(columns.after(())) == committed


@pytest.mark.parametrize("draft_prefix", [(), (4,)])
def test_without_a_repetition_penalty_the_prompt_is_not_edited(draft_prefix: tuple[int, ...]) -> None:
    edits = Columns(SamplingParams(presence_penalty=0.5), [3, 5]).after(draft_prefix)
    if draft_prefix:
        assert by_id(edits) == {4: (1.0, -0.5)}
    else:
        assert edits is None
