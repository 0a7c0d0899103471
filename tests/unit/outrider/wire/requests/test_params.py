"""Parameters of a beam search, as they are sent and refused."""

from typing import Any

import pytest

from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import EarlyStopping
from outrider.wire.requests.params import BeamParams, SamplingParams


@pytest.mark.parametrize(
    ("beams", "rest", "param"),
    [
        (BeamParams(1), {}, "n"),
        (BeamParams(129), {}, "n"),
        (BeamParams(4, float("nan")), {}, "length_penalty"),
        (BeamParams(4, 6.0), {}, "length_penalty"),
        (BeamParams(4), {"temperature": 0.5}, "temperature"),
        (BeamParams(4), {"presence_penalty": 0.5}, "presence_penalty"),
        (BeamParams(4), {"num_logprobs": 0}, "num_logprobs"),
        (BeamParams(4), {"bad_words": ((3,),)}, "bad_words"),
        (BeamParams(4), {"max_tokens": 8193}, "max_tokens"),
    ],
)
def test_parameters_that_are_refused_are_named(beams: BeamParams, rest: dict[str, Any], param: str) -> None:
    params = SamplingParams(**{"temperature": 0.0, "beams": beams, **rest})
    with pytest.raises(InvalidRequest) as caught:
        params.check(320)
    assert caught.value.param == param


def test_parameters_travel() -> None:
    for beams in (BeamParams(2), BeamParams(8, -0.5, EarlyStopping.NEVER), BeamParams(3, 0.0, EarlyStopping.TRUE)):
        params = SamplingParams(temperature=0.0, beams=beams)
        assert SamplingParams.from_proto(params.to_proto()) == params
