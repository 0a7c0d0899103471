"""Starts the gateway: one process that serves HTTP and gRPC.

python -m gateway --target HOST:PORT [--draft HOST:PORT]
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
import sys
from typing import NoReturn

import uvloop

from gateway.admission.admission import Admission
from gateway.api.app import create_app
from gateway.api.callers import CallerPolicy
from gateway.api.grpc_api import GenerationServicer
from gateway.api.http_server import BACKLOG, HttpServer, bind, raise_descriptor_limit
from gateway.api.operations import Operations, follow_readiness
from gateway.coordinator import Coordinator
from gateway.workers.membership import from_config
from gateway.workers.named_workers import NamedWorkers
from gateway.workers.registry_client import RegistryClient
from gateway.workers.worker_pools import START_TIMEOUT_S, Pools
from outrider.wire.errors import OutriderError, Unavailable
from outrider.wire.processes.stop_flag import ignore_log_rotation, stop_signals
from outrider.wire.processes.worker_main import announce, leave
from outrider.wire.settings.api_keys import read_keys
from outrider.wire.settings.config import GatewayConfig, load
from outrider.wire.telemetry.log import configure_logging, get_logger, log_end
from outrider.wire.telemetry.metrics import GatewayMetrics
from outrider.wire.telemetry.otel_metrics import open_metrics
from outrider.wire.telemetry.trace import open_spans
from outrider.wire.transport.address import is_loopback, join_host_port
from outrider.wire.transport.rpc import tune_malloc
from outrider.wire.transport.serving import start_server
from outrider.wire.transport.tls import CertificateFolder, http_context, public_certificates

log = get_logger(__name__)

END_S = 1.0
"""Maximum seconds for sending clients the errors that end their requests, when the gateway stops."""


class Signals:
    """Two events: the first SIGTERM, SIGINT or SIGHUP sets `stop`, and the next one sets `hurry`, for a fast stop."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        ignore_log_rotation()
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self.stop.is_set():
            self.hurry.set()
        else:
            self.stop.set()


