"""Compute the memory that a model takes, and the memory that its KV cache may take. Called by the loaders of models and
heads.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from outrider.engine.architectures.layer_memory import layer_config
from outrider.engine.files.model_files import first_line
from outrider.engine.sampling.coupled import MAX_NUMBERS
from outrider.wire.errors import ConfigError
from outrider.wire.processes import folders
from outrider.wire.settings.config import GPU_FRACTION
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    (".", "memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)
"""Files of a container's memory limit, of cgroup v2 and of v1: (folder, limit, bytes in use, entries of memory.stat
that count the page cache). No limit is "max" in v2 and a huge number in v1."""

LOCK_TIMEOUT_S = 300.0
"""Seconds for which a worker waits while other workers size their caches: a third of the time that a launcher allows
for loading."""


@dataclass(frozen=True, slots=True)
class SpareMemory:
    """Memory that is left for heads, after the weights, the KV cache and a full step."""

    num_bytes: int = 0
    """Size of this memory in bytes."""
    tap_bytes: int = 0
    """Bytes of this memory that a tap takes: its hidden states of full steps, also those in captured CUDA graphs."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory on this process's device, as it is known before the KV cache is sized. If a model is split over several
    processes, it is the memory of one of them.
    """

    weights_bytes: int
    """Size of the loaded weights in bytes."""
    activations_bytes: int
    """Bytes of activations of a full step at the default K (a larger one may take more), by the model's widths."""
    free_bytes: int
    """Bytes that are free on the device after the weights were loaded."""
    graphs_bytes: int = 0
    """Bytes of the captured CUDA graphs: as many as the activations of the widest captured step."""
    tap_bytes: int = 0
    """Bytes that a tap takes: its hidden states of full steps, also those in captured CUDA graphs."""

    def spare(self, cache_bytes: int) -> SpareMemory:
        """Return the memory that is left for heads beside a KV cache of `cache_bytes`."""
        num_bytes = self.free_bytes - self.activations_bytes - self.graphs_bytes - cache_bytes
        return SpareMemory(max(0, num_bytes), self.tap_bytes)

    def num_blocks(self, block_bytes: int, num_wanted: int, fraction: float) -> int:
        """Return the number of blocks, of `block_bytes` each, that the KV cache gets: at most `num_wanted`.

        The cache takes at most `fraction` of the free memory, and leaves enough for the activations of a full step at
        the default K and for the captured CUDA graphs. Raises ConfigError if there is not enough memory for one block.
        """
        # free 1000, activations 300, graphs 0, fraction 0.9: 700 bytes, so 7 blocks of 100
        available = min(int(self.free_bytes * fraction), self.free_bytes - self.activations_bytes) - self.graphs_bytes
        if available < block_bytes:
            raise ConfigError(
                f"no memory for a KV cache: a block takes {block_bytes} bytes, and of {self.free_bytes} free ones "
                f"{max(available, 0)} are for the cache (kv_cache_fraction {fraction:g}, and about "
                f"{self.activations_bytes + self.graphs_bytes} bytes for a step); free some, lower max_slots or "
                "max_prefill_tokens, or set kv_cache_tokens; where others share the GPU, raise gpu_memory_utilization"
            )
        return min(num_wanted, available // block_bytes)

    def check(self, kv_cache_tokens: int, num_bytes: int, max_tokens: int, device: str) -> None:
        """Raise ConfigError if a KV cache of the configured size, `num_bytes`, does not fit into the free memory.

        The other arguments are only for the message. kv_cache_tokens: value of the setting. max_tokens: its largest
        value that fits. device: the device's name.
        """
        if num_bytes > self.free_bytes:
            raise ConfigError(
                f"kv_cache_tokens is {kv_cache_tokens}, which takes {num_bytes} bytes, and {device} has "
                f"{self.free_bytes} free; lower it to at most {max_tokens}",
                param="kv_cache_tokens",
            )


def weights_bytes(model: nn.Module) -> int:
    """Return the size of a model's weights in bytes. Tied weights count once, quantised ones as they are stored."""
    return sum(_stored_bytes(parameter.data) for parameter in model.parameters())


def _stored_bytes(tensor: Tensor) -> int:
    if isinstance(tensor, DTensor):  # a weight that is split over ranks: count this rank's share
        return _stored_bytes(tensor.to_local())
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.numel() * tensor.element_size()
    names, _ = flatten()  # a subclass of Tensor that is made of others, such as integers and scales
    return sum(_stored_bytes(getattr(tensor, name)) for name in names)


def activations_bytes(config: PreTrainedConfig, itemsize: int, step_tokens: int) -> int:
    """Return roughly how many bytes of activations a forward holds at once: those of its widest layer.

    config: the text model's configuration. itemsize: bytes of one number. step_tokens: number of tokens of the fullest
    step.
    """
    num_layers = getattr(config, "num_hidden_layers", None) or 1
    widest = max(_activations_per_token(layer_config(config, index)) for index in range(num_layers))
    return step_tokens * itemsize * widest


def _activations_per_token(config: PreTrainedConfig) -> int:
    # About how many numbers a layer of this configuration holds for each token.
    hidden = config.hidden_size
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // num_heads
    mlp = max(3 * _mlp_width(config), 4 * num_heads * head_dim)  # gate, up and product, or q, k, v and o
    return 3 * hidden + mlp  # residual, norm and input


def _mlp_width(config: PreTrainedConfig) -> int:
    widths: list[int] = []
    for name in ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"):
        width = getattr(config, name, None)
        if isinstance(width, int):
            widths.append(width)
    return max(widths, default=4 * config.hidden_size)


def logits_bytes(num_logits: int) -> int:
    """Return the bytes of a step's logits if verdicts are computed on the host. The logits then exist twice: as the
    model returns them, and in float32.

    num_logits: number of rows times vocabulary size.
    """
    return 2 * num_logits * 4


def decision_bytes(num_logits: int) -> int:
    """Return the bytes that a device holds at once to compute a step's verdicts from its logits, including the logits.

    num_logits: number of rows times vocabulary size. Measured in arrays of num_logits float32 numbers: the `rejection`
    rule with penalties holds 9.1, the most of all rules; a tree with penalties holds 4.4, or 3 under `coupled`. A tree
    also holds 96 bytes for each of its random numbers, at most MAX_NUMBERS at a time.
    """
    rejection = 10 * 4 * num_logits
    tree = 5 * 4 * num_logits + 12 * 8 * min(num_logits, MAX_NUMBERS)
    return max(rejection, tree)


def masks_bytes(limits: Collection[tuple[int | None, int | None]], itemsize: int, num_tokens: int, context: int) -> int:
    """Return the bytes of the attention masks of a step's prefill rows, for an attention implementation that takes
    masks.

    limits: the different pairs (window, chunk) by which layers limit attention, in tokens; None = no limit. All layers
    of a pair share one mask. The result also counts the boolean array from which a mask is made. itemsize: bytes that a
    mask takes for a query and a key, in all copies for query heads. num_tokens: number of tokens of all prefill rows.
    context: maximum number of keys that a row attends to.
    """
    # limits {(None, None), (4, None)}, itemsize 2, 3 tokens, context 10: 30 booleans, masks of 3 x 10 and 3 x 7 numbers
    total = num_tokens * context
    for window, chunk in limits:
        reach = window or chunk or context
        total += num_tokens * min(context, num_tokens + reach) * itemsize
    return total


def index_scores_bytes(num_heads: int, num_tokens: int, context: int) -> int:
    """Return the bytes of the scores by which the indexer of a sparse attention layer chooses keys, for a step's
    prefill rows: two arrays of float32 at once.

    num_heads: number of heads of the indexer. num_tokens: number of tokens of all prefill rows. context: maximum number
    of keys that a row attends to.
    """
    return 2 * 4 * num_heads * num_tokens * context


def scores_bytes(config: PreTrainedConfig, itemsize: int, num_tokens: int) -> int:
    """Return roughly the bytes of an encoder layer's attention scores for one source of `num_tokens` tokens.

    Two arrays [heads, num_tokens, num_tokens] are counted: the position bias, and its sum with the mask. itemsize:
    bytes of one number.
    """
    return 2 * config.num_attention_heads * num_tokens**2 * itemsize


def readable_bytes(count: int) -> str:
    """Return a number of bytes as text in a fitting unit: 1536 becomes "1.5 KiB"."""
    if count < 1024:
        return f"{count} bytes"
    value = float(count)
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}"


