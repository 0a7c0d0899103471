"""What extra rows are worth to later steps."""

import pytest

from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.speculation.target_drafter import ExtraRows
from outrider.wire.requests.drafters import Drafter


@pytest.mark.parametrize(
    ("width", "depth", "gain"),
    [
        (1, 0, 0.0),
        (1, 1, 0.5),
        (1, 3, 0.5 + 0.25 + 0.125),
        (2, 2, 0.8 + 0.64),  # of the other half the second is accepted in 0.24 / 0.4, 0.3 in all
    ],
)
def test_a_level_is_worth_what_is_accepted_before_it(width: int, depth: int, gain: float) -> None:
    shares = SlotAcceptance(RankAcceptance())
    shares.first = 0.5
    rows = ExtraRows(Drafter.LOOKAHEAD, [5], [-1], width, depth)
    assert rows.gain(shares) == pytest.approx(gain)
