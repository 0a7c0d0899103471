"""What a job allows, and the error of a field that is out of range."""

import pytest

from outrider.engine.worker.jobs import JobError, JobFault, OpenJob, check_range
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams


@pytest.mark.parametrize(
    ("drafter", "prediction", "expected"),
    [
        (None, (), ()),
        (Drafter.LOOKUP, (), (Drafter.LOOKUP,)),
        (Drafter.AUTO, (), (Drafter.HEADS, Drafter.NGRAM)),
        (None, (5,), (Drafter.PREDICTION,)),
        (Drafter.AUTO, (5,), (Drafter.PREDICTION, Drafter.HEADS, Drafter.NGRAM)),
    ],
)
def test_a_prediction_is_tried_first_and_auto_is_heads_and_then_ngram(
    drafter: Drafter | None, prediction: tuple[int, ...], expected: tuple[Drafter, ...]
) -> None:
    job = OpenJob(1, 1, (1,), 1, SamplingParams(), print, drafter=drafter, prediction_ids=prediction)
    assert job.own_drafters == expected


def test_a_value_out_of_range_is_named_with_its_bounds() -> None:
    assert check_range("slot", 0, 0, 3) is None and check_range("slot", 3, 0, 3) is None
    for value in (-1, 4):
        assert check_range("slot", value, 0, 3) == JobError(JobFault.INVALID, f"slot is {value}, must be from 0 to 3")
