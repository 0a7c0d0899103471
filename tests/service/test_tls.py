"""Connections with certificates over real servers: who gets in, who may do what, what happens when they are replaced.

Behind the servers are servicers that only say that they were reached.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from gateway.api.http_server import BACKLOG, HttpServer, bind
from outrider.cli.secrets.authority import Authority
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.transport.roles import Role
from outrider.wire.transport.streams import MAX_BATCH_ITEMS, MAX_UNREAD, ControlStreams
from outrider.wire.transport.tls import CertificateFolder, Dialer, channel_credentials, http_context
from tests.certificates import authority, part_folder, public_folder
from tests.service.front_door import grpc_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_MESSAGE_BYTES = 1 << 20
TIMEOUT_S = 20.0


REPLY = pb.WorkerError(message="reached" * 30)


class Reached(target_pb2_grpc.TargetServiceServicer):
    """A target that answers every item with the item's own id."""

    num_asked = 0

    def __init__(self) -> None:
        self.streams = ControlStreams()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.WorkerInfo:
        return pb.WorkerInfo(model_id="reached")

    async def Control(self, requests: AsyncIterator[tpb.TargetRequestBatch], context: Any) -> None:
        await self.streams.serve(
            requests,
            context,
            make_batch=lambda items: tpb.TargetReplyBatch(items=items),
            dispatch=self._answer,
            on_end=lambda owner: None,
        )

    def _answer(self, owner: int, item: tpb.TargetRequest, put: Callable[[Any], None]) -> None:
        Reached.num_asked += 1
        put(tpb.TargetReply(id=item.id, error=REPLY))

    async def Deliver(self, batches: AsyncIterator[tpb.DeliveryBatch], context: Any) -> AsyncIterator[tpb.FeatureBatch]:
        num = sum([len(batch.items) async for batch in batches])
        yield tpb.FeatureBatch(summary=tpb.DeliverSummary(num_deliveries=num))


@asynccontextmanager
async def serving(folder: Path | None, role: Role | None = Role.TARGET) -> AsyncIterator[str]:
    """Address of a server that offers what a target offers."""

    def add(server: Any) -> list[str]:
        target_pb2_grpc.add_TargetServiceServicer_to_server(Reached(), server)
        return ["outrider.v1.TargetService"]

    certificates = None if folder is None else CertificateFolder(str(folder), "tls_dir", role)
    async with grpc_server(add, MAX_MESSAGE_BYTES, certificates) as address:
        yield address


@asynccontextmanager
async def dialled(address: str, folder: Path | None, role: Role, wants: Role = Role.TARGET) -> AsyncIterator[Any]:
    """A target's stub, as the part of this role makes it."""
    certificates = None if folder is None else CertificateFolder(str(folder), "tls_dir", role)
    dialer = Dialer(address, wants, MAX_MESSAGE_BYTES, certificates)
    try:
        yield target_pb2_grpc.TargetServiceStub(dialer.channel())
    finally:
        await dialer.close()


async def info(stub: Any) -> str:
    return str((await stub.GetInfo(pb.GetInfoRequest(), timeout=TIMEOUT_S)).model_id)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value


@pytest.fixture
def ca() -> Authority:
    return authority()


@pytest.fixture
def target_folder(tmp_path: Path, ca: Authority) -> Path:
    return part_folder(tmp_path / "target", ca, Role.TARGET)


# who gets in


def _nothing(folder: Path, ca: Authority) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())


def _of_another_ca(folder: Path, ca: Authority) -> grpc.ChannelCredentials:
    path = part_folder(folder.parent / "other", authority(), Role.GATEWAY)
    pair = [(path / name).read_bytes() for name in ("key.pem", "cert.pem")]
    return grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), *pair)


def _expired(folder: Path, ca: Authority) -> grpc.ChannelCredentials:
    path = part_folder(folder.parent / "old", ca, Role.GATEWAY, expired=True)
    pair = [(path / name).read_bytes() for name in ("key.pem", "cert.pem")]
    return grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), *pair)


