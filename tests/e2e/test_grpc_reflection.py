"""What grpcurl asks first, knowing nothing of our generated code: the services, what these are made of, and health."""

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
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


@pytest.mark.parametrize("name", SERVICES)
def test_every_server_describes_its_service_and_is_healthy(stack: Stack, name: str) -> None:
    with grpc.insecure_channel(address_of(stack, name)) as channel:
        described = ProtoReflectionDescriptorDatabase(channel)
        assert set(described.get_services()) == {SERVICES[name], *ALWAYS}
        assert DescriptorPool(described).FindServiceByName(SERVICES[name]).methods
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICES[name]):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
