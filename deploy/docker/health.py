"""`python deploy/docker/health.py KIND ADDRESS...`: exit code 0 when what runs in this container serves; else says why.

http: the gateway's /readyz, so that it is healthy when it can answer. grpc: the health service of a worker or of the
launcher's registry. draft, target: a worker's engine does not hang, for Kubernetes, which ends it else as a launcher
would. tcp: somebody listens. `hostname` as the host is this container's own address.
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
"""Seconds for an answer. Doubled, a part that hangs is called unhealthy so much later."""
TLS_DIR = Path("/etc/outrider/secrets")
"""Where the compose file and the Helm chart mount a part's certificate, if it has one."""
COMMAND_LINE = Path("/proc/1/cmdline")
"""Of the gateway, which is the first process of its container."""


def check_http(host: str, port: int) -> str | None:
    """Return why /readyz is not 200, or None."""
    folder = _public_tls_dir()
    connection = (
        http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=_to_ourselves(Path(folder)))
        if folder
        else http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    )
    connection.request("GET", "/readyz")
    answer = connection.getresponse()
    return None if answer.status == 200 else f"{answer.status}: {answer.read(500).decode(errors='replace')}"


def _public_tls_dir() -> str | None:
    """The gateway's setting, from where the gateway has it: a flag, or else a variable."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--public-tls-dir", default=os.environ.get("OUTRIDER_GATEWAY_PUBLIC_TLS_DIR"))
    flags = COMMAND_LINE.read_bytes().decode(errors="replace").split("\0")
    folder: str | None = parser.parse_known_args(flags)[0].public_tls_dir
    return folder


def _to_ourselves(folder: Path) -> ssl.SSLContext:
    """The certificate is our own and for other names than 127.0.0.1; shown as ours where clients must show one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if (folder / "ca.pem").exists():
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


def check_grpc(host: str, port: int) -> str | None:
    """Return why the health service does not say SERVING, or None."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    answer = _call(host, port, health_pb2_grpc.HealthStub, "Check", health_pb2.HealthCheckRequest())
    if isinstance(answer, str):
        return answer
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return None if serving else health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def check_draft(host: str, port: int) -> str | None:
    """Return why a draft's engine makes no steps, or None."""
    from outrider.v1 import draft_pb2_grpc

    return _trouble_of_engine(host, port, draft_pb2_grpc.DraftServiceStub)


def check_target(host: str, port: int) -> str | None:
    """Return why a target's engine makes no steps, or None."""
    from outrider.v1 import target_pb2_grpc

    return _trouble_of_engine(host, port, target_pb2_grpc.TargetServiceStub)


def _trouble_of_engine(host: str, port: int, stub: Any) -> str | None:
    from outrider.v1 import common_pb2
    from outrider.wire.transport.hang_watch import trouble_of_step

    info = _call(host, port, stub, "GetInfo", common_pb2.GetInfoRequest())
    return info if isinstance(info, str) else trouble_of_step(info.current_step_us / 1e6, info.longest_step_us / 1e6)


def _call(host: str, port: int, stub: Any, method: str, request: Any) -> Any:
    """The answer, or as text why there is none."""
    import grpc

    with _channel(f"{host}:{port}", _speaks_tls(host, port)) as channel:
        try:
            return getattr(stub(channel), method)(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"


def _speaks_tls(host: str, port: int) -> bool:
    """Return whether the port answers a TLS greeting.

    That a certificate is mounted does not say that the part uses it: launcher and workers have their settings from a
    file of pools, the environment, and what Ray gave them.
    """
    if not (TLS_DIR / "cert.pem").exists():
        return False
    with socket.create_connection((host, port), TIMEOUT_S) as connection:
        try:
            context = _to_ourselves(TLS_DIR)
            context.set_alpn_protocols(["h2"])
            context.wrap_socket(connection).close()
        except (ssl.SSLError, ConnectionError):
            return False
    return True


def _channel(address: str, over_tls: bool) -> Any:
    import grpc

    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]  # we ask ourselves
    if not over_tls:
        return grpc.insecure_channel(address, options)
    authority, key, certificate = ((TLS_DIR / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem"))
    options.append(("grpc.ssl_target_name_override", _own_name(certificate)))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, certificate), options)


def _own_name(certificate: bytes) -> str:
    """A name that our certificate is for, such as draft.outrider.internal: we ask ourselves, under whatever address."""
    from cryptography import x509

    extensions = x509.load_pem_x509_certificate(certificate).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)[0]


def check_tcp(host: str, port: int) -> str | None:
    """Connect; raises OSError where nobody listens."""
    socket.create_connection((host, port), TIMEOUT_S).close()
    return None


CHECKS = {"http": check_http, "grpc": check_grpc, "draft": check_draft, "target": check_target, "tcp": check_tcp}


def main(argv: list[str]) -> int:
    """Check pairs of kind and host:port, all of which must serve. Return the exit code."""
    for kind, address in zip(argv[::2], argv[1::2], strict=True):
        host, _, port = address.rpartition(":")
        host = socket.gethostname() if host == "hostname" else host
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