@pytest.mark.parametrize("credentials", [_nothing, _of_another_ca, _expired, None])
async def test_others_are_not_let_in(
    target_folder: Path, tmp_path: Path, ca: Authority, credentials: Callable[..., Any] | None
) -> None:
    """At once, with a status; and the server goes on for those who may."""
    name = [("grpc.ssl_target_name_override", Role.TARGET.host_name)]
    async with serving(target_folder) as address:
        if credentials is None:
            channel = grpc.aio.insecure_channel(address)
        else:
            channel = grpc.aio.secure_channel(address, credentials(target_folder, ca), options=name)
        async with channel:
            error = await refusal(info(target_pb2_grpc.TargetServiceStub(channel)))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        gateway = part_folder(tmp_path / "gateway", ca, Role.GATEWAY)
        async with dialled(address, gateway, Role.GATEWAY) as stub:
            assert await info(stub) == "reached"


async def test_a_caller_does_not_trust_a_server_of_another_ca(target_folder: Path, tmp_path: Path) -> None:
    gateway = part_folder(tmp_path / "gateway", authority(), Role.GATEWAY)
    async with serving(target_folder) as address, dialled(address, gateway, Role.GATEWAY) as stub:
        error = await refusal(info(stub))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "CERTIFICATE_VERIFY_FAILED" in str(error.details())


async def test_a_caller_does_not_take_a_draft_for_a_target(tmp_path: Path, ca: Authority) -> None:
    """Whoever holds a draft's key cannot pass for a target, at whatever address it listens."""
    draft = part_folder(tmp_path / "draft", ca, Role.DRAFT)
    gateway = part_folder(tmp_path / "gateway", ca, Role.GATEWAY)
    async with serving(draft, Role.DRAFT) as address:
        async with dialled(address, gateway, Role.GATEWAY) as stub:
            error = await refusal(info(stub))
        async with dialled(address, gateway, Role.GATEWAY, wants=Role.DRAFT) as stub:
            assert await info(stub) == "reached"
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "Hostname Verification Check failed" in str(error.details())


async def test_a_caller_with_certificates_does_not_speak_without(tmp_path: Path, ca: Authority) -> None:
    gateway = part_folder(tmp_path / "gateway", ca, Role.GATEWAY)
    async with serving(None) as address, dialled(address, gateway, Role.GATEWAY) as stub:
        assert (await refusal(info(stub))).code() is grpc.StatusCode.UNAVAILABLE


# who may do what


async def _control(stub: Any) -> int:
    call = stub.Control(timeout=TIMEOUT_S)
    await call.write(tpb.TargetRequestBatch(items=[tpb.TargetRequest(id=7)]))
    reply = await call.read()
    call.cancel()
    return int(reply.items[0].id)


async def _deliver(stub: Any) -> int:
    call = stub.Deliver(timeout=TIMEOUT_S)
    await call.write(tpb.DeliveryBatch(items=[tpb.Delivery()]))
    await call.done_writing()
    return int((await call.read()).summary.num_deliveries)


@pytest.mark.parametrize(
    ("role", "may"),
    [
        (Role.GATEWAY, {"GetInfo", "Control"}),
        (Role.DRAFT, {"Deliver", "GetInfo"}),
        (Role.TARGET, {"GetInfo"}),
        (Role.LAUNCHER, {"GetInfo"}),
    ],
)
async def test_a_role_may_do_what_is_its_own(
    target_folder: Path, tmp_path: Path, ca: Authority, role: Role, may: set[str]
) -> None:
    folder = part_folder(tmp_path / "caller", ca, role)
    calls: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "GetInfo": (info, "reached"),
        "Control": (_control, 7),
        "Deliver": (_deliver, 1),
    }
    async with serving(target_folder) as address, dialled(address, folder, role) as stub:
        for method, (call, answer) in calls.items():
            if method in may:
                assert await call(stub) == answer
                continue
            # Nothing is written: gRPC calls a write that comes after the refusal an internal error.
            asked = () if method in {"Control", "Deliver"} else (pb.GetInfoRequest(),)
            refused = getattr(stub, method)(*asked, timeout=TIMEOUT_S)
            assert await refused.code() is grpc.StatusCode.PERMISSION_DENIED
            words = f"the caller's certificate is {role.value}; /outrider.v1.TargetService/{method} is for "
            assert str(await refused.details()).startswith(words)


