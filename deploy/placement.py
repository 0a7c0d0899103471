"""Which device and which CPU cores each worker gets. Arithmetic only: no Ray, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from outrider.cli.cores import format_cores, share_cores
from outrider.cli.system import SystemConfig, workers_of
from outrider.wire.config import DraftConfig, TargetConfig
from outrider.wire.errors import ConfigError
from outrider.wire.host import split_evenly

NO_GPU = ""
"""CUDA_VISIBLE_DEVICES that hides every GPU: Ray leaves the variable alone for an actor that asked for none."""


@dataclass(frozen=True, slots=True)
class Node:
    """What one machine of the cluster has, or has free."""

    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True)
class Placement:
    """What one worker asks of Ray, and what it is told."""

    device: str
    """"cpu" or "cuda"; Ray shows a worker its own GPU only, as the first."""
    num_gpus: float
    num_cpus: float
    """CPUs to reserve: Ray counts them, the worker pins itself to `cpu_cores`."""
    cpu_cores: frozenset[int] | None
    """None = not pinned."""
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES to set; None = as Ray sets it."""

    def __str__(self) -> str:
        cores = "" if self.cpu_cores is None else f"cores {format_cores(self.cpu_cores)}"
        gpus = f"{self.num_gpus:g} GPU" if self.num_gpus else ""
        return ", ".join(part for part in (gpus, cores) if part) or self.device


def place(config: SystemConfig, nodes: Iterable[Node], local_cores: frozenset[int] | None) -> dict[str, Placement]:
    """{"target": ..., "draft": ...} (no draft without one), and a follower_name for each more rank of the target.

    `local_cores`: to share out; None = leave unpinned.

    Raises ConfigError naming what cannot be had.
    """
    machines = list(nodes)
    workers = workers_of(config)
    devices = {role: _device(role, worker, machines) for role, worker in workers.items()}
    gpus = _gpus(config, devices, machines)
    cores = share_cores(workers, [role for role, device in devices.items() if device == "cpu"], local_cores)
    placed = {
        role: Placement(
            device=device,
            num_gpus=gpus[role],
            num_cpus=_num_cpus(cores, role),
            cpu_cores=cores[role],
            visible_devices=NO_GPU if device == "cpu" else None,
        )
        for role, device in devices.items()
    }
    shares = _split(placed["target"], config.target.tensor_parallel)
    followers = {follower_name(rank): share for rank, share in enumerate(shares) if rank}
    return placed | {"target": shares[0]} | followers


def follower_name(rank: int) -> str:
    """Of a process that holds a share of the target's weights, in what `place` returns and in Ray."""
    return f"target-rank-{rank}"


def check_fits(placements: Mapping[str, Placement], nodes: Iterable[Node], what: str) -> None:
    """Raise ConfigError when no way of spreading the workers over the nodes satisfies them. `what`: "has" or so."""
    machines = list(nodes)
    for spread in product(range(len(machines)), repeat=len(placements)):
        if all(_holds(machine, _on(spread, index, placements)) for index, machine in enumerate(machines)):
            return
    wanted = "; ".join(f"{role}: {one.num_gpus:g} GPU, {one.num_cpus:g} CPU" for role, one in placements.items())
    offered = "; ".join(f"{one.num_gpus:g} GPU, {one.num_cpus:g} CPU" for one in machines) or "no node"
    raise ConfigError(
        f"the workers cannot be placed: they need [{wanted}] and the cluster {what} [{offered}] by node; "
        "choose --target-device cpu, --draft-device cpu, fewer cores or a share of a GPU, or add a node"
    )


def _num_cpus(cores: Mapping[str, frozenset[int] | None], role: str) -> float:
    """CPUs to reserve. Workers that share cores reserve half each; Ray takes fractions only below 1."""
    mine = cores[role]
    if mine is None:
        return 1.0
    others: frozenset[int] = frozenset().union(*(other or () for name, other in cores.items() if name != role))
    if not mine & others:
        return float(len(mine))
    return 0.5 if len(mine) == 1 else float(len(mine) // 2)


def _split(target: Placement, num_ranks: int) -> list[Placement]:
    """One for each rank: its own GPU, or its share of the cores."""
    if num_ranks == 1:
        return [target]
    if target.cpu_cores is None:
        return [target] * num_ranks
    if target.num_cpus == len(target.cpu_cores) >= num_ranks:
        return [
            replace(target, cpu_cores=cores, num_cpus=float(len(cores)))
            for cores in split_evenly(target.cpu_cores, num_ranks)
        ]
    each = target.num_cpus / num_ranks
    num_cpus = float(int(each)) if each >= 1 else each
    return [replace(target, cpu_cores=cores, num_cpus=num_cpus) for cores in split_evenly(target.cpu_cores, num_ranks)]


def _on(spread: tuple[int, ...], node: int, placements: Mapping[str, Placement]) -> list[Placement]:
    return [one for one, place_of in zip(placements.values(), spread, strict=True) if place_of == node]


def _holds(node: Node, placements: list[Placement]) -> bool:
    num_cpus = sum(one.num_cpus for one in placements)
    return num_cpus <= node.num_cpus and sum(one.num_gpus for one in placements) <= node.num_gpus


def _device(role: str, worker: TargetConfig | DraftConfig, nodes: list[Node]) -> str:
    num_gpus = sum(node.num_gpus for node in nodes)
    if worker.device == "auto":
        return "cuda" if num_gpus else "cpu"
    if worker.device.startswith("cuda:"):
        raise ConfigError(
            f"{role}.device is {worker.device!r}: Ray chooses each worker's GPU; say cuda, or use --no-ray"
        )
    if worker.device == "cuda" and not num_gpus:
        raise ConfigError(f"{role}.device is 'cuda' and Ray sees no GPU; say --{role}-device cpu, or join a cluster")
    if worker.device not in ("cpu", "cuda"):
        raise ConfigError(f"{role}.device is {worker.device!r}, must be auto, cpu or cuda")
    return worker.device


def _gpus(config: SystemConfig, devices: Mapping[str, str], nodes: list[Node]) -> dict[str, float]:
    """Of each worker's process: of a split target's, a rank."""
    num_ranks = config.target.tensor_parallel
    wanted = {
        "target": config.ray.target_gpus if config.ray else None,
        "draft": config.ray.draft_gpus if config.ray else None,
    }
    num_users = sum(device == "cuda" for device in devices.values())
    share = 0.5 if num_users == 2 and num_ranks == 1 and sum(node.num_gpus for node in nodes) < 2 else 1.0
    gpus: dict[str, float] = {}
    for role, device in devices.items():
        asked = wanted[role]
        if device == "cpu" and asked is not None:
            raise ConfigError(f"ray.{role}_gpus is {asked:g} and {role}.device is 'cpu'; leave one of them out")
        if role == "target" and num_ranks > 1 and asked is not None:
            if asked != num_ranks:  # ranks that found themselves on one GPU could not speak
                raise ConfigError(
                    f"ray.target_gpus is {asked:g} and target.tensor_parallel {num_ranks}: a rank takes one GPU, no "
                    f"less and no more; say {num_ranks} or leave it out"
                )
            asked = 1.0
        gpus[role] = 0.0 if device == "cpu" else share if asked is None else asked
    return gpus