async def serve(config: GatewayConfig) -> None:
    """Run the gateway with this configuration until a signal stops it."""
    signals = Signals()  # now, as the first process of a container has no default
    if config.api_keys is not None:
        read_keys(config.api_keys)  # an unusable file is refused now, not once the workers are connected
    certificates = public_certificates(config.public_tls_dir, config.host)
    listeners = bind(config.host, config.port)
    pools = Pools(config, GatewayMetrics())
    coordinator = Coordinator(pools)
    source: RegistryClient | NamedWorkers | None = None
    operations = _Operations(coordinator, pools)
    try:
        await operations.start()
        pools.renderers.start()
        source = _source(pools)
        starting = asyncio.create_task(_start(pools, source))
        stopping = asyncio.create_task(signals.stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if starting.done():
            starting.result()
            await _serve(pools, coordinator, listeners, certificates, signals, operations.address)
        else:
            starting.cancel()
    finally:
        for listener in listeners:
            listener.close()
        if source is not None:
            await source.close()
        await pools.close()
        await operations.stop()


class _Operations:
    """The server of `metrics_port`. It runs from before the first target is connected until the end."""

    def __init__(self, coordinator: Coordinator, pools: Pools) -> None:
        config = pools.config
        self.address: str | None = None
        if config.metrics_port is None:
            return
        self._listeners = bind(config.host, config.metrics_port, "--metrics-port")
        self.address = join_host_port(config.host, self._listeners[0].getsockname()[1])
        operations = Operations(coordinator, pools.metrics.registry, lambda: list(pools.members.values()))
        policy: CallerPolicy | None = None  # on other addresses probes call by many names of the host
        if is_loopback(config.host):
            policy = CallerPolicy(config)
        self._server = HttpServer(operations.app(policy), config.keep_alive_s)

    async def start(self) -> None:
        if self.address is not None:
            for listener in self._listeners:
                listener.listen(BACKLOG)
            self._serving = asyncio.create_task(self._server.serve(sockets=self._listeners))
            log.info("metrics and health on %s", self.address)

    async def stop(self) -> None:
        if self.address is not None:
            self._server.stop()
            await self._serving


def _source(pools: Pools) -> RegistryClient | NamedWorkers:
    address = pools.config.registry
    if address is None:
        return NamedWorkers(from_config(pools.config), pools.update, pools.is_connected)
    connected = pools.metrics.registry_connected.labels(registry=address)
    return RegistryClient(address, pools.certificates, pools.report, pools.update, connected)


async def _start(pools: Pools, source: RegistryClient | NamedWorkers) -> None:
    await source.wait_first(START_TIMEOUT_S)
    await pools.wait_ready()


async def _serve(
    pools: Pools,
    coordinator: Coordinator,
    listeners: list[socket.socket],
    certificates: CertificateFolder | None,
    signals: Signals,
    metrics_address: str | None,
) -> None:
    # 1 START the servers
    config = pools.config
    spans = open_spans(config.trace_endpoint, "gateway", pools.metrics.registry)
    metrics = open_metrics(config.trace_endpoint, "gateway")
    admission = Admission(coordinator, config, pools.metrics.registry, spans, metrics)
    http_port = listeners[0].getsockname()[1]
    server, grpc_address, health = await start_server(
        GenerationServicer(admission, http_port).add_to,
        config.host,
        config.grpc_port,
        config.max_body_bytes,
        certificates,
    )
    admission.start()
    grpc_port = int(grpc_address.rpartition(":")[2])
    app = create_app(admission, lambda: list(pools.members.values()), grpc_port)
    tls: ssl.SSLContext | None = None
    if certificates is not None:
        tls = http_context(certificates)
    http = HttpServer(app, config.keep_alive_s, tls)
    for listener in listeners:
        listener.listen(BACKLOG)  # uvicorn does so a moment later: too late for who connects on the announcement
    serving = asyncio.create_task(http.serve(sockets=listeners))
    following = asyncio.create_task(follow_readiness(health, coordinator))
    gc.freeze()  # these objects live as long as the process: collections that scan them would stop all answers

    # 2 ANNOUNCE the addresses once the drafts are there, and serve until a signal
    http_address = join_host_port(config.host, http_port)
    ending = {serving, asyncio.create_task(signals.stop.wait())}
    drafts = asyncio.create_task(pools.wait_drafts())
    await asyncio.wait({drafts, *ending}, return_when=asyncio.FIRST_COMPLETED)
    if drafts.done():
        drafts.result()
        announce(http=http_address, grpc=grpc_address, metrics=metrics_address or http_address, pid=os.getpid())
    drafts.cancel()
    await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)

    # 3 STOP: take no new requests, let running ones finish for a while, then end them
    log.info("stopping; %d answers are under way", coordinator.num_admitted)
    coordinator.draining = True
    following.cancel()
    health.set_serving(False)
    http.drain()
    # It sends GOAWAY and takes nothing new from here on. Running requests are ended below, with an error of ours.
    stopping = asyncio.create_task(server.stop(config.drain_timeout_s + 2 * END_S))
    idle = asyncio.create_task(coordinator.wait_idle(config.drain_timeout_s))
    hurried = asyncio.create_task(signals.hurry.wait())  # a second signal
    await asyncio.wait({idle, hurried}, return_when=asyncio.FIRST_COMPLETED)
    for waiting in (idle, hurried):
        waiting.cancel()
    coordinator.end_all(Unavailable("the gateway is stopping; send the request again", retry_after_s=1.0))
    await coordinator.wait_idle(END_S)
    http.stop()
    await server.stop(0.5)
    await stopping
    await serving
    await admission.close()
    senders = [sender for sender in (spans, metrics) if sender is not None]
    await asyncio.gather(*(asyncio.to_thread(sender.close) for sender in senders))


async def _serve_and_leave(config: GatewayConfig) -> NoReturn:
    """Ends the process from inside the event loop, because closing a loop waits for the threads of its executor.

    Those may read a long prompt for seconds, or compare two tokenizers.
    """
    try:
        await serve(config)
    except OutriderError as error:
        log_end("gateway", error.message)
        leave(1)
    leave(0)


def main(argv: list[str]) -> NoReturn:
    """Run the gateway with the settings of a command line, and exit the process."""
    try:
        config = load(GatewayConfig, argv)
        configure_logging(config.log_level, "gateway", config.log_format)
        tune_malloc()
        raise_descriptor_limit()
    except OutriderError as error:
        log_end("gateway", error.message)
        sys.exit(1)
    uvloop.run(_serve_and_leave(config))


if __name__ == "__main__":
    main(sys.argv[1:])
