"""The health check of the containers, against real servers: what it believes and what it says."""

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import grpc.aio
import pytest

from deploy.docker import container_health
from outrider.cli.secrets.authority import write_certificates
from outrider.v1 import common_pb2, draft_pb2_grpc
from outrider.wire.transport.roles import Role
from outrider.wire.transport.serving import ServerThread
from outrider.wire.transport.tls import CertificateFolder


@contextmanager
def answering(status: int, context: ssl.SSLContext | None = None) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()
            self.wfile.write(b"no target")

        def log_message(self, *_: object) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_gateway_is_healthy_when_it_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200) as address:
        assert container_health.main(["http", address]) == 0
    with answering(503) as address:
        assert container_health.main(["http", address]) == 1
    assert "503: no target" in capsys.readouterr().err


def test_a_worker_is_healthy_until_it_drains(capsys: pytest.CaptureFixture[str]) -> None:
    server = ServerThread()
    address = server.start(lambda _: [], "127.0.0.1", 0, 1 << 20)
    try:
        assert container_health.main(["grpc", address, "tcp", address]) == 0
        begun = threading.Event()
        server.stop_serving(begun.set)
        assert begun.wait(5)
        assert container_health.main(["tcp", address, "grpc", address]) == 1
        assert "NOT_SERVING" in capsys.readouterr().err
    finally:
        server.stop(0.1)


class Steps(draft_pb2_grpc.DraftServiceServicer):
    """A draft that says of its steps what it is told, in microseconds."""

    current_us, longest_us = 0, 1_000_000

    async def GetInfo(self, request: object, context: object) -> common_pb2.WorkerInfo:
        return common_pb2.WorkerInfo(current_step_us=self.current_us, longest_step_us=self.longest_us)


def test_a_workers_engine_lives_until_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over TLS, where it asks itself with its own certificate."""
    write_certificates(tmp_path, ["llm.example.com"], datetime.now(UTC))
    monkeypatch.setattr(container_health, "TLS_DIR", tmp_path / "draft")
    steps, server = Steps(), ServerThread()

    def add(grpc_server: grpc.aio.Server) -> list[str]:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(steps, grpc_server)
        return []

    address = server.start(
        add, "127.0.0.1", 0, 1 << 20, CertificateFolder(str(tmp_path / "draft"), "tls_dir", Role.DRAFT)
    )
    try:
        steps.current_us = 7_000_000
        assert container_health.main(["draft", address]) == 0
        steps.current_us = 9_000_000
        assert container_health.main(["draft", address]) == 1
        assert "its engine has been at one step for 9 s, the longest took 1 s" in capsys.readouterr().err
        assert container_health.main(["target", address]) == 1
        assert "UNIMPLEMENTED" in capsys.readouterr().err
    finally:
        server.stop(0.1)


def test_over_tls_it_shows_the_parts_own_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_certificates(tmp_path, ["llm.example.com"], datetime.now(UTC))
    server = ServerThread()
    folder = CertificateFolder(str(tmp_path / "draft"), "tls_dir", Role.DRAFT)
    address = server.start(lambda _: [], "127.0.0.1", 0, 1 << 20, folder)
    try:
        assert container_health.main(["grpc", address]) == 1, "without a certificate nobody is answered"
        monkeypatch.setattr(container_health, "TLS_DIR", tmp_path / "draft")
        assert container_health.main(["grpc", address]) == 0
    finally:
        server.stop(0.1)
