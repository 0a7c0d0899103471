"""Decide the device, GPUs and CPUs of each worker, and whether all workers fit. Arithmetic only: no Ray, no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import GPU_FRACTION, TargetConfig
from outrider.wire.settings.cores import check_offered, given_cores, shares
from outrider.wire.settings.gpu_shares import gpu_shares, utilization_of, utilizations
from outrider.wire.settings.pools import Pool
from outrider.wire.settings.system import SystemConfig

NO_GPU = ""
"""Value of CUDA_VISIBLE_DEVICES that hides every GPU. It is set for workers on the CPU, since Ray leaves the variable
unset for them."""
GPU_LABEL = "outrider/gpu"
"""Label of Ray nodes that share one GPU, as several containers of one machine may. Its value is the same on all nodes
with that GPU, and on no other node."""
_MAX_STEPS = 20_000
"""Maximum number of tries to spread workers over nodes, which take a few ms; after them the workers are assumed to
fit."""
_IN = re.compile(r"in\((.*)\)")
"""Pattern of a label selector in(a, b)."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """Resources of one machine of the cluster: its total resources (from `Cluster.nodes`), or its free ones (from
    `Cluster.free`).
    """

    num_cpus: float
    num_gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """Resources of one worker of a pool. For a tensor-parallel target they are those of each rank."""

    device: str
    """Device, "cpu" or "cuda". It needs no index, since Ray shows a worker no GPU but its own."""
    num_gpus: float
    """Number of GPUs to reserve; a fraction for a GPU that is shared."""
    num_cpus: float
    """Number of CPUs to reserve. Ray only counts them and pins no process; the worker pins itself to cores."""
    num_cores: int | None
    """Number of cores to which the worker pins itself; None if it is not pinned, or if its settings name the cores."""
    visible_devices: str | None
    """Value of CUDA_VISIBLE_DEVICES; None = the value that Ray sets."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Conditions on the labels of the machine in Ray's syntax, by name of the label."""
    num_ranks: int = 1
    """Number of ranks of a tensor-parallel target, all on one machine and each with these resources; 1 for other
    workers."""
    gpu_memory_utilization: float | None = None
    """Value of the setting `gpu_memory_utilization` for workers that do not set it themselves; None = the setting's
    default."""

    def __str__(self) -> str:
        parts = [f"{self.num_cpus:g} CPU"]
        if self.num_gpus:
            parts.insert(0, f"{self.num_gpus:g} GPU")
        parts += [f"{key}={value}" for key, value in self.labels.items()]
        text = ", ".join(parts)
        if self.num_ranks > 1:
            return f"{self.num_ranks} ranks of {text}"
        return text


def place(
    config: SystemConfig, nodes: Iterable[ClusterNode], local_cores: frozenset[int] | None
) -> dict[str, Placement]:
    """Return, by pool name, the placement that all workers of the pool get.

    nodes: the cluster's machines. local_cores: if the cluster is only this machine, its CPU cores, which are shared out
    among the workers. None = several machines; workers are then pinned only to cores that their settings name. Raises
    ConfigError if there are not enough resources.
    """
    nodes = list(nodes)
    devices = {pool.name: _device(pool, nodes) for pool in config.pools}
    gpus = _gpus(config.pools, devices, nodes)
    memory = _gpu_memory(config.pools, gpus, nodes, config.gpu_memory_utilization)
    on_cpu = [pool for pool in config.pools if devices[pool.name] == "cpu"]
    cpus = _shared_cpus(config.pools, on_cpu, local_cores)
    placements = dict[str, Placement]()
    for pool in config.pools:
        visible_devices = None
        if devices[pool.name] == "cpu":
            visible_devices = NO_GPU
        whole = Placement(
            device=devices[pool.name],
            num_gpus=gpus[pool.name],
            num_cpus=pool.num_cpus or cpus.get(pool.name, 1.0),
            num_cores=_num_cores(pool, cpus),
            visible_devices=visible_devices,
            labels=pool.labels,
            gpu_memory_utilization=memory.get(pool.name),
        )
        placements[pool.name] = _split(pool, whole)
    return placements


