"""A running worker: engine thread, gRPC server thread and metrics endpoint. The same under Ray and as a plain
process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import prometheus_client
import torch

from outrider import __version__
from outrider.engine.files.tokenizer_files import tokenizers_read_once
from outrider.engine.native.library import load_at_start
from outrider.engine.sampling.grammar_state import Grammars
from outrider.engine.worker.engine_thread import EngineThread, EngineWorker, StepTimes
from outrider.engine.worker.open_slots import OpenSlots
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.worker_service import WorkerService
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.models.fingerprint import tokenizer_fingerprint
from outrider.wire.models.model_id import short_name
from outrider.wire.protocol import PROTOCOL
from outrider.wire.requests.drafters import Drafter
from outrider.wire.settings.config import TargetConfig, WorkerConfig
from outrider.wire.telemetry.log import adopt_loggers
from outrider.wire.telemetry.metrics import WorkerMetrics
from outrider.wire.telemetry.trace import Spans, open_spans
from outrider.wire.transport.address import check_free, join_host_port
from outrider.wire.transport.host import new_epoch
from outrider.wire.transport.roles import Role
from outrider.wire.transport.rpc import MAX_MESSAGE_BYTES, max_control_bytes
from outrider.wire.transport.serving import AddServices, ServerThread
from outrider.wire.transport.tls import CertificateFolder, role_certificates


@dataclass
class WorkerState:
    """State that a worker's engine thread has loaded: configuration, slots, tokenizer and drafters. GetInfo reports it.
    A draft worker may have no model.
    """

    config: WorkerConfig
    epoch: int
    slots: OpenSlots[Any]
    tokenizer: pb.TokenizerFiles
    fingerprint: str = field(init=False)
    """Fingerprint of the tokenizer. It is computed once, since parsing a large vocabulary would block the event
    loop."""
    cpu_cores: tuple[int, ...] = field(init=False)
    """Numbers of the CPU cores on which the engine thread may run."""
    metrics_address: str = ""
    num_leases: Callable[[], int] = field(default=lambda: 0)
    times: StepTimes = field(default_factory=StepTimes)
    """Number of the engine thread's steps, and seconds of all, of the longest recent and of the current one."""
    drafters: tuple[Drafter, ...] = ()
    """Drafters that need no draft model: in a target those that a request may name, in a draft worker without a model
    the one that it runs."""
    needs_features: ClassVar[bool] = False
    """Whether the worker is a draft worker with a head, which needs the target's features."""
    draining: Callable[[], bool] = field(default=lambda: False)
    close: Callable[[], None] = field(default=lambda: None)
    """Function that ends the other processes that hold parts of the model's weights; called after the engine thread has
    ended."""

    def __post_init__(self) -> None:
        self.fingerprint = tokenizer_fingerprint(self.tokenizer.tokenizer_json)
        self.cpu_cores = tuple(sorted(os.sched_getaffinity(0)))

    def info(self) -> pb.WorkerInfo:
        """Return the worker's description without what only a model has, such as its id and vocabulary."""
        return pb.WorkerInfo(
            tokenizer_fingerprint=self.fingerprint,
            context_limit=self.slots.context_limit,
            epoch=self.epoch,
            pid=os.getpid(),
            cpu_cores=self.cpu_cores,
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            num_slots=self.config.max_slots,
            num_slots_in_use=self.slots.num_in_use,
            metrics_address=self.metrics_address,
            num_leases=self.num_leases(),
            num_steps=self.times.num_steps,
            busy_us=int(self.times.busy_s * 1e6),
            longest_step_us=int(self.times.longest_s * 1e6),
            current_step_us=int(self.times.current_s * 1e6),
            is_draining=self.draining(),
            version=__version__,
            drafters=self.drafters,
            protocol=PROTOCOL,
            needs_features=self.needs_features,
        )


NOTICE_S = 2.0
"""Seconds after which every gateway has noticed that a worker drains: two of a gateway's polling intervals."""

