"""What of drafts a gateway's settings leave to requests."""

from gateway.generation import GenerationRequest, SpeculationOptions
from gateway.workers.drafts.draft_limits import speculation_of
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import BeamParams, SamplingParams
from outrider.wire.settings.config import GatewayConfig
from tests.unit.gateway.admission.asked import info


def test_a_gateways_tree_is_not_for_beams() -> None:
    config = GatewayConfig(target="t:1", draft="d:1", tree="4x2x1")
    params = SamplingParams(temperature=0.0, beams=BeamParams(4))
    request = GenerationRequest("r", "m", (1, 2), params, speculation=SpeculationOptions(drafter=Drafter.MODEL))
    found = speculation_of(request, config, (info(True),), 2)
    assert found is not None and found.tree is None and found.max_draft_tokens == config.max_draft_tokens