def check_capacity(required: Mapping[str, tuple[Placement, int]], nodes: Iterable[ClusterNode], verb: str) -> None:
    """Raise ConfigError if the workers cannot be spread over the nodes.

    required: a worker's placement and the number of workers, by pool. verb: what the error's text says of the cluster:
    "has" if `nodes` are total resources, "has free" if they are free ones.
    """
    nodes = list(nodes)
    workers = list[Placement]()
    needed = list[str]()
    for name, (placement, count) in required.items():
        workers += [placement] * count
        needed.append(f"{count} x {name}: {_amounts(placement)}")
    workers.sort(key=lambda worker: (worker.num_gpus, worker.num_cpus * worker.num_ranks), reverse=True)
    if _Spreading(workers, nodes).can_place():
        return
    required_text = "; ".join(needed)
    offered = "; ".join(f"{node.num_gpus:g} GPU, {node.num_cpus:g} CPU{_labels(node.labels)}" for node in nodes)
    raise ConfigError(
        f"the workers cannot be placed: they need [{required_text}] and the cluster {verb} "
        f"[{offered or 'no node'}] by node; choose device cpu, fewer cores or a share of a GPU, "
        "other labels, or add a node"
    )


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether a node's labels match a label selector of Ray. The selector has one condition for each label name:
    value, !value, in(...) or !in(...).
    """
    return all(_has(labels.get(key), condition) for key, condition in selector.items())


def _has(value: str | None, condition: str) -> bool:
    # "in(a, b)" has "a"; "!in(a, b)" has "c"; "!a" has None
    is_negated = condition.startswith("!")
    positive = condition.removeprefix("!")
    choices = [positive]
    match = _IN.fullmatch(positive)
    if match is not None:
        choices = [choice.strip() for choice in match[1].split(",")]
    return (value in choices) is not is_negated


def _amounts(placement: Placement) -> str:
    num_gpus = placement.num_gpus * placement.num_ranks
    num_cpus = placement.num_cpus * placement.num_ranks
    return f"{num_gpus:g} GPU, {num_cpus:g} CPU{_labels(placement.labels)}"


def _labels(labels: Mapping[str, str]) -> str:
    shown = [f"{key}={value}" for key, value in labels.items() if not key.startswith("ray.io/")]
    if not shown:
        return ""
    return f" with {', '.join(shown)}"


Free = tuple[float, float]
"""Numbers of free CPUs and of free GPUs of one machine."""


class _Spreading:
    """Search for a way to spread workers over machines. All ways are tried; machines that are alike are tried once.

    If there are very many ways, the workers are assumed to fit.
    """

    def __init__(self, workers: Sequence[Placement], nodes: Sequence[ClusterNode]) -> None:
        self._workers = workers
        self._nodes = nodes
        self._num_steps = 0

    def can_place(self) -> bool:
        free = [(node.num_cpus, node.num_gpus) for node in self._nodes]
        num_cpus = sum(worker.num_cpus * worker.num_ranks for worker in self._workers)
        num_gpus = sum(worker.num_gpus * worker.num_ranks for worker in self._workers)
        if num_cpus > sum(node.num_cpus for node in self._nodes) + 1e-6:
            return False
        if num_gpus > sum(node.num_gpus for node in self._nodes) + 1e-6:
            return False
        return self._can_place_from(0, free)

    def _can_place_from(self, index: int, free: list[Free]) -> bool:
        """Return whether the workers from `index` on fit into the free resources."""
        self._num_steps += 1
        if index == len(self._workers) or self._num_steps > _MAX_STEPS:
            return True
        worker = self._workers[index]
        tried = set[object]()
        for at, (num_cpus, num_gpus) in enumerate(free):
            remaining = (
                round(num_cpus - worker.num_cpus * worker.num_ranks, 4),
                round(num_gpus - worker.num_gpus * worker.num_ranks, 4),
            )
            labels = self._nodes[at].labels
            kind = (num_cpus, num_gpus, tuple(sorted(labels.items())))
            if kind in tried or min(remaining) < 0 or not matches(labels, worker.labels):
                continue
            tried.add(kind)
            if self._can_place_from(index + 1, [*free[:at], remaining, *free[at + 1 :]]):
                return True
        return False


def _rounded_down(amount: float) -> float:
    """Return the amount rounded down to a whole number or, below 1, to hundredths, as Ray counts CPUs and GPUs."""
    if amount >= 1:
        return float(int(amount))
    return int(100 * amount) / 100


def _shared_cpus(pools: Iterable[Pool], on_cpu: list[Pool], local_cores: frozenset[int] | None) -> dict[str, float]:
    """Return the CPUs of each worker on the only machine by pool name, for pools that do not set num_cpus.

    Workers with cores in their settings have these, or parts of cores that several of them name. The remaining cores,
    without the CPUs that pools set, are shared by the other workers on CPUs.
    """
    # cores 0 to 3, a target on cores 0,1: 2.0; a draft without any: the remaining 2.0
    if local_cores is None:
        return {}
    given = given_cores({pool.name: pool.worker for pool in pools})
    check_offered(given.values(), local_cores)
    num_users = Counter[int]()
    for pool in pools:
        for core in given.get(pool.name, ()):
            num_users[core] += pool.max
    cpus: dict[str, float] = {}
    for name, cores in given.items():
        cpus[name] = _rounded_down(sum(1 / num_users[core] for core in cores))
    free = (local_cores - frozenset().union(*given.values())) or local_cores
    num_set = 0
    sharing = list[Pool]()
    num_sharing = {"target": 0, "draft": 0}
    for pool in on_cpu:
        if pool.num_cpus is not None:
            num_set += int(max(1.0, pool.num_cpus)) * pool.max
        elif pool.name in given:
            continue
        elif pool.has_model:
            sharing.append(pool)
            num_sharing[pool.role] += pool.max
        else:
            cpus[pool.name] = 0.0
    of_target, of_draft = shares(max(1, len(free) - num_set), num_sharing["target"], num_sharing["draft"])
    by_role = {"target": of_target, "draft": of_draft}
    for pool in sharing:
        cpus[pool.name] = by_role[pool.role]
    return cpus


def _num_cores(pool: Pool, cpus: Mapping[str, float]) -> int | None:
    if pool.worker.cpu_cores is not None:
        return None
    amount = pool.num_cpus
    if amount is None:
        amount = cpus.get(pool.name)
    if not amount:
        return None
    return max(1, int(amount))


def _split(pool: Pool, whole: Placement) -> Placement:
    """Return the placement of each rank of a split target. `whole` has the CPUs of all ranks, and the GPUs of one
    rank.
    """
    num_ranks = _num_ranks(pool)
    if num_ranks == 1:
        return whole
    if whole.num_cores is None and pool.worker.cpu_cores is None:
        return replace(whole, num_ranks=num_ranks)
    num_cores = whole.num_cores
    if num_cores is not None:
        num_cores = max(1, num_cores // num_ranks)
    num_cpus = _rounded_down(whole.num_cpus / num_ranks)
    return replace(whole, num_ranks=num_ranks, num_cpus=num_cpus, num_cores=num_cores)


def _device(pool: Pool, nodes: list[ClusterNode]) -> str:
    if not pool.has_model:
        return "cpu"
    num_gpus = sum(node.num_gpus for node in nodes if matches(node.labels, pool.labels))
    device = pool.worker.device
    if device == "auto":
        if num_gpus:
            return "cuda"
        return "cpu"
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
    """Return the GPUs of each worker (for a split target, of each rank) by pool name.

    If there is only one GPU, several workers share what pools do not set of it by the sizes of their models.
    """
    users = [pool for pool in pools if devices[pool.name] == "cuda"]
    shares: dict[str, float] = {}
    if _have_one_gpu(users, nodes):
        num_used = 0.0
        unset = list[Pool]()
        for pool in users:
            if pool.num_gpus is None:
                unset.append(pool)
            else:
                num_used += pool.num_gpus * pool.max
        for name, share in gpu_shares(unset).items():
            shares[name] = int(100 * share * max(0.0, 1 - num_used)) / 100
    return {pool.name: _gpus_of(pool, devices[pool.name], shares.get(pool.name) or 1.0) for pool in pools}


def _have_one_gpu(users: Sequence[Pool], nodes: Iterable[ClusterNode]) -> bool:
    """Return whether several workers, none of them split, share one GPU."""
    num_workers = 0
    for pool in users:
        if _num_ranks(pool) > 1:
            return False
        num_workers += pool.count
    return num_workers > 1 and sum(node.num_gpus for node in nodes) < 2


def _gpu_memory(
    pools: Sequence[Pool], gpus: Mapping[str, float], nodes: Sequence[ClusterNode], utilization: float | None
) -> dict[str, float]:
    """Return `gpu_memory_utilization` by pool name, for pools whose workers share a GPU.

    They share it as fractions that Ray counts or, unknown to Ray, through nodes with the same GPU_LABEL. wanted:
    fraction of a GPU's memory that its workers may take together, also a worker that has a GPU of its own; None =
    GPU_FRACTION of a shared GPU.
    """
    sharing = [pool for pool in pools if 0 < gpus[pool.name] < 1]
    if all(pool.num_gpus is None for pool in sharing):
        memory = utilizations(sharing, utilization)
    else:
        memory = {pool.name: utilization_of(gpus[pool.name], utilization or GPU_FRACTION) for pool in sharing}
    pools_by_gpu: dict[str, list[Pool]] = {}
    for pool in pools:
        if gpus[pool.name] != 1 or _num_ranks(pool) > 1:
            continue
        gpu = _only_gpu(pool, nodes)
        if gpu is not None:
            pools_by_gpu.setdefault(gpu, []).append(pool)
    for users in pools_by_gpu.values():
        memory.update(utilizations(users, utilization))
    if utilization is None:
        return memory
    for pool in pools:
        if gpus[pool.name] >= 1 and pool.worker.gpu_memory_utilization is None:
            memory.setdefault(pool.name, utilization)
    return memory


def _only_gpu(pool: Pool, nodes: Iterable[ClusterNode]) -> str | None:
    """Return the value of GPU_LABEL on all nodes with a GPU that the pool's labels select; None if the values
    differ.
    """
    values = set[str | None]()
    for node in nodes:
        if node.num_gpus and matches(node.labels, pool.labels):
            values.add(node.labels.get(GPU_LABEL))
    if len(values) != 1:
        return None
    return values.pop()


def _gpus_of(pool: Pool, device: str, share: float) -> float:
    num_gpus = pool.num_gpus
    num_ranks = _num_ranks(pool)
    if device == "cpu":
        if num_gpus is not None:
            raise ConfigError(
                f"{pool.setting}.num_gpus is {num_gpus:g} and {pool.setting}.device is 'cpu'; leave one of them out"
            )
        return 0.0
    if num_ranks > 1 and num_gpus is not None and num_gpus != num_ranks:  # ranks on one GPU cannot communicate
        raise ConfigError(
            f"{pool.setting}.num_gpus is {num_gpus:g} and {pool.setting}.tensor_parallel {num_ranks}: a rank takes one "
            f"GPU, no less and no more; say {num_ranks} or leave it out"
        )
    if num_ranks > 1:
        return 1.0
    if num_gpus is None:
        return share
    return num_gpus


def _num_ranks(pool: Pool) -> int:
    if isinstance(pool.worker, TargetConfig):
        return pool.worker.tensor_parallel
    return 1