# replaced while they are used


async def test_a_stream_outlives_its_certificates_and_the_next_has_the_new_ones(
    target_folder: Path, tmp_path: Path, ca: Authority
) -> None:
    gateway = part_folder(tmp_path / "gateway", ca, Role.GATEWAY)
    certificates = CertificateFolder(str(gateway), "tls_dir", Role.GATEWAY)
    async with serving(target_folder) as address:
        dialer = Dialer(address, Role.TARGET, MAX_MESSAGE_BYTES, certificates)
        old = channel_credentials(certificates.current)
        stream = target_pb2_grpc.TargetServiceStub(dialer.channel()).Control(timeout=TIMEOUT_S)

        async def echo(item_id: int) -> int:
            await stream.write(tpb.TargetRequestBatch(items=[tpb.TargetRequest(id=item_id)]))
            return int((await stream.read()).items[0].id)

        assert await echo(1) == 1
        other = authority()
        part_folder(target_folder, other, Role.TARGET)
        part_folder(gateway, other, Role.GATEWAY)
        assert await echo(2) == 2
        name = [("grpc.ssl_target_name_override", Role.TARGET.host_name)]
        async with grpc.aio.secure_channel(address, old, options=name) as late:
            error = await refusal(info(target_pb2_grpc.TargetServiceStub(late)))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert await echo(3) == 3
        stream.cancel()
        assert await info(target_pb2_grpc.TargetServiceStub(dialer.channel())) == "reached"
        await dialer.close()


async def test_a_channel_is_kept_while_nothing_changes(tmp_path: Path, ca: Authority) -> None:
    gateway = part_folder(tmp_path / "gateway", ca, Role.GATEWAY)
    dialer = Dialer("127.0.0.1:1", Role.TARGET, 1, CertificateFolder(str(gateway), "tls_dir", Role.GATEWAY))
    first = dialer.channel()
    assert dialer.channel() is first
    part_folder(gateway, ca, Role.GATEWAY)
    assert dialer.channel() is not first
    await dialer.close()


# users: HTTP and gRPC


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"reached"})


@asynccontextmanager
async def https(folder: CertificateFolder) -> AsyncIterator[int]:
    """Port of a web server."""
    (listener,) = bind("127.0.0.1", 0)
    listener.listen(BACKLOG)
    server = HttpServer(_app, 75.0, http_context(folder))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.stop()
        await running


async def get(
    port: int, ca: Authority, host: str = "localhost", *, version: int = 0, folder: Path | None = None
) -> str:
    context = ssl.create_default_context(cadata=ca.certificate.public_bytes(Encoding.PEM).decode())
    if version:
        context.maximum_version = ssl.TLSVersion(version)
    if folder is not None:
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    async with httpx.AsyncClient(verify=context) as client:
        return (await client.get(f"https://{host}:{port}/")).text


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_users_come_by_https(tmp_path: Path, ca: Authority, version: int) -> None:
    folder = CertificateFolder(str(public_folder(tmp_path, ca, "localhost", "127.0.0.1")), "public_tls_dir", None)
    async with https(folder) as port:
        assert await get(port, ca, version=version) == "reached"
        assert await get(port, ca, "127.0.0.1", version=version) == "reached"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await get(port, authority(), version=version)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_users_show_certificates_where_they_are_asked(tmp_path: Path, ca: Authority, version: int) -> None:
    users = authority()
    path = public_folder(tmp_path / "public", ca, "localhost", users=users)
    user, stranger = (public_folder(tmp_path / name, by, "me") for name, by in (("user", users), ("stranger", ca)))
    async with https(CertificateFolder(str(path), "public_tls_dir", None)) as port:
        assert await get(port, ca, version=version, folder=user) == "reached"
        for folder in (None, stranger):
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await get(port, ca, version=version, folder=folder)
        assert await get(port, ca, version=version, folder=user) == "reached"


