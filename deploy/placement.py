"""Which device, GPUs and CPUs each worker gets, and whether they fit. Arithmetic only: no Ray, no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import GPU_FRACTION, TargetConfig
from outrider.wire.settings.gpu_shares import gpu_shares, utilization_of, utilizations
from outrider.wire.settings.pools import Pool, check_offered, given_cores, shares
from outrider.wire.settings.system import SystemConfig

NO_GPU = ""
"""CUDA_VISIBLE_DEVICES that hides every GPU: Ray leaves the variable alone for an actor that asked for none."""
GPU_LABEL = "outrider/gpu"
"""Label of a node whose only GPU other nodes have, too, as containers of one machine may: its value is one for all of
them, and for no other GPU of the cluster."""
_MOST_STEPS = 20_000
"""Tries to spread workers over nodes, a few ms; beyond it they are taken to fit, and Ray would wait for ever. Twice as
many reach one more worker or so."""
_IN = re.compile(r"in\((.*)\)")


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """What one machine of the cluster has, or has free."""

    num_cpus: float
    num_gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """Says what one worker of a pool asks of Ray and is given; of a split target, what each of its ranks is given."""

    device: str
    """"cpu" or "cuda"; Ray shows a worker its own GPU only, as the first."""
    num_gpus: float
    num_cpus: float
    """CPUs to reserve: Ray counts them, the worker pins itself."""
    num_cores: int | None
    """Cores to pin itself to, of the machine where it finds itself; None = not pinned, or to those in its settings."""
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES to set; None = as Ray sets it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int = 1
    """Processes on one machine, each with the above."""
    gpu_memory_utilization: float | None = None
    """The setting of that name where the worker's own settings do not say it; None = alone on its GPU."""

    def __str__(self) -> str:
        gpus = f"{self.num_gpus:g} GPU" if self.num_gpus else ""
        where = ", ".join(f"{key}={value}" for key, value in self.labels.items())
        asked = [part for part in (gpus, f"{self.num_cpus:g} CPU", where) if part]
        return ("" if self.num_ranks == 1 else f"{self.num_ranks} ranks of ") + ", ".join(asked)


def place(
    config: SystemConfig, nodes: Iterable[ClusterNode], local_cores: frozenset[int] | None
) -> dict[str, Placement]:
    """Return the placement of each worker, by the name of its pool.

    `local_cores`: to share out, of the only machine; None = workers are pinned where their settings say so.

    Raises ConfigError naming what cannot be had.
    """
    machines = list(nodes)
    devices = {pool.name: _device(pool, machines) for pool in config.pools}
    gpus = _gpus(config.pools, devices, machines)
    memory = _gpu_memory(config.pools, gpus, machines, config.gpu_memory_utilization)
    on_cpu = [pool for pool in config.pools if devices[pool.name] == "cpu"]
    cpus = _shared_cpus(config.pools, on_cpu, local_cores)
    return {
        pool.name: _split(
            pool,
            Placement(
                device=devices[pool.name],
                num_gpus=gpus[pool.name],
                num_cpus=pool.num_cpus or cpus.get(pool.name, 1.0),
                num_cores=_num_cores(pool, cpus),
                visible_devices=NO_GPU if devices[pool.name] == "cpu" else None,
                labels=pool.labels,
                gpu_memory_utilization=memory.get(pool.name),
            ),
        )
        for pool in config.pools
    }


def check_fits(wanted: Mapping[str, tuple[Placement, int]], nodes: Iterable[ClusterNode], what: str) -> None:
    """Raise ConfigError when no way of spreading the workers over the nodes satisfies them.

    `wanted`: by pool, a worker's placement and how many there are. `what`: "has" or so.
    """
    machines = list(nodes)
    workers = [one for one, count in wanted.values() for _ in range(count)]
    workers.sort(key=lambda one: (one.num_gpus, one.num_cpus * one.num_ranks), reverse=True)
    if _can_place(workers, [(node.num_cpus, node.num_gpus) for node in machines], machines):
        return
    asked = "; ".join(f"{count} x {name}: {_amounts(one)}" for name, (one, count) in wanted.items())
    offered = "; ".join(f"{one.num_gpus:g} GPU, {one.num_cpus:g} CPU{_labels(one.labels)}" for one in machines)
    raise ConfigError(
        f"the workers cannot be placed: they need [{asked}] and the cluster {what} [{offered or 'no node'}] by node; "
        "choose device cpu, fewer cores or a share of a GPU, other labels, or add a node"
    )


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether a selector of Ray's means a machine with these labels: value, !value, in(...) or !in(...)."""
    return all(_has(labels.get(key), wanted) for key, wanted in selector.items())


