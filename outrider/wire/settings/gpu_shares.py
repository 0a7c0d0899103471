"""Share the memory of one GPU out among the workers that are placed on it. No torch.

One rule for the launcher's placement and for `outrider up --no-ray`: each worker gets a share of the whole GPU by the
size of its model, as its `gpu_memory_utilization`. What a worker takes then depends neither on the order in which
workers load nor on what another has taken so far.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from outrider.wire.errors import ConfigError
from outrider.wire.models.gguf_header import read_header
from outrider.wire.models.model_id import INDEX, SAFE, is_gguf, local_path, split_hub_id
from outrider.wire.models.model_json import parse_weight_map
from outrider.wire.settings.config import GPU_FRACTION, TargetConfig
from outrider.wire.settings.pools import Pool

OVERHEAD_BYTES = 2 << 30
"""Bytes of a worker beside weights and KV cache. A full step of 64 slots with a vocabulary of 128,256 decides in 1.8
GiB (`loading.memory.decision_bytes`)."""
UNPACKED_BYTES = 2
"""Bytes of a number of a GGUF file as a GPU holds it, bfloat16."""
MAX_INDEX_BYTES = 24 << 20
"""Bytes of an index of weights that are read; DeepSeek V3's has 9 MiB."""


def gpu_shares(pools: Iterable[Pool]) -> dict[str, float]:
    """Return the share of one GPU that a worker of each pool gets, by the pool's name; rounded down, together at most
    1. Each pool has `max` workers there.

    A share is in proportion to weights and OVERHEAD_BYTES, so all the rest of the memory is, too. Where the size of a
    model is not known here, drafts get a quarter in all, as they do of a machine's cores.
    """
    sharing = list(pools)
    amounts: dict[str, float] = {}
    for pool in sharing:
        size = num_weight_bytes(pool.worker.model)
        if size is None:
            amounts = _amounts_by_role(sharing)
            break
        num_ranks = pool.worker.tensor_parallel if isinstance(pool.worker, TargetConfig) else 1
        amounts[pool.name] = needed_bytes(size / num_ranks)
    total = sum(amounts[pool.name] * pool.max for pool in sharing)
    return {name: share_of(amount, total) for name, amount in amounts.items()}


def share_of(amount: float, total: float) -> float:
    """Return the share of one GPU for an amount of that total, rounded down to hundredths."""
    return int(100 * amount / total) / 100


def needed_bytes(num_weight_bytes: float) -> float:
    """Return the bytes by which the share of a worker with weights of that size is reckoned."""
    return num_weight_bytes + OVERHEAD_BYTES


def utilization_of(share: float, fraction: float = GPU_FRACTION) -> float:
    """Return `gpu_memory_utilization` of a worker that has that share of this fraction of a GPU, rounded down to
    thousandths.
    """
    return int(1000 * share * fraction) / 1000


def utilizations(pools: Iterable[Pool], wanted: float | None = None) -> dict[str, float]:
    """Return `gpu_memory_utilization` of the pools whose workers have one GPU between them, by the pool's name.

    Pools whose settings have it keep theirs, and the others share the rest. wanted: what all of them may take of the
    GPU; None = GPU_FRACTION, and a worker alone takes what it finds.
    """
    users = list(pools)
    fraction = GPU_FRACTION if wanted is None else wanted
    if wanted is None and sum(pool.count for pool in users) < 2:
        return {}
    taken = sum((pool.worker.gpu_memory_utilization or 0.0) * pool.max for pool in users)
    open_pools = [pool for pool in users if pool.worker.gpu_memory_utilization is None]
    remaining = fraction - taken
    if open_pools and remaining <= 0:
        raise ConfigError(
            f"{open_pools[0].setting} shares a GPU with workers whose gpu_memory_utilization is {taken:g} in all, and "
            f"{fraction:g} may be taken; lower theirs, or name another device",
            param="gpu_memory_utilization",
        )
    return {name: utilization_of(share, remaining) for name, share in gpu_shares(open_pools).items()}


def num_weight_bytes(model: str) -> int | None:
    """Return the bytes of a model's safetensors files, in its folder or in the hub's cache, or of a GGUF file's weights
    when they are unpacked; None where not all of them are on this machine.
    """
    try:
        if is_gguf(model):
            return _num_unpacked_bytes(model)
        paths = _weight_files(model)
        return sum(path.stat().st_size for path in paths) if paths else None
    except (ConfigError, OSError):  # the worker says what is wrong with it
        return None


def _weight_files(model: str) -> list[Path]:
    index = _find(model, INDEX)
    if index is not None:
        with index.open("rb") as file:
            shards = sorted(set(parse_weight_map(file.read(MAX_INDEX_BYTES), str(index)).values()))
        found = [_find(model, shard) for shard in shards]
        paths = [path for path in found if path is not None]
        return paths if len(paths) == len(shards) else []
    for name in SAFE:
        path = _find(model, name)
        if path is not None:
            return [path]
    return []


def _num_unpacked_bytes(model: str) -> int | None:
    path = local_path(model)
    if path is None:
        repository, name = split_hub_id(model)
        path = None if name is None else _find(repository, name)
    if path is None:
        return None
    return UNPACKED_BYTES * sum(tensor.num_elements for tensor in read_header(path).tensors.values())


def _find(model: str, name: str) -> Path | None:
    folder = local_path(model)
    if folder is not None:
        path = folder / name
        return path if path.is_file() else None
    with contextlib.suppress(ImportError, ValueError):  # no library, or no id of a hub
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, name)
        return Path(cached) if isinstance(cached, str) else None
    return None


def _amounts_by_role(pools: Sequence[Pool]) -> dict[str, float]:
    numbers = {"target": 0, "draft": 0}
    for pool in pools:
        numbers[pool.role] += pool.max
    of_drafts = 0.25 if numbers["target"] else 1.0
    amounts = {"target": 1 - of_drafts, "draft": of_drafts}
    return {pool.name: amounts[pool.role] / numbers[pool.role] for pool in pools}
