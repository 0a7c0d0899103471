"""A beam search over gRPC."""

import pytest

from gateway.api.grpc_api import parse_request
from outrider.v1 import common_pb2 as pb
from outrider.v1 import gateway_pb2
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.params import BeamParams


def test_over_grpc_the_width_is_the_number_of_choices() -> None:
    params = pb.SamplingParams(beams=pb.BeamSearch(length_penalty=0.5))
    request = gateway_pb2.GenerateRequest(prompt="a", params=params, num_choices=3)
    assert parse_request(request, "r", 1000).params.beams == BeamParams(3, 0.5)
    request.params.beams.width = 3
    with pytest.raises(InvalidRequest, match="num_choices") as caught:
        parse_request(request, "r", 1000)
    assert caught.value.param == "params.beams"