@contextlib.contextmanager
def hold_memory_lock() -> Iterator[None]:
    """Context manager that holds a lock while a GPU's free memory is counted and taken, so that no two workers take the
    same memory.

    The lock is shared by this user's processes on this machine. If the lock file cannot be created or is not released
    within LOCK_TIMEOUT_S, a warning is logged and the body runs without the lock.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(folders.hold_lock(folders.shared_folder() / "memory.lock", LOCK_TIMEOUT_S))
        except ConfigError as error:
            log.warning("free memory is counted without a lock: %s", error.message)
        yield


def new_storage(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return new storage for a cache: uninitialised on a GPU; zeros on a CPU, where a page of memory
    is taken only when it is first written. Raises OSError or RuntimeError if there is too little memory.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def free_memory_bytes(device: torch.device) -> int:
    """Return the free memory of the device in bytes. For a CPU it is the memory that is available without swapping,
    within the container's limit.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _available_bytes()
    allowed = _allowed_bytes()
    if allowed is not None:
        free = min(free, allowed)
    return free


def shared_memory_bytes(device: torch.device, utilization: float, weights_bytes: int) -> int:
    """Return the bytes of a GPU that are free and that this process may use.

    utilization: fraction of the GPU's whole memory that this process may use, 0 to 1. Raises ConfigError if the loaded
    weights, of `weights_bytes`, use all of it.
    """
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(utilization * total)
    taken = max(weights_bytes, torch.cuda.memory_reserved(device))
    if taken >= allowed:
        raise ConfigError(
            f"gpu_memory_utilization is {utilization:g}, {readable_bytes(allowed)} of the {readable_bytes(total)} of "
            f"{device}, and the loaded model takes {readable_bytes(taken)}: raise it and lower that of the others "
            "there, or use another device, a smaller model or one that is quantised",
            param="gpu_memory_utilization",
        )
    return min(int(free * GPU_FRACTION), allowed - taken)  # less than the share where others have taken more