def _has(value: str | None, wanted: str) -> bool:
    negated, positive = wanted.startswith("!"), wanted.removeprefix("!")
    found = _IN.fullmatch(positive)
    among = [one.strip() for one in found[1].split(",")] if found else [positive]
    return (value in among) is not negated


def _amounts(one: Placement) -> str:
    amounts = f"{one.num_gpus * one.num_ranks:g} GPU, {one.num_cpus * one.num_ranks:g} CPU"
    return amounts + _labels(one.labels)


def _labels(labels: Mapping[str, str]) -> str:
    shown = {key: value for key, value in labels.items() if not key.startswith("ray.io/")}
    return f" with {', '.join(f'{key}={value}' for key, value in shown.items())}" if shown else ""


def _can_place(workers: list[Placement], free: list[tuple[float, float]], nodes: Sequence[ClusterNode]) -> bool:
    """Tries all ways, alike machines once; gives the benefit of the doubt when there are very many."""
    steps = 0
    wanted = [(one.num_cpus * one.num_ranks, one.num_gpus * one.num_ranks) for one in workers]
    if any(sum(one[kind] for one in wanted) > sum(one[kind] for one in free) + 1e-6 for kind in (0, 1)):
        return False

    def rest(index: int, free: list[tuple[float, float]]) -> bool:
        nonlocal steps
        steps += 1
        if index == len(workers) or steps > _MOST_STEPS:
            return True
        one, tried = workers[index], set()
        for at, (num_cpus, num_gpus) in enumerate(free):
            left = (
                round(num_cpus - one.num_cpus * one.num_ranks, 4),
                round(num_gpus - one.num_gpus * one.num_ranks, 4),
            )
            kind = (num_cpus, num_gpus, tuple(sorted(nodes[at].labels.items())))
            if kind in tried or min(left) < 0 or not matches(nodes[at].labels, one.labels):
                continue
            tried.add(kind)
            if rest(index + 1, [*free[:at], left, *free[at + 1 :]]):
                return True
        return False

    return rest(0, free)


def _shared_cpus(pools: Iterable[Pool], on_cpu: list[Pool], local_cores: frozenset[int] | None) -> dict[str, float]:
    """By pool: what each worker's share of the only machine is, where its pool does not say it."""
    if local_cores is None:
        return {}
    given = given_cores({pool.name: pool.worker for pool in pools})
    check_offered(given.values(), local_cores)
    users = {core: sum(pool.max for pool in pools if core in given.get(pool.name, ())) for core in local_cores}
    found: dict[str, float] = {}
    for name, cores in given.items():
        reserved = sum(1 / users[core] for core in cores)
        found[name] = float(int(reserved)) if reserved >= 1 else int(100 * reserved) / 100
    free = (local_cores - frozenset().union(*given.values())) or local_cores
    unnamed = [pool for pool in on_cpu if pool.name not in given and pool.num_cpus is None]
    sharing = [pool for pool in unnamed if pool.has_model]
    found |= {pool.name: 0.0 for pool in unnamed if not pool.has_model}
    numbers = {role: sum(pool.max for pool in sharing if pool.role == role) for role in ("target", "draft")}
    said = sum(int(max(1.0, pool.num_cpus)) * pool.max for pool in on_cpu if pool.num_cpus is not None)
    of_target, of_draft = shares(max(1, len(free) - said), numbers["target"], numbers["draft"])
    return found | {pool.name: of_target if pool.role == "target" else of_draft for pool in sharing}


def _num_cores(pool: Pool, cpus: Mapping[str, float]) -> int | None:
    if pool.worker.cpu_cores is not None:
        return None
    amount = pool.num_cpus if pool.num_cpus is not None else cpus.get(pool.name)
    return max(1, int(amount)) if amount else None


def _split(pool: Pool, whole: Placement) -> Placement:
    """A split target's CPUs, those of all its ranks, as those of each. GPUs are each rank's already."""
    num_ranks = pool.worker.tensor_parallel if isinstance(pool.worker, TargetConfig) else 1
    if num_ranks == 1:
        return whole
    if whole.num_cores is None and pool.worker.cpu_cores is None:
        return replace(whole, num_ranks=num_ranks)
    each = whole.num_cpus / num_ranks
    return replace(
        whole,
        num_ranks=num_ranks,
        num_cpus=float(int(each)) if each >= 1 else int(100 * each) / 100,
        num_cores=None if whole.num_cores is None else max(1, whole.num_cores // num_ranks),
    )


def _device(pool: Pool, nodes: list[ClusterNode]) -> str:
    if not pool.has_model:
        return "cpu"
    num_gpus = sum(node.num_gpus for node in nodes if matches(node.labels, pool.labels))
    device = pool.worker.device
    if device == "auto":
        return "cuda" if num_gpus else "cpu"
    if device.startswith("cuda:"):
        raise ConfigError(
            f"{pool.setting}.device is {device!r}: Ray chooses each worker's GPU; say cuda, or use --no-ray"
        )
    if device == "cuda" and not num_gpus:
        raise ConfigError(
            f"{pool.setting}.device is 'cuda' and Ray sees no GPU; say --{pool.role}-device cpu, or join a cluster"
        )
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"{pool.setting}.device is {device!r}, must be auto, cpu or cuda")
    return device