async def test_who_comes_by_https_and_says_nothing_is_left(
    tmp_path: Path, ca: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.api.http_server.HEAD_TIMEOUT_S", 1.0)
    folder = CertificateFolder(str(public_folder(tmp_path, ca, "localhost")), "public_tls_dir", None)
    async with https(folder) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 5.0) == b""
        writer.close()
        assert await get(port, ca) == "reached"


# limits


async def test_headers_without_end_are_refused() -> None:
    async with serving(None) as address, dialled(address, None, Role.GATEWAY) as stub:
        call = stub.GetInfo(pb.GetInfoRequest(), timeout=TIMEOUT_S, metadata=[("x", "y" * 100_000)])
        assert (await refusal(call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await info(stub) == "reached"


async def test_a_message_of_too_many_items_is_refused() -> None:
    async with serving(None) as address, dialled(address, None, Role.GATEWAY) as stub:
        call = stub.Control(timeout=TIMEOUT_S)
        await call.write(tpb.TargetRequestBatch(items=[tpb.TargetRequest(id=1)] * (MAX_BATCH_ITEMS + 1)))
        error = await refusal(call.read())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == f"a message of {MAX_BATCH_ITEMS + 1} items, at most {MAX_BATCH_ITEMS} are allowed"


async def test_who_asks_on_without_reading_is_not_heard_until_it_reads() -> None:
    """Answers that nobody reads would else pile up here."""
    num_batches, before = 100, Reached.num_asked
    async with serving(None) as address, dialled(address, None, Role.GATEWAY) as stub:
        call = stub.Control(timeout=2 * TIMEOUT_S)
        batch = tpb.TargetRequestBatch(items=[tpb.TargetRequest(id=1)] * MAX_BATCH_ITEMS)

        async def write() -> None:
            for _ in range(num_batches):
                await call.write(batch)

        writing = asyncio.create_task(write())
        heard = -1
        while heard != Reached.num_asked - before:  # until it takes no more
            heard = Reached.num_asked - before
            await asyncio.sleep(0.5)
        assert MAX_UNREAD < heard < num_batches * MAX_BATCH_ITEMS // 2
        num_read = 0
        while num_read < num_batches * MAX_BATCH_ITEMS:
            num_read += len((await call.read()).items)
        await writing
        call.cancel()


async def test_calls_over_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.wire.transport.serving.MAX_CONCURRENT_CALLS", 2)
    async with serving(None) as address, dialled(address, None, Role.GATEWAY) as stub:
        streams = [stub.Control(timeout=TIMEOUT_S) for _ in range(2)]
        for stream in streams:
            await stream.write(tpb.TargetRequestBatch(items=[tpb.TargetRequest(id=1)]))
            await stream.read()
        error = await refusal(info(stub))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        streams[0].cancel()
        for _ in range(100):
            try:
                assert await info(stub) == "reached"
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.02)
        else:
            raise AssertionError("a place that is free again is not given")
        streams[1].cancel()


async def test_connections_over_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.wire.transport.rpc.MAX_CONNECTIONS", 2)
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with serving(None) as address:
        channels = [grpc.aio.insecure_channel(address, options=own) for _ in range(3)]
        stubs = [target_pb2_grpc.TargetServiceStub(channel) for channel in channels]
        for stub in stubs[:2]:
            assert await info(stub) == "reached"
        assert (await refusal(info(stubs[2]))).code() is grpc.StatusCode.UNAVAILABLE
        assert await info(stubs[0]) == "reached"
        for channel in channels:
            await channel.close()  # type: ignore[call-arg]


async def test_who_connects_and_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.wire.transport.rpc.HANDSHAKE_TIMEOUT_MS", 200)
    async with serving(None) as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        await asyncio.wait_for(reader.read(), TIMEOUT_S)  # until it is closed
        writer.close()
