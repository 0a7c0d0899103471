"""A running worker: engine thread, gRPC server thread, metrics endpoint. The same under Ray and as a plain process."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import prometheus_client

from outrider import __version__
from outrider.engine.engine_thread import EngineThread
from outrider.engine.loader import load_runner, tokenizer_files
from outrider.engine.model_runner import ModelRunner
from outrider.engine.slots import SlotTable
from outrider.v1 import common_pb2 as pb
from outrider.wire.config import DraftConfig, TargetConfig
from outrider.wire.errors import ConfigError
from outrider.wire.fingerprint import tokenizer_fingerprint
from outrider.wire.metrics import WorkerMetrics
from outrider.wire.rpc import check_message_size
from outrider.wire.serving import AddServices, ServerThread

PREFILL_TOKENS_CPU = 256
PREFILL_TOKENS_CUDA = 2048


@dataclass
class Loaded:
    """What the engine thread made: the model and its slots."""

    runner: ModelRunner
    slots: SlotTable
    tokenizer: pb.TokenizerFiles
    fingerprint: str
    """Of the tokenizer; worked out once, since parsing a large vocabulary would hold up the event loop."""
    epoch: int
    config: DraftConfig | TargetConfig
    cpu_cores: tuple[int, ...]
    """Of the engine thread."""
    metrics_address: str = ""
    num_tickets: Callable[[], int] = field(default=lambda: 0)
    num_steps: Callable[[], int] = field(default=lambda: 0)

    @property
    def max_prefill_tokens(self) -> int:
        on_cpu = self.runner.device.type == "cpu"
        return self.config.max_prefill_tokens or (PREFILL_TOKENS_CPU if on_cpu else PREFILL_TOKENS_CUDA)

    def info(self) -> pb.WorkerInfo:
        facts, pool = self.runner.facts, self.runner.pool
        return pb.WorkerInfo(
            model_id=facts.model_id,
            vocab_size=facts.vocab_size,
            tokenizer_fingerprint=self.fingerprint,
            context_limit=facts.context_limit,
            dtype=facts.dtype,
            device=facts.device,
            epoch=self.epoch,
            pid=os.getpid(),
            cpu_cores=self.cpu_cores,
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            num_slots=self.config.max_slots,
            num_slots_in_use=self.slots.num_in_use,
            num_kv_blocks=pool.num_blocks,
            num_kv_blocks_in_use=pool.num_in_use,
            kv_block_size=pool.block_size,
            attention_path=facts.attention_path,
            metrics_address=self.metrics_address,
            eos_token_ids=facts.eos_token_ids,
            num_tickets=self.num_tickets(),
            num_steps=self.num_steps(),
            version=__version__,
            num_parameters=facts.num_parameters,
        )


def load(config: DraftConfig | TargetConfig, epoch: int) -> Loaded:
    """On the engine thread. Raises ConfigError naming what is missing or does not fit."""
    runner = load_runner(
        config.model,
        device=config.device,
        dtype=config.dtype,
        kv_cache_tokens=config.kv_cache_tokens,
        max_slots=config.max_slots,
        context_limit=config.context_limit,
    )
    check_message_size(1, runner.facts.vocab_size, config.max_message_bytes)
    slots = SlotTable(runner.pool, config.max_slots, runner.facts.context_limit)
    files = tokenizer_files(config.model)
    tokenizer = pb.TokenizerFiles(
        tokenizer_json=files.tokenizer_json,
        tokenizer_config_json=files.tokenizer_config_json,
        chat_template=files.chat_template,
    )
    fingerprint = tokenizer_fingerprint(tokenizer.tokenizer_json)
    return Loaded(runner, slots, tokenizer, fingerprint, epoch, config, tuple(sorted(os.sched_getaffinity(0))))


class WorkerHandle:
    """Owns the parts of one worker and stops them in order."""

    def __init__(
        self,
        engine: EngineThread,
        server: ServerThread,
        loaded: Loaded,
        closing: Callable[[], Awaitable[None]],
        metrics_server: Any | None,
    ) -> None:
        self._engine = engine
        self._server = server
        self._loaded = loaded
        self._closing = closing
        self._metrics_server = metrics_server
        self._stopped = threading.Event()

    @property
    def address(self) -> str:
        return self._server.address

    def info(self) -> pb.WorkerInfo:
        return self._loaded.info()

    def wait_failed(self, timeout_s: float | None = None) -> None:
        """Blocks until the engine ends (or `timeout_s`); raises what ended it, unless it was `stop`."""
        error = self._engine.wait_ended(timeout_s)
        if error is not None:
            raise error

    @property
    def running(self) -> bool:
        return self._engine.alive

    def stop(self, grace_s: float = 2.0) -> None:
        """Ends streams, server, engine and metrics. Idempotent."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._server.stop(grace_s, self._closing)
        self._engine.stop(grace_s + 10)
        if self._metrics_server is not None:
            self._metrics_server.shutdown()
            self._metrics_server.server_close()


def serve_metrics(config: DraftConfig | TargetConfig, metrics: WorkerMetrics, loaded: Loaded) -> Any | None:
    """Starts the Prometheus endpoint when the configuration asks for one; returns its server."""
    metrics.kv_blocks.set(loaded.runner.pool.num_blocks)
    if config.metrics_port is None:
        return None
    try:
        server, _ = prometheus_client.start_http_server(config.metrics_port, config.host, metrics.registry)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {config.host}:{config.metrics_port}: {error.strerror}; choose another port",
            param="metrics_port",
        ) from None
    loaded.metrics_address = f"{config.host}:{server.server_port}"
    return server


def start(
    engine: EngineThread,
    server: ServerThread,
    config: DraftConfig | TargetConfig,
    metrics: WorkerMetrics,
    add_services: Callable[[Loaded], AddServices],
    loaded: Callable[[], Loaded],
    closing: Callable[[], Awaitable[None]],
) -> WorkerHandle:
    """Load, then listen. Whatever fails, nothing is left running and the error is raised."""
    engine.start()
    metrics_server = None
    try:
        made = loaded()
        metrics_server = serve_metrics(config, metrics, made)
        server.start(add_services(made), config.host, config.port, config.max_message_bytes)
    except BaseException:
        engine.stop(10)
        if metrics_server is not None:
            metrics_server.shutdown()
            metrics_server.server_close()
        raise
    return WorkerHandle(engine, server, made, closing, metrics_server)