def _gpus(pools: Iterable[Pool], devices: Mapping[str, str], nodes: list[ClusterNode]) -> dict[str, float]:
    """Return the GPUs of each worker's process, by its pool's name: of a split target's, a rank. Several workers share
    the only GPU by the sizes of their models.
    """
    users = [pool for pool in pools if devices[pool.name] == "cuda"]
    shares: dict[str, float] = {}
    if _have_one_gpu(users, nodes):
        taken = sum(pool.num_gpus * pool.max for pool in users if pool.num_gpus is not None)
        by_size = gpu_shares(pool for pool in users if pool.num_gpus is None)
        shares = {name: int(100 * share * max(0.0, 1 - taken)) / 100 for name, share in by_size.items()}
    return {pool.name: _gpus_of(pool, devices[pool.name], shares.get(pool.name) or 1.0) for pool in pools}


def _have_one_gpu(users: Sequence[Pool], nodes: Iterable[ClusterNode]) -> bool:
    """Return whether several workers, none of them split, have one GPU between them."""
    is_split = any(_num_ranks(pool) > 1 for pool in users)
    return sum(pool.count for pool in users) > 1 and not is_split and sum(node.num_gpus for node in nodes) < 2


def _gpu_memory(
    pools: Sequence[Pool], gpus: Mapping[str, float], nodes: Sequence[ClusterNode], wanted: float | None
) -> dict[str, float]:
    """Return `gpu_memory_utilization` by pool, of those whose workers share a GPU: as Ray counts it, or unseen by Ray,
    with other nodes that show the same one. wanted: what workers may take of a GPU together, also one that has it
    alone; None = GPU_FRACTION of one that is shared.
    """
    sharing = [pool for pool in pools if 0 < gpus[pool.name] < 1]
    if all(pool.num_gpus is None for pool in sharing):
        found = utilizations(sharing, wanted)
    else:
        found = {pool.name: utilization_of(gpus[pool.name], wanted or GPU_FRACTION) for pool in sharing}
    by_gpu: dict[str, list[Pool]] = {}
    for pool in pools:
        gpu = _only_gpu(pool, nodes) if gpus[pool.name] == 1 and _num_ranks(pool) == 1 else None
        if gpu is not None:
            by_gpu.setdefault(gpu, []).append(pool)
    for users in by_gpu.values():
        found.update(utilizations(users, wanted))
    for pool in pools:
        if wanted is not None and gpus[pool.name] >= 1 and pool.worker.gpu_memory_utilization is None:
            found.setdefault(pool.name, wanted)
    return found


def _only_gpu(pool: Pool, nodes: Iterable[ClusterNode]) -> str | None:
    """Return the value of GPU_LABEL that all nodes have where the pool's workers may run; None where they differ."""
    found = {node.labels.get(GPU_LABEL) for node in nodes if node.num_gpus and matches(node.labels, pool.labels)}
    return found.pop() if len(found) == 1 else None


def _gpus_of(pool: Pool, device: str, share: float) -> float:
    asked, num_ranks = pool.num_gpus, _num_ranks(pool)
    if device == "cpu":
        if asked is not None:
            raise ConfigError(
                f"{pool.setting}.num_gpus is {asked:g} and {pool.setting}.device is 'cpu'; leave one of them out"
            )
        return 0.0
    if num_ranks > 1 and asked is not None and asked != num_ranks:  # ranks on one GPU could not speak
        raise ConfigError(
            f"{pool.setting}.num_gpus is {asked:g} and {pool.setting}.tensor_parallel {num_ranks}: a rank takes one "
            f"GPU, no less and no more; say {num_ranks} or leave it out"
        )
    return 1.0 if num_ranks > 1 else share if asked is None else asked


def _num_ranks(pool: Pool) -> int:
    return pool.worker.tensor_parallel if isinstance(pool.worker, TargetConfig) else 1
