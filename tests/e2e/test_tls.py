"""The whole system with certificates on every connection, used by HTTPS and by the SDK."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import grpc
import httpx
import pytest

from deploy.registry import Registry
from outrider.client import Client, Unavailable
from outrider.v1 import common_pb2 as pb
from outrider.v1 import registry_pb2 as rpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.transport.roles import Role
from outrider.wire.transport.tls import CertificateFolder, channel_credentials
from tests.certificates import all_folders
from tests.forked import run
from tests.stack import Process, Stack, running

PROMPT = "def fibonacci(n):"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return all_folders(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(folders: Path) -> Iterator[Stack]:
    with running(
        target_args=("--tls-dir", str(folders / "target")),
        draft_args=("--tls-dir", str(folders / "draft")),
        gateway_args=("--tls-dir", str(folders / "gateway"), "--public-tls-dir", str(folders / "public")),
    ) as started:
        yield started


def complete(stack: Stack, folders: Path) -> dict[str, object]:
    context = ssl.create_default_context(cafile=str(folders / "ca.pem"))
    with httpx.Client(verify=context, timeout=60) as client:
        body = {"model": "", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        url = stack.http.replace("http://", "https://")
        body["model"] = client.get(f"{url}/v1/models").json()["data"][0]["id"]
        answer = client.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, object] = answer.json()
        return found


def target_info(stack: Stack, folder: Path | None) -> pb.WorkerInfo:
    with channel_to_target(stack, folder, Role.GATEWAY) as channel:
        return target_pb2_grpc.TargetServiceStub(channel).GetInfo(pb.GetInfoRequest(), timeout=10)


def channel_to_target(stack: Stack, folder: Path | None, role: Role) -> grpc.Channel:
    if folder is None:
        return grpc.insecure_channel(stack.target.address)
    credentials = channel_credentials(CertificateFolder(str(folder), "tls_dir", role).current)
    name = [("grpc.ssl_target_name_override", Role.TARGET.host_name)]
    return grpc.secure_channel(stack.target.address, credentials, options=name)


def test_answers_are_those_of_a_system_without(secure: Stack, folders: Path, stack: Stack) -> None:
    """By both front doors; and drafts are verified, so the draft reaches the target."""
    found = complete(secure, folders)
    with Client(stack.grpc) as client:
        expected = client.generate(PROMPT, max_tokens=24, temperature=0.0).text
    assert found["choices"][0]["text"] == expected  # type: ignore[index]
    with Client(secure.grpc, tls_ca=folders / "ca.pem") as client:
        completion = client.generate(PROMPT, max_tokens=24, temperature=0.0)
        assert completion.text == expected
        assert completion.usage.num_accepted_tokens > 0
        sampled = client.generate(PROMPT, max_tokens=24, temperature=1.0, seed=3)
        assert sampled.usage.num_draft_tokens > 0


def test_nobody_comes_in_without(secure: Stack, folders: Path) -> None:
    assert target_info(secure, folders / "gateway").num_slots_in_use == 0
    with pytest.raises(grpc.RpcError) as refused:
        target_info(secure, None)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with (
        channel_to_target(secure, folders / "target", Role.TARGET) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        target_pb2_grpc.TargetServiceStub(channel).GetTokenizer(pb.GetTokenizerRequest(), timeout=10)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with Client(secure.grpc, retries=0) as client, pytest.raises(Unavailable, match="does it speak TLS"):
        client.models()
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{secure.http}/v1/models")


def membership_of(stack: Stack) -> rpb.Membership:
    assert stack.draft is not None
    serving = {"state": rpb.MEMBER_STATE_SERVING}
    return rpb.Membership(
        epoch=1,
        version=1,
        pools=[
            rpb.Pool(name="targets", role=rpb.ROLE_TARGET, model_name="by-registry"),
            rpb.Pool(name="drafts", role=rpb.ROLE_DRAFT, serves=["targets"]),
        ],
        members=[
            rpb.Member(name="t", pool="targets", role=rpb.ROLE_TARGET, address=stack.target.address, **serving),
            rpb.Member(name="d", pool="drafts", role=rpb.ROLE_DRAFT, address=stack.draft.address, **serving),
        ],
    )


def test_a_gateway_joins_a_registry_with_certificates(secure: Stack, folders: Path) -> None:
    registry = Registry(lambda pool, count: Future())
    certificates = CertificateFolder(str(folders / "launcher"), "ray.tls_dir", Role.LAUNCHER)
    address = registry.start("127.0.0.1:0", certificates)
    try:
        registry.publish(membership_of(secure))
        ports = ["--port", "0", "--grpc-port", "0"]
        gateway = Process("gateway", ["--registry", address, "--tls-dir", str(folders / "gateway"), *ports])
        try:
            with Client(str(gateway.ready["grpc"])) as client:
                completion = client.generate(PROMPT, max_tokens=24, temperature=0.0, model="by-registry")
            assert completion.usage.num_accepted_tokens > 0
        finally:
            gateway.stop()
    finally:
        registry.stop()


def test_a_folder_that_cannot_be_used_ends_the_start(folders: Path, tmp_path: Path) -> None:
    """Before the model is loaded, in one line."""
    ended = run("draft_service", "--model", "absent", "--tls-dir", str(folders / "target"))
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines()[-1].startswith(f"draft: tls_dir: {folders / 'target' / 'cert.pem'} is not")
