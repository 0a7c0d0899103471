"""The gain of speculation under load, of the same turns with and without it."""

import pytest

from outrider.lab.load.figures import Gain, RequestBatch
from tests.unit.outrider.lab.load.turns import REFUSED, turns


def test_the_gain_is_of_the_same_batches() -> None:
    """The machine is three times as slow in some turns: it is so on both sides, and no noise of the ratio."""
    plain = [3.0, 1.0, 3.0, 1.0, 1.0, 3.0]
    gain = Gain.of(turns([each / 2 for each in plain]), turns(plain))
    assert gain is not None and gain.interval is not None and gain.is_ahead
    assert (gain.ratio, *gain.interval) == pytest.approx((2.0, 2.0, 2.0))


def test_an_interval_on_both_sides_of_one_is_neither_ahead_nor_behind() -> None:
    gain = Gain.of(turns([1.0, 2.0, 1.0, 2.0, 1.0, 2.0]), turns([2.0, 1.0, 2.0, 1.0, 2.0, 1.0]))
    assert gain is not None and gain.interval is not None
    assert gain.interval[0] < gain.ratio == 1.0 < gain.interval[1] and not gain.is_ahead and not gain.is_behind


def test_few_batches_have_no_interval_and_no_outputs_no_ratio() -> None:
    few = Gain.of(turns([1.0] * 4), turns([2.0] * 4))
    assert few == Gain(2.0, None) and not few.is_ahead
    assert Gain.of(turns([1.0]), [RequestBatch((REFUSED,))]) is None
