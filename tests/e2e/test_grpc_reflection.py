"""What grpcurl does: find services, resolve descriptors and call, knowing nothing of our generated code."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.stack import Stack

ALWAYS = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
SERVICES = {
    "gateway": "outrider.v1.GenerationService",
    "draft": "outrider.v1.DraftService",
    "target": "outrider.v1.TargetService",
}


def address_of(stack: Stack, name: str) -> str:
    assert stack.draft is not None
    return {"gateway": stack.grpc, "draft": stack.draft.address, "target": stack.target.address}[name]


class Reflected:
    """A client made of what the server says of itself. Its descriptor pool starts empty."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(self._database)

    def services(self) -> set[str]:
        return set(self._database.get_services())

    def call(self, service: str, method: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """JSON in, JSON out, as on grpcurl's command line."""
        described = self._pool.FindServiceByName(service).FindMethodByName(method)
        message = json_format.ParseDict(request, GetMessageClass(described.input_type)())
        assert not described.client_streaming
        make = self._channel.unary_stream if described.server_streaming else self._channel.unary_unary
        call = make(
            f"/{service}/{method}",
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=GetMessageClass(described.output_type).FromString,
        )
        replies = call(message, timeout=60)
        for reply in replies if described.server_streaming else [replies]:
            yield json_format.MessageToDict(reply, preserving_proto_field_name=True)


@pytest.fixture(params=list(SERVICES))
def reflected(stack: Stack, request: pytest.FixtureRequest) -> Iterator[tuple[str, grpc.Channel, Reflected]]:
    with grpc.insecure_channel(address_of(stack, request.param)) as channel:
        yield request.param, channel, Reflected(channel)


def test_every_server_lists_its_services_and_is_healthy(reflected: tuple[str, grpc.Channel, Reflected]) -> None:
    name, channel, client = reflected
    assert client.services() == {SERVICES[name], *ALWAYS}
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICES[name]):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_an_answer_from_descriptors_alone(stack: Stack) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        client = Reflected(channel)
        (models,) = client.call("outrider.v1.GenerationService", "GetModels", {})
        assert models["models"][0]["id"] == stack.model
        request = {"prompt": "def add(a, b):\n", "params": {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}}
        rounds = list(client.call("outrider.v1.GenerationService", "Generate", request))
    tokens = [token for each in rounds for token in each.get("tokens", [])]
    assert len(tokens) == 24
    assert {token["kind"] for token in tokens} <= {
        f"TOKEN_KIND_{k}" for k in ("ACCEPTED", "RECOVERED", "BONUS", "PLAIN")
    }
    assert rounds[-1]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert rounds[-1]["usage"]["num_completion_tokens"] == 24
    assert "".join(each.get("text_delta", "") for each in rounds)
