"""Room for calls: what one caller leaves open or unfinished takes neither the server's memory nor the others' room."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.v1 import gateway_pb2, gateway_pb2_grpc, target_pb2_grpc
from outrider.v1 import target_pb2 as tpb
from outrider.wire.settings.api_keys import ApiKey, digest_of, write_keys
from outrider.wire.transport.call_limits import MAX_DELIVERY_STREAMS, MAX_WATCHING_CALLS
from tests.partial_messages import unfinished_calls
from tests.service.front_door import admission_of, grpc_of
from tests.service.scripted_generator import ScriptedGenerator, demo_tokenizer
from tests.service.test_tls import info, refusal, serving

MIB = 1 << 20
CHECK = "/grpc.health.v1.Health/Check"
GENERATE = "/outrider.v1.GenerationService/Generate"
DELIVER = "/outrider.v1.TargetService/Deliver"
TIMEOUT_S = 20.0


@asynccontextmanager
async def front_door(**settings: Any) -> AsyncIterator[str]:
    admission = admission_of(ScriptedGenerator(demo_tokenizer(), "the fox"), **settings)
    async with grpc_of(admission, MIB) as (_, address):
        yield address


def check(channel: grpc.aio.Channel) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)


async def generate(channel: grpc.aio.Channel) -> str:
    stub: Any = gateway_pb2_grpc.GenerationServiceStub(channel)
    call = stub.Generate(gateway_pb2.GenerateRequest(prompt="Once"), timeout=TIMEOUT_S)
    return "".join([message.text_delta async for message in call])


@pytest.mark.parametrize("method", [CHECK, GENERATE])
async def test_messages_that_never_end_take_little_memory_and_nobodys_place(method: str) -> None:
    async with (
        front_door() as address,
        unfinished_calls(address, 40, method, MIB) as num_bytes,
        grpc.aio.insecure_channel(address) as channel,
    ):
        assert 4 * (MIB - 10) <= num_bytes < 8 * MIB, "four are read, of the others a window each is there"
        assert (await check(channel)).status == health_pb2.HealthCheckResponse.SERVING
        assert await generate(channel) == "the fox"


async def test_without_a_key_nothing_is_read(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.yaml")
    write_keys(file, (ApiKey(name="me", sha256=digest_of("or-me")),))
    async with front_door(api_keys=file) as address, unfinished_calls(address, 40, GENERATE, MIB) as num_bytes:
        assert num_bytes < 4 * MIB


async def test_a_message_that_does_not_come_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.wire.transport.call_limits.MESSAGE_TIMEOUT_S", 0.3)
    async with front_door() as address, grpc.aio.insecure_channel(address) as channel:
        error = await refusal(channel.stream_unary(CHECK)(_nothing(), timeout=TIMEOUT_S))  # type: ignore[call-arg]
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.details() == "the message did not arrive within 0.3 s; send it faster"
        error = await refusal(channel.stream_unary(CHECK)(iter(()), timeout=TIMEOUT_S))  # type: ignore[call-arg]
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def _nothing() -> AsyncIterator[bytes]:
    await asyncio.sleep(TIMEOUT_S)
    yield b""


async def test_who_watches_health_takes_no_room_from_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.wire.transport.serving.MAX_CONCURRENT_CALLS", 20)
    async with front_door() as address, grpc.aio.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        looking = reflection.ServerReflectionInfo()
        await looking.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await looking.read()
        for _ in range(20):
            error = await refusal(health.Watch(health_pb2.HealthCheckRequest()).read())
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            num = MAX_WATCHING_CALLS // 4
            assert str(error.details()).startswith(
                f"{num} calls watch health or ask for services, {num} of this client"
            )
        assert await generate(channel) == "the fox"
        for call in (*watches, looking):
            call.cancel()
        for _ in range(100):  # a place that is free again is given
            try:
                assert await health.Watch(health_pb2.HealthCheckRequest()).read()
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.02)
        else:
            raise AssertionError("no place is given back")


async def test_streams_of_proposals_take_no_room_from_gateways() -> None:
    async with (
        serving(None) as address,
        unfinished_calls(address, MAX_DELIVERY_STREAMS // 4 + 20, DELIVER, MIB) as num_bytes,
        grpc.aio.insecure_channel(address) as channel,
    ):
        share = MAX_DELIVERY_STREAMS // 4
        assert share * (MIB - 10) <= num_bytes < (share + 6) * MIB
        stub: Any = target_pb2_grpc.TargetServiceStub(channel)
        assert await info(stub) == "reached"
        call = stub.Deliver(timeout=TIMEOUT_S)
        await call.write(tpb.DeliveryBatch(items=[tpb.Delivery()]))
        await call.done_writing()
        assert (await call.read()).summary.num_deliveries == 1, "a draft on another machine has its place"
