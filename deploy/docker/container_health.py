"""`python deploy/docker/container_health.py KIND HOST:PORT ...`: exit code 0 if its servers serve, else 1.

Kinds: http, the gateway's /readyz. grpc, the health service of a worker or of the launcher's registry. draft and
target, a worker whose engine does not hang: Kubernetes ends a worker that hangs, as a launcher would. tcp, any server.
The host `hostname` stands for this container's own address.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 4.0
"""Maximum seconds that a server may take to reply to a check. A server that takes longer is unhealthy."""
TLS_DIR = Path("/etc/outrider/secrets")
"""Folder at which the compose file and the Helm chart mount the certificate of the process in the container."""
COMMAND_LINE = Path("/proc/1/cmdline")
"""File with the command line of the container's first process. In a gateway's container that is the gateway, whose
flags a check reads here."""


def check_http(host: str, port: int) -> str | None:
    """Return the reason why the gateway's /readyz does not reply with 200; None if it does."""
    folder = _public_tls_dir()
    if folder:
        context = _own_context(Path(folder))
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, port, timeout=TIMEOUT_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    connection.request("GET", "/readyz")
    reply = connection.getresponse()
    if reply.status == 200:
        return None
    return f"{reply.status}: {reply.read(500).decode(errors='replace')}"


def _public_tls_dir() -> str | None:
    """Return the gateway's setting public_tls_dir, from its flag or its environment variable."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--public-tls-dir", default=os.environ.get("OUTRIDER_GATEWAY_PUBLIC_TLS_DIR"))
    flags = COMMAND_LINE.read_bytes().decode(errors="replace").split("\0")
    folder: str | None = parser.parse_known_args(flags)[0].public_tls_dir
    return folder


def _own_context(folder: Path) -> ssl.SSLContext:
    """Return a TLS context for a server with the certificate in `folder`. The names in the server's certificate are not
    checked.

    If clients need a certificate, the context shows the same one.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if (folder / "ca.pem").exists():
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


def check_grpc(host: str, port: int) -> str | None:
    """Return the reason why a server's gRPC health service does not report SERVING; None if it does."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    reply = _call(host, port, health_pb2_grpc.HealthStub, "Check", health_pb2.HealthCheckRequest())
    if isinstance(reply, str):
        return reply
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    state: str = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return state


def check_draft(host: str, port: int) -> str | None:
    """Return the reason why a draft worker does not reply, or why its engine counts as hanging: its step takes much
    longer than recent ones. None if the worker replies and does not hang.
    """
    from outrider.v1 import draft_pb2_grpc

    return _trouble_of_engine(host, port, draft_pb2_grpc.DraftServiceStub)


def check_target(host: str, port: int) -> str | None:
    """Return the reason why a target does not reply, or why its engine counts as hanging: its step takes much longer
    than recent ones. None if the target replies and does not hang.
    """
    from outrider.v1 import target_pb2_grpc

    return _trouble_of_engine(host, port, target_pb2_grpc.TargetServiceStub)


def _trouble_of_engine(host: str, port: int, stub: Any) -> str | None:
    from outrider.v1 import common_pb2
    from outrider.wire.transport.hang_watch import describe_hang

    info = _call(host, port, stub, "GetInfo", common_pb2.GetInfoRequest())
    if isinstance(info, str):
        return info
    return describe_hang(info.current_step_us / 1e6, info.longest_step_us / 1e6)


def _call(host: str, port: int, stub: Any, method: str, request: Any) -> Any:
    """Return the reply to a gRPC call, or a text with the reason why there is none."""
    import grpc

    with _channel(f"{host}:{port}", _speaks_tls(host, port)) as channel:
        try:
            return getattr(stub(channel), method)(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"


def _speaks_tls(host: str, port: int) -> bool:
    """Return whether the server at the port uses TLS.

    A mounted certificate need not be in use: launcher and workers have their settings from a file of pools, the
    environment and Ray.
    """
    if not (TLS_DIR / "cert.pem").exists():
        return False
    with socket.create_connection((host, port), TIMEOUT_S) as connection:
        try:
            context = _own_context(TLS_DIR)
            context.set_alpn_protocols(["h2"])
            context.wrap_socket(connection).close()
        except (ssl.SSLError, ConnectionError):
            return False
    return True


def _channel(address: str, over_tls: bool) -> Any:
    import grpc

    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]  # the server is in this container
    if not over_tls:
        return grpc.insecure_channel(address, options)
    authority = (TLS_DIR / "ca.pem").read_bytes()
    key = (TLS_DIR / "key.pem").read_bytes()
    certificate = (TLS_DIR / "cert.pem").read_bytes()
    options.append(("grpc.ssl_target_name_override", _own_name(certificate)))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, certificate), options)


def _own_name(certificate: bytes) -> str:
    """Return a DNS name of the certificate, such as draft.outrider.internal."""
    from cryptography import x509

    extensions = x509.load_pem_x509_certificate(certificate).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)[0]


def check_tcp(host: str, port: int) -> str | None:
    """Return None if a server listens at the port. Raises OSError otherwise."""
    socket.create_connection((host, port), TIMEOUT_S).close()
    return None


CHECKS = {"http": check_http, "grpc": check_grpc, "draft": check_draft, "target": check_target, "tcp": check_tcp}


def main(argv: list[str]) -> int:
    """Run the checks that `argv` names. Return the exit code: 0 if all pass, else 1.

    argv: pairs of a kind of check (http, grpc, draft, target or tcp) and the host:port to check.
    """
    for kind, address in zip(argv[::2], argv[1::2], strict=True):
        host, _, port = address.rpartition(":")
        if host == "hostname":
            host = socket.gethostname()
        try:
            reason = CHECKS[kind](host, int(port))
        except (OSError, http.client.HTTPException) as error:
            reason = str(error)
        if reason is not None:
            sys.stderr.write(f"{kind} {host}:{port}: {reason}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
