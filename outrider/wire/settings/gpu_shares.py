"""Values of `gpu_memory_utilization` for workers that share one GPU: each gets a fraction by the size of its model.

Used by the launcher's placement and by `outrider up --no-ray`. The memory that a worker takes is then independent of
the order in which workers load, and of what other workers have taken so far.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from outrider.wire.errors import ConfigError
from outrider.wire.models.gguf_header import read_header
from outrider.wire.models.model_id import INDEX_FILE, SAFETENSORS_FILES, is_gguf, local_path, split_hub_id
from outrider.wire.models.model_json import parse_weight_map
from outrider.wire.settings.config import GPU_FRACTION, TargetConfig
from outrider.wire.settings.pools import Pool

OVERHEAD_BYTES = 2 << 30
"""Bytes of GPU memory that a worker needs in addition to weights and KV cache. Sampling and acceptance in a full step
of 64 slots with a vocabulary of 128,256 take 1.8 GiB."""
UNPACKED_BYTES = 2
"""Bytes that each weight of a GGUF file takes on a GPU once it is unpacked to bfloat16."""
MAX_INDEX_BYTES = 24 << 20
"""Maximum bytes of a weights index (model.safetensors.index.json) that is read. DeepSeek V3's has 9 MiB."""


def gpu_shares(pools: Iterable[Pool]) -> dict[str, float]:
    """Return the fraction of one GPU that each worker of a pool gets, by pool name, if all workers of the given pools
    run on that GPU. A pool counts with its maximum number of workers. Fractions are rounded down, and the sum over all
    workers is at most 1.

    The fraction of a worker is proportional to the bytes of its weights plus OVERHEAD_BYTES. If the size of a model
    cannot be found on this machine, all draft workers together get a quarter and the targets the rest.
    """
    # Weights of 14 and 2 GiB: 16 and 4 GiB with overhead, so 0.8 and 0.2.
    sharing = list(pools)
    amounts = _amounts_by_weights(sharing)
    if amounts is None:
        amounts = _amounts_by_role(sharing)
    total = sum(amounts[pool.name] * pool.max for pool in sharing)
    return {name: share_of(amount, total) for name, amount in amounts.items()}


def share_of(amount: float, total: float) -> float:
    """Return `amount` divided by `total`, rounded down to two decimals."""
    return int(100 * amount / total) / 100


def needed_bytes(num_weight_bytes: float) -> float:
    """Return the bytes of GPU memory that a worker needs besides its KV cache: those of its weights, plus
    OVERHEAD_BYTES. Workers on one GPU get shares of it in proportion to this number.
    """
    return num_weight_bytes + OVERHEAD_BYTES


def utilization_of(share: float, fraction: float = GPU_FRACTION) -> float:
    """Return the setting `gpu_memory_utilization` for a worker: `share` times `fraction`, rounded down to three
    decimals.

    share: the worker's fraction of the memory that workers divide among them. fraction: that memory as a fraction of
    the GPU's.
    """
    return int(1000 * share * fraction) / 1000


def utilizations(pools: Iterable[Pool], max_fraction: float | None = None) -> dict[str, float]:
    """Return the setting `gpu_memory_utilization` for each worker of a pool, by pool name, if the pools share one GPU.

    Pools whose settings have a value keep it and are not in the result; the other pools share what remains.
    max_fraction: fraction of the GPU that all workers may take together. None = GPU_FRACTION, and a worker that is
    alone on the GPU gets no value, since the free memory decides. Raises ConfigError if nothing remains for the other
    pools.
    """
    sharing = list(pools)
    if max_fraction is None and sum(pool.count for pool in sharing) < 2:
        return {}
    fraction = GPU_FRACTION
    if max_fraction is not None:
        fraction = max_fraction
    taken = sum((pool.worker.gpu_memory_utilization or 0.0) * pool.max for pool in sharing)
    open_pools = [pool for pool in sharing if pool.worker.gpu_memory_utilization is None]
    remaining = fraction - taken
    if open_pools and remaining <= 0:
        raise ConfigError(
            f"{open_pools[0].setting} shares a GPU with workers whose gpu_memory_utilization is {taken:g} in all, and "
            f"{fraction:g} may be taken; lower theirs, or name another device",
            param="gpu_memory_utilization",
        )
    return {name: utilization_of(share, remaining) for name, share in gpu_shares(open_pools).items()}


def num_weight_bytes(model: str) -> int | None:
    """Return the bytes of a model's weights. They are the sizes of its safetensors files in a folder or in the hub's
    cache, or the size of a GGUF file's weights after unpacking. None = this machine does not have all of these files.
    """
    try:
        if is_gguf(model):
            return _num_unpacked_bytes(model)
        paths = _weight_files(model)
        if not paths:
            return None
        return sum(path.stat().st_size for path in paths)
    except (ConfigError, OSError):  # the worker reports what is wrong with the model
        return None


def _weight_files(model: str) -> list[Path]:
    # Empty where one of them is missing.
    index = _find(model, INDEX_FILE)
    if index is not None:
        return _indexed_files(model, index)
    for name in SAFETENSORS_FILES:
        path = _find(model, name)
        if path is not None:
            return [path]
    return []


def _indexed_files(model: str, index: Path) -> list[Path]:
    with index.open("rb") as file:
        weight_map = parse_weight_map(file.read(MAX_INDEX_BYTES), str(index))
    paths = list[Path]()
    for shard in sorted(set(weight_map.values())):
        path = _find(model, shard)
        if path is None:
            return []
        paths.append(path)
    return paths


def _num_unpacked_bytes(model: str) -> int | None:
    path = local_path(model)
    if path is None:
        repository, name = split_hub_id(model)
        if name is not None:
            path = _find(repository, name)
    if path is None:
        return None
    return UNPACKED_BYTES * sum(tensor.num_elements for tensor in read_header(path).tensors.values())


def _find(model: str, name: str) -> Path | None:
    folder = local_path(model)
    if folder is not None:
        path = folder / name
        if not path.is_file():
            return None
        return path
    with contextlib.suppress(ImportError, ValueError):  # the library is not installed, or it is no id of a hub
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, name)
        if isinstance(cached, str):
            return Path(cached)
    return None


def _amounts_by_weights(pools: Sequence[Pool]) -> dict[str, float] | None:
    # Bytes of one worker by the pool's name; None where the size of a model is not known.
    amounts: dict[str, float] = {}
    for pool in pools:
        size = num_weight_bytes(pool.worker.model)
        if size is None:
            return None
        num_ranks = 1
        if isinstance(pool.worker, TargetConfig):
            num_ranks = pool.worker.tensor_parallel
        amounts[pool.name] = needed_bytes(size / num_ranks)
    return amounts


def _amounts_by_role(pools: Sequence[Pool]) -> dict[str, float]:
    # Of 1, for one worker, by the pool's name: two targets and a draft have 0.375, 0.375 and 0.25.
    num_workers = {"target": 0, "draft": 0}
    for pool in pools:
        num_workers[pool.role] += pool.max
    draft_amount = 0.25 if num_workers["target"] else 1.0
    amounts = {"target": 1 - draft_amount, "draft": draft_amount}
    return {pool.name: amounts[pool.role] / num_workers[pool.role] for pool in pools}
