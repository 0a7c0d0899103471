"""What of a beam search is refused before it is started. What does not go together with it: tests/e2e/test_beams."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.admission.requests import Demand, FieldNames, check_demand
from gateway.api.grpc_api import demand_of
from gateway.generation import GenerationRequest, ServedFacts, SpeculationOptions
from gateway.workers.draft_limits import speculation_of
from outrider.v1 import common_pb2 as pb
from outrider.v1 import gateway_pb2
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import BeamParams, SamplingParams
from outrider.wire.settings.config import GatewayConfig
from tests.unit.gateway.scripted_pool import INFO, connection_of, link_of, served_model


def demand(beams: BeamParams, **options: Any) -> Demand:
    return Demand(
        request_id="r",
        model="m",
        prompts=("a",),
        names=FieldNames(prompt="prompt"),
        params=SamplingParams(temperature=0.0, beams=beams),
        max_tokens=4,
        seed=1,
        num_choices=beams.width,
        **options,
    )


def info(beams: bool) -> pb.WorkerInfo:
    found = pb.WorkerInfo.FromString(INFO.SerializeToString())
    found.beams = beams
    return found


def test_no_round_of_a_search_is_explained() -> None:
    asked = demand(BeamParams(4), speculation=SpeculationOptions(explain=True))
    with pytest.raises(InvalidRequest, match="do not go together") as caught:
        check_demand(asked, [ServedFacts("m", 512, 320, 0, 320, None)])
    assert caught.value.param == "speculation.explain"


@pytest.mark.parametrize("beams", [True, False])
def test_a_target_that_takes_no_beams_is_told(beams: bool) -> None:
    """It is one of two: a search may be given either."""
    connections = {"s": connection_of(), "t": connection_of()}
    connections["s"].info, connections["t"].info = info(True), info(beams)
    why = served_model({name: link_of(each) for name, each in connections.items()}, {}).facts().no_beams
    assert (why is None) is beams
    facts = ServedFacts("m", 512, 320, 0, 320, None, no_beams=why)
    if beams:
        assert check_demand(demand(BeamParams(4)), [facts]) is facts
        return
    with pytest.raises(InvalidRequest, match="runs no token trees on the path") as caught:
        check_demand(demand(BeamParams(4)), [facts])
    assert caught.value.param == "use_beam_search"


def test_more_beams_than_half_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="from 2 to 10"):
        check_demand(demand(BeamParams(11)), [ServedFacts("m", 512, 20, 0, 320, None)])


def test_over_grpc_the_width_is_the_number_of_choices() -> None:
    params = pb.SamplingParams(beams=pb.BeamSearch(length_penalty=0.5))
    request = gateway_pb2.GenerateRequest(prompt="a", params=params, num_choices=3)
    assert demand_of(request, "r", 1000).params.beams == BeamParams(3, 0.5)
    request.params.beams.width = 3
    with pytest.raises(InvalidRequest, match="num_choices") as caught:
        demand_of(request, "r", 1000)
    assert caught.value.param == "params.beams"


def test_a_gateways_tree_is_not_for_beams() -> None:
    config = GatewayConfig(target="t:1", draft="d:1", tree="4x2x1")
    params = SamplingParams(temperature=0.0, beams=BeamParams(4))
    request = GenerationRequest("r", "m", (1, 2), params, speculation=SpeculationOptions(drafter=Drafter.MODEL))
    found = speculation_of(request, config, (info(True),), 2)
    assert found is not None and found.tree is None and found.max_draft_tokens == config.max_draft_tokens
