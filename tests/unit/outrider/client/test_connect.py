"""How the SDK and the commands reach a gateway: TLS, keys, and what is said when it does not work."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from outrider.client import AsyncClient
from outrider.client.address import read_address
from outrider.client.connect import metadata_of
from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.wire import errors
from outrider.wire.transport.serving import start_server
from outrider.wire.transport.tls import CertificateFolder
from tests.certificates import authority, public_folder


class Gateway(gateway_pb2_grpc.GenerationServiceServicer):
    """Remembers what callers said of themselves."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []

    async def GetModels(self, request: Any, context: Any) -> gateway_pb2.GetModelsResponse:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        return gateway_pb2.GetModelsResponse(models=[gateway_pb2.Model(id="pair")])

    async def Generate(self, request: Any, context: Any) -> None:
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        await context.write(
            gateway_pb2.GenerateResponse(text_delta="hello", finish_reason=1, usage=gateway_pb2.Usage())
        )


@asynccontextmanager
async def serving(gateway: Gateway, folder: Path | None) -> AsyncIterator[str]:
    def add(server: Any) -> list[str]:
        gateway_pb2_grpc.add_GenerationServiceServicer_to_server(gateway, server)
        return ["outrider.v1.GenerationService"]

    certificates = None if folder is None else CertificateFolder(str(folder), "public_tls_dir", None)
    server, address, _ = await start_server(add, "127.0.0.1", 0, 1 << 20, certificates)
    try:
        yield f"localhost:{address.rpartition(':')[2]}"
    finally:
        await server.stop(None)


async def models(address: str, **connect: Any) -> list[str]:
    async with AsyncClient(address, retries=0, timeout_s=20, **connect) as client:
        return [model.id for model in await client.models()]


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def ca_file(folder: Path, ca: Any) -> Path:
    path = folder / "users-ca.pem"
    path.write_bytes(ca.certificate.public_bytes(Encoding.PEM))
    return path


async def test_a_gateway_of_ones_own_ca(gateway: Gateway, tmp_path: Path) -> None:
    ca = authority()
    trusted, root = ca_file(tmp_path, ca), ca.certificate.public_bytes(Encoding.PEM)
    async with serving(gateway, public_folder(tmp_path / "public", ca, "localhost")) as address:
        assert await models(address, tls_ca=trusted) == ["pair"]
        assert await models(address, tls=grpc.ssl_channel_credentials(root)) == ["pair"]
        async with AsyncClient(address, tls_ca=str(trusted), api_key="or-secret") as client:
            assert (await client.generate("x")).text == "hello"
        assert gateway.keys == [None, None, "Bearer or-secret"]
        with pytest.raises(errors.Unavailable, match="its certificate is not trusted: give its CA"):
            await models(address, tls=True)
        with pytest.raises(errors.Unavailable, match=r"it hung up: does it speak TLS \(tls, or tls_ca with its CA\)\?"):
            await models(address)
        named = address.replace("localhost", "127.0.0.1")
        with pytest.raises(errors.Unavailable, match="a name that the certificate is for"):
            await models(named, tls_ca=trusted)


def test_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    assert metadata_of({}) == ()
    monkeypatch.setenv("OUTRIDER_API_KEY", "or-of-environment")
    assert metadata_of({}) == metadata_of({"api_key": None}) == (("authorization", "Bearer or-of-environment"),)
    assert metadata_of({"api_key": "or-given"}) == (("authorization", "Bearer or-given"),)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("127.0.0.1", "127.0.0.1:8001"),
        ("localhost:9", "localhost:9"),
        ("::1", "[::1]:8001"),
        ("[::1]", "[::1]:8001"),
        ("http://h", "h:80"),
        ("https://h/v1", "h:443"),
        ("http://h:8000/v1", "h:8000"),
        ("dns:///h:8001", "dns:///h:8001"),
        ("unix:/run/s", "unix:/run/s"),
    ],
)
def test_an_address_may_leave_out_its_port_or_be_a_url(text: str, target: str) -> None:
    assert read_address(text).target == target
