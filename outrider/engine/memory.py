"""Count the memory that a model takes and that its KV cache may take. Called by the loaders of models and heads."""

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
"""Seconds that a worker waits for others to size their caches: a third of the time that a launcher gives it to load."""


@dataclass(frozen=True, slots=True)
class SpareMemory:
    """Memory that remains for heads once the weights, the KV cache and a full step have theirs."""

    num_bytes: int = 0
    """Bytes that remain."""
    tap_bytes: int = 0
    """Bytes of them that each tapped hidden state takes while steps run."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory of this process's share of the model, as it is known before the KV cache is sized."""

    weights_bytes: int
    """Bytes of the loaded weights."""
    activations_bytes: int
    """Bytes of a full step at the default K, computed from the model's widths. Requests may ask for a larger K."""
    free_bytes: int
    """Bytes that are free on the device with the weights loaded."""
    graphs_bytes: int = 0
    """Bytes of captured CUDA graphs: the activations of their widest step."""
    tap_bytes: int = 0
    """Bytes that each tapped hidden state takes while steps run."""

    def spare(self, cache_bytes: int) -> SpareMemory:
        """Return the memory that remains for heads beside a KV cache of `cache_bytes`."""
        num_bytes = self.free_bytes - self.activations_bytes - self.graphs_bytes - cache_bytes
        return SpareMemory(max(0, num_bytes), self.tap_bytes)

    def num_blocks(self, block_bytes: int, num_wanted: int, fraction: float) -> int:
        """Return how many blocks of `block_bytes` the KV cache may have, at most `num_wanted`.

        The cache takes at most `fraction` of the free memory, and leaves a full step at the default K its activations
        and the graphs theirs. Raises ConfigError when not even one block fits.
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
        """Raise ConfigError when a KV cache of the set size, `num_bytes`, does not fit into the free memory.

        max_tokens: the largest `kv_cache_tokens` that fits, for the message. device: its name, for the message.
        """
        if num_bytes > self.free_bytes:
            raise ConfigError(
                f"kv_cache_tokens is {kv_cache_tokens}, which takes {num_bytes} bytes, and {device} has "
                f"{self.free_bytes} free; lower it to at most {max_tokens}",
                param="kv_cache_tokens",
            )


def weights_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights: tied ones count once, quantised ones as they are stored."""
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
    """Return about the bytes of activations that a forward holds at once: those of its widest layer.

    config: the text model's configuration. itemsize: bytes of one number. step_tokens: tokens of the fullest step.
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
    """Return the bytes of a step's logits where the host decides: once as the model returns them, once in float32.

    num_logits: rows times vocabulary.
    """
    return 2 * num_logits * 4


def decision_bytes(num_logits: int) -> int:
    """Return the bytes that `decide_on_device` holds at once for a step's logits, the logits included.

    num_logits: rows times vocabulary. Measured: the `rejection` rule with penalties holds 9.1 arrays of float32 (one of
    float64 counts twice), the most of all. A tree with penalties holds 4.4 of them (3 under `coupled`), and makes its
    noise for at most MAX_NUMBERS numbers at a time, in twelve arrays of 8 bytes.
    """
    rejection = 10 * 4 * num_logits
    tree = 5 * 4 * num_logits + 12 * 8 * min(num_logits, MAX_NUMBERS)
    return max(rejection, tree)


def masks_bytes(limits: Collection[tuple[int | None, int | None]], itemsize: int, num_tokens: int, context: int) -> int:
    """Return the bytes of the attention masks of a step's prefill rows, for a backend that takes masks.

    Counted are one mask for each (window, chunk) of `limits`, which layers of equal limits share, and the booleans that
    a mask is made from. itemsize: bytes of one number of a mask, times the query heads that have a copy of it.
    num_tokens: tokens of all prefill rows. context: the most keys that a row sees.
    """
    # limits {(None, None), (4, None)}, itemsize 2, 3 tokens, context 10: 30 booleans, masks of 3 x 10 and 3 x 7 numbers
    total = num_tokens * context
    for window, chunk in limits:
        reach = window or chunk or context
        total += num_tokens * min(context, num_tokens + reach) * itemsize
    return total


def index_scores_bytes(num_heads: int, num_tokens: int, context: int) -> int:
    """Return the bytes of a sparse indexer's scores of a step's prefill rows: two arrays of float32 at once.

    num_heads: heads of the indexer. num_tokens: tokens of all prefill rows. context: the most keys that a row sees.
    """
    return 2 * 4 * num_heads * num_tokens * context


def scores_bytes(config: PreTrainedConfig, itemsize: int, num_tokens: int) -> int:
    """Return about the bytes of an encoder layer's scores of one source of `num_tokens` tokens.

    Counted are a bias by position, and its sum with the mask: each [heads, num_tokens, num_tokens].
    """
    return 2 * config.num_attention_heads * num_tokens**2 * itemsize


def readable_bytes(count: int) -> str:
    """Return a number of bytes in a unit for people: 1536 becomes 1.5 KiB."""
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
    """Hold a lock while a GPU's free memory is counted and taken, so that no two workers take the same memory.

    The lock is shared by this user's processes on this machine. Where the lock file cannot be made or is not released
    in TURN_TIMEOUT_S, a warning is logged and the block runs without the lock.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(folders.hold_lock(folders.shared_folder() / "memory.lock", LOCK_TIMEOUT_S))
        except ConfigError as error:
            log.warning("free memory is counted without a lock: %s", error.message)
        yield


def new_storage(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate the storage of a cache: on a GPU uninitialised; on a CPU zeros, whose memory the kernel assigns page by
    page when they are first written to. Raises OSError or RuntimeError where memory is lacking.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes that are free on the device; on a CPU those available without swapping, within the container's
    limit.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _available_bytes()
    allowed = _allowed_bytes()
    if allowed is not None:
        free = min(free, allowed)
    return free


def shared_memory_bytes(device: torch.device, utilization: float, weights_bytes: int) -> int:
    """Return the bytes of a GPU that are free and within this process's share of it.

    utilization: this process's share of the GPU's whole memory, 0 to 1. Raises ConfigError where weights of
    `weights_bytes` leave nothing of the share.
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
    """Raise ConfigError, with the settings to change, in place of torch's OutOfMemoryError while `model` is loaded."""
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
