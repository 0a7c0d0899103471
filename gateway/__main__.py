"""`python -m gateway --target HOST:PORT [--draft HOST:PORT]`: HTTP and gRPC in one process. `--help` lists settings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop

from gateway.app import create_app
from gateway.coordinator import Coordinator
from gateway.door import Door
from gateway.grpc_api import GenerationServicer
from gateway.pair import Pair, connect_pair
from outrider.wire.address import join_host_port
from outrider.wire.config import GatewayConfig, load
from outrider.wire.errors import ConfigError, OutriderError, Unavailable
from outrider.wire.log import configure_logging, get_logger, tell_end
from outrider.wire.rpc import tune_malloc
from outrider.wire.serving import start_server
from outrider.wire.tls import CertificateFolder, http_context, public_certificates
from outrider.wire.worker_main import announce

log = get_logger(__name__)

DRAIN_S = 5.0
"""How long running answers may go on after a signal."""
END_S = 1.0
"""And how long it may then take to tell their clients that they end."""


def bind(host: str, port: int) -> socket.socket:
    """Before anything is announced, so that a taken port is an error at once. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {join_host_port(host, port)}: {error.strerror}; choose another --port", param="port"
        ) from None
    return listener


async def serve(config: GatewayConfig) -> None:
    certificates = public_certificates(config.public_tls_dir, config.host)
    listener = bind(config.host, config.port)
    try:
        pair = await connect_pair(config)
    except BaseException:
        listener.close()
        raise
    coordinator = Coordinator(pair)
    try:
        await _serve(config, pair, coordinator, listener, certificates)
    finally:
        for link in (pair.draft, pair.target):
            if link is not None:
                await link.close()


async def _serve(
    config: GatewayConfig,
    pair: Pair,
    coordinator: Coordinator,
    listener: socket.socket,
    certificates: CertificateFolder | None,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    door = Door(coordinator, config, pair.metrics.registry)
    server, grpc_address, health = await start_server(
        GenerationServicer(door).add_to, config.host, config.grpc_port, config.max_body_bytes, certificates
    )
    app = create_app(door)
    http_config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    if certificates is not None:
        http_config.load()  # else uvicorn does so at its start, and takes no certificates to mean no TLS
        http_config.ssl = http_context(certificates)
    http = _HttpServer(http_config)
    listener.listen(2048)  # uvicorn does so a moment later: too late for who connects on the announcement
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    announce(http=join_host_port(config.host, listener.getsockname()[1]), grpc=grpc_address, pid=os.getpid())
    await asyncio.wait({serving, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping; %d answers are under way", coordinator.num_admitted)
    coordinator.draining = True
    await health.enter_graceful_shutdown()
    await coordinator.wait_idle(DRAIN_S)
    coordinator.end_all(Unavailable("the gateway is stopping; send the request again", retry_after_s=1.0))
    await coordinator.wait_idle(END_S)
    http.should_exit = True
    await server.stop(0.5)
    await serving


class _HttpServer(uvicorn.Server):
    """Signals are ours: HTTP and gRPC stop together."""

    def install_signal_handlers(self) -> None:
        return

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(argv: list[str]) -> int:
    try:
        config = load(GatewayConfig, argv)
        configure_logging(config.log_level, "gateway", config.log_format)
        tune_malloc()
        uvloop.run(serve(config))
    except OutriderError as error:
        tell_end("gateway", error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
