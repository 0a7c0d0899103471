"""What answers and parameters are in a caller's hands."""

import pytest

from outrider.client import AsyncClient, StructuredOutputs
from outrider.v1 import gateway_pb2 as pb
from tests.unit.outrider.client.scripted_gateway import ScriptedGateway


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (
            StructuredOutputs(json={"type": "null"}, strict=True),
            pb.StructuredOutputs(json='{"type": "null"}', strict=True),
        ),
        (StructuredOutputs(json='{"é": 1}'), pb.StructuredOutputs(json='{"é": 1}')),
        (StructuredOutputs(json=False), pb.StructuredOutputs(json="false")),
        (StructuredOutputs(regex="a+"), pb.StructuredOutputs(regex="a+")),
        (StructuredOutputs(choice=("a", "b")), pb.StructuredOutputs(choice=pb.Choices(texts=["a", "b"]))),
        (StructuredOutputs(grammar="g"), pb.StructuredOutputs(grammar="g")),
        (StructuredOutputs(json_object=True), pb.StructuredOutputs(json_object=True)),
    ],
)
async def test_structured_outputs(
    gateway: ScriptedGateway, given: StructuredOutputs, sent: pb.StructuredOutputs
) -> None:
    async with AsyncClient(gateway.address) as client:
        await client.generate("hello", structured_outputs=given)
    assert gateway.requests[0].structured_outputs == sent
