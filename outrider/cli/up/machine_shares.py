"""Divides this machine's GPUs, CPU cores and ports among the parts of a system. For `supervisor.py`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.settings.cores import format_cores, share_cores
from outrider.wire.settings.gpu_shares import utilizations
from outrider.wire.settings.pools import Pool
from outrider.wire.settings.system import SystemConfig, gateway_config
from outrider.wire.transport.address import next_free

GPU_DEVICE = Path("/dev/nvidiactl")
"""Device file that exists if the driver of an NVIDIA GPU is loaded."""
_MAX_PORT = 65535


def own_gpu_memory(pools: Iterable[Pool], utilization: float | None = None) -> dict[str, float]:
    """Return the value of `gpu_memory_utilization` for each pool whose workers share a GPU of this machine, by pool
    name. Pools that have a value in their settings are left out.

    utilization: fraction of each GPU's memory that all workers on this GPU may take together. None = a default
    fraction, and the pool of a worker that is alone on its GPU is left out, too. Raises ConfigError if nothing remains
    for some workers.
    """
    pools_by_gpu: dict[str, list[Pool]] = {}
    for pool in pools:
        device = pool.worker.device
        if device == "auto" and GPU_DEVICE.exists():
            device = "cuda"
        if pool.has_model and device.startswith("cuda"):
            gpu = device.partition(":")[2] or "0"
            pools_by_gpu.setdefault(gpu, []).append(pool)
    shares: dict[str, float] = {}
    for sharing in pools_by_gpu.values():
        shares.update(utilizations(sharing, utilization))
    return shares


def own_cores(pools: Mapping[str, Pool]) -> dict[str, str | None]:
    """Return the CPU cores of each worker, by worker name, as values of `cpu_cores`. None = the worker runs on a GPU
    and is not pinned.

    pools: the pool of each worker, by worker name. Raises ConfigError for cores that this machine does not have.
    """
    cpu_devices = {"cpu", "auto"}
    if GPU_DEVICE.exists():
        cpu_devices = {"cpu"}
    on_cpu = list[str]()
    for name, pool in pools.items():
        if pool.has_model and pool.worker.device in cpu_devices:
            on_cpu.append(name)
    workers = {name: (pool.role, pool.worker) for name, pool in pools.items()}
    shared = share_cores(workers, on_cpu, frozenset(os.sched_getaffinity(0)))
    cores = dict[str, str | None]()
    for name, own in shared.items():
        cores[name] = None if own is None else format_cores(own)
    return cores


def with_grpc_port(config: SystemConfig) -> SystemConfig:
    """Return the settings of a system, with a gRPC port. If `config` sets the gateway's HTTP port but not its gRPC
    port, the gRPC port becomes the next free port after the HTTP port.

    Raises ConfigError for wrong settings.
    """
    if _is_set("grpc_port", config) or not _is_set("port", config):
        return config
    # 0: the two defaults must not be taken for equal ports
    gateway = gateway_config({**config.gateway, "grpc_port": 0}, target="127.0.0.1:0")
    grpc_port = 0
    if gateway.port:
        grpc_port = next_free(gateway.host, gateway.port, {gateway.metrics_port})
    return replace(config, gateway={**config.gateway, "grpc_port": grpc_port})


def _is_set(setting: str, config: SystemConfig) -> bool:
    return setting in config.gateway or f"OUTRIDER_GATEWAY_{setting}".upper() in os.environ


def with_own_ports(config: GatewayConfig, index: int, num_gateways: int) -> GatewayConfig:
    """Return the settings of gateway number `index` (from 0), with ports that no other gateway of the system has.

    config: settings that all gateways share. A port of 0, which stands for any free port, stays 0. Raises ConfigError
    if a port would be too large.
    """
    # ports 8000 and 8001, two gateways: the second has 8002 and 8003
    ports = {"port": config.port, "grpc_port": config.grpc_port}
    if config.metrics_port is not None:
        ports["metrics_port"] = config.metrics_port
    step = _port_step(list(filter(None, ports.values())), num_gateways)
    own = dict[str, int]()
    for name, port in ports.items():
        own[name] = port and port + index * step
        if own[name] > _MAX_PORT:
            raise ConfigError(f"gateway.{name} is {port}: gateway {index} would have {own[name]}; choose another")
    if index == 0:
        return config
    return config.model_copy(update=own)


def _port_step(ports: Sequence[int], num_gateways: int) -> int:
    """Return the smallest number by which the ports of successive gateways must differ so that no two ports
    are equal.
    """
    for step in itertools.count(1):
        numbers = {port + index * step for port, index in itertools.product(ports, range(num_gateways))}
        if len(numbers) == len(ports) * num_gateways:
            return step
    raise AssertionError("the ports of one gateway differ")