@contextlib.contextmanager
def explain_out_of_memory(model: str, device: torch.device) -> Iterator[None]:
    """Context manager for loading `model` that turns torch's OutOfMemoryError into a ConfigError with a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{device} has too little memory for {model}: {first_line(error)}; use another device, a smaller model or "
            "one that is quantised, or end what else runs there; where another worker does, lower its "
            "gpu_memory_utilization or kv_cache_tokens",
            param="device",
        ) from error


def _allowed_bytes() -> int | None:
    # What the container's limit leaves, its page cache counted as free; None without a limit.
    for folder, limit_file, used_file, page_cache in _LIMITS:
        limit = _read_int(_CGROUP / folder / limit_file)
        used = _read_int(_CGROUP / folder / used_file)
        if limit is not None and used is not None:
            counts = _read_counts(_CGROUP / folder / "memory.stat")
            cached = sum(counts.get(name, 0) for name in page_cache)
            return max(limit - used + cached, 0)
    return None


def _read_counts(path: Path) -> dict[str, int]:
    # Lines of a name and a number: "active_file 4096".
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value in map(str.split, lines)}


def _available_bytes() -> int:
    # MemAvailable counts the page cache as free, sysconf does not; weights that were just read are in it.
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    if not text.isdigit():  # "max"
        return None
    return int(text)