State = TypeVar("State", bound=WorkerState)
Load = Callable[[Any, int, Callable[[OutriderError], None]], State]
"""Function that loads the state from (config, epoch, on_lost), on the engine thread. It calls `on_lost` from another
thread if a process that the worker needs ends by itself."""


@dataclass(frozen=True, slots=True)
class WorkerBase(Generic[State]):
    """Parts that a draft worker and a target both have: loaded state, slots, engine thread, Control service, metrics
    and certificates.
    """

    loaded: State
    keeper: SlotKeeper[Any]
    engine: EngineThread
    service: WorkerService
    metrics: WorkerMetrics
    certificates: CertificateFolder | None


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Parts that draft worker and target each make in their own way: what the engine thread runs, and the gRPC
    services.
    """

    worker: EngineWorker
    add_services: AddServices
    close: Callable[[], Awaitable[None]] | None = None
    """Function that is called on the event loop after the Control streams have ended; None for nothing to do."""


class WorkerHandle:
    """Handle of a running worker. It owns the worker's parts, and `stop` ends them."""

    def __init__(
        self,
        engine: EngineThread,
        server: ServerThread,
        loaded: WorkerState,
        service: WorkerService,
        closing: Callable[[], Awaitable[None]],
        metrics_server: Any | None,
        spans: Spans | None,
    ) -> None:
        self._engine = engine
        self._server = server
        self._loaded = loaded
        self._service = service
        self._closing = closing
        self._metrics_server = metrics_server
        self._spans = spans
        self._stopped = threading.Event()

    @property
    def address(self) -> str:
        """Address of the gRPC server, host and port."""
        return self._server.address

    def info(self) -> pb.WorkerInfo:
        """Return the worker's description, which the RPC GetInfo returns, too."""
        return self._loaded.info()

    def wait_failed(self, timeout_s: float | None = None) -> None:
        """Block until the engine thread ends, or for `timeout_s` seconds. Raise the error that ended it. Return if
        `stop` ended it or the time is over.
        """
        error = self._engine.wait_ended(timeout_s)
        if error is not None:
            raise error

    @property
    def running(self) -> bool:
        """Whether the engine thread is alive."""
        return self._engine.is_alive

    def drain(self, timeout_s: float, cut_short: Callable[[], bool] = lambda: False) -> None:
        """Refuse new slots, and block until no slot is open and connected gateways have had time to notice that the
        worker drains.

        It returns after `timeout_s` seconds at the latest, or once `cut_short` returns True. Call `stop` afterwards.
        """

        def begin() -> None:
            self._service.draining = True

        self._server.stop_serving(begin)
        began_s = time.monotonic()
        while self.running and not cut_short() and time.monotonic() < began_s + timeout_s:
            is_known = not self._service.streams.num_open or time.monotonic() >= began_s + NOTICE_S
            if is_known and not self._service.num_opening and not self._loaded.slots.num_in_use:
                return
            time.sleep(0.02)

    def stop(self, grace_s: float = 2.0) -> None:
        """End streams, server, engine thread and metrics endpoint. Calling it twice is harmless.

        `grace_s`: seconds that the server gives running calls.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._server.stop(grace_s, self._closing)
        self._engine.stop(grace_s + 10)
        self._loaded.close()
        _stop_metrics(self._metrics_server)
        if self._spans is not None:
            self._spans.close()


def _serve_metrics(config: WorkerConfig, metrics: WorkerMetrics, loaded: WorkerState) -> Any | None:
    info = loaded.info()
    metrics.kv_blocks.set(info.num_kv_blocks)
    metrics.slots.set(config.max_slots)
    labels = {
        "model": short_name(info.model_id),
        "device": info.device,
        "dtype": info.dtype,
        "path": info.attention_path,
    }
    metrics.info.labels(**labels).set(1)
    if config.metrics_port is None:
        return None
    try:
        server, _ = prometheus_client.start_http_server(config.metrics_port, config.host, metrics.registry)
    except OSError as error:
        address = join_host_port(config.host, config.metrics_port)
        raise ConfigError(
            f"cannot serve metrics on {address}: {error.strerror}; choose another port",
            param="metrics_port",
        ) from None
    server.set_app(_with_head(server.get_app()))
    loaded.metrics_address = join_host_port(config.host, server.server_port)
    return server


def _with_head(app: Any) -> Any:

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] != "HEAD":
            return app(environ, start_response)
        started: list[tuple[str, list[tuple[str, str]]]] = []
        body = app({**environ, "REQUEST_METHOD": "GET"}, lambda status, headers: started.append((status, headers)))
        status, headers = started[0]
        start_response(status, [*headers, ("Content-Length", str(sum(map(len, body))))])
        return []

    return answer


def _stop_metrics(server: Any | None) -> None:
    if server is not None:
        server.shutdown()
        server.server_close()


def start(
    name: str,
    config: WorkerConfig,
    num_threads: int,
    load: Load[State],
    make: Callable[[WorkerBase[State]], WorkerParts],
) -> WorkerHandle:
    """Start a worker: load its state with `load`, build its parts with `make`, and listen. Return the handle of the
    running worker.

    `load` and `make` run on the engine thread. Before loading, the function checks that the ports are free. If anything
    fails, nothing is left running, and the error is raised. `name`: "draft" or "target". `num_threads`: number of
    torch's threads.
    """
    check_free(config.host, config.port, "--port")
    check_free(config.host, config.metrics_port or 0, "--metrics-port")
    certificates = role_certificates(config.tls_dir, Role(name), config.host)
    metrics, server = WorkerMetrics(name), ServerThread()
    made: list[tuple[WorkerBase[State], WorkerParts]] = []
    torch.set_num_threads(num_threads)
    with contextlib.ExitStack() as undo:
        spans = open_spans(config.trace_endpoint, name, metrics.registry)
        if spans is not None:
            undo.callback(spans.close)

        def make_worker(engine: EngineThread) -> EngineWorker:
            torch.set_num_threads(num_threads)
            base = _base(engine, config, load, metrics, spans, certificates)
            undo.callback(base.loaded.close)
            made.append((base, make(base)))
            return made[0][1].worker

        engine = EngineThread(make_worker, server.post)
        engine.start()
        undo.callback(engine.stop, 10)
        base, parts = made[0]
        adopt_loggers()

        async def closing() -> None:
            await base.service.streams.end_all()
            if parts.close is not None:
                await parts.close()

        metrics_server = _serve_metrics(config, metrics, base.loaded)
        undo.callback(_stop_metrics, metrics_server)
        control_bytes = max_control_bytes(base.loaded.slots.context_limit)
        gc.freeze()  # a full collection over what is here now, most of it torch's, would stop every thread for 0.4 s
        server.start(parts.add_services, config.host, config.port, MAX_MESSAGE_BYTES, certificates, control_bytes)
        undo.pop_all()
    return WorkerHandle(engine, server, base.loaded, base.service, closing, metrics_server, spans)


def _base(
    engine: EngineThread,
    config: WorkerConfig,
    load: Load[State],
    metrics: WorkerMetrics,
    spans: Spans | None,
    certificates: CertificateFolder | None,
) -> WorkerBase[State]:
    # runs on the engine thread
    load_at_start()
    with tokenizers_read_once():
        loaded = load(config, new_epoch(), engine.fail)
    loaded.times = engine.times
    info = loaded.info()
    keeper = SlotKeeper(loaded.slots, engine, metrics, info.vocab_size, info.eos_token_ids)
    must_follow = isinstance(config, TargetConfig)  # a draft need not follow the grammar
    grammars = Grammars(loaded.tokenizer.tokenizer_json, info.vocab_size, info.eos_token_ids, must_follow=must_follow)
    service = WorkerService(engine, loaded.info, loaded.tokenizer, loaded.epoch, grammars, spans)
    loaded.draining = lambda: service.draining
    return WorkerBase(loaded, keeper, engine, service, metrics, certificates)
