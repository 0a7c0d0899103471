"""Measure how much memory a model takes and how much of the rest its KV cache may have. Used by the loader."""

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
from outrider.wire.processes import places
from outrider.wire.settings.config import GPU_FRACTION
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    (".", "memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)
"""(folder, limit, use, page cache entries of memory.stat) of cgroup v2, and of v1, where no limit is a huge number."""

TURN_TIMEOUT_S = 300.0
"""Seconds that a worker waits for others to size their caches: a third of what a launcher gives it to load."""


@dataclass(frozen=True, slots=True)
class Spare:
    """Memory that is left for heads beside weights, KV cache and a full step, in bytes."""

    num_bytes: int = 0
    tap_bytes: int = 0
    """Bytes that each hidden state that is tapped takes of them while steps run."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of this process's share of the model, known before the cache is sized, in bytes."""

    weights_bytes: int
    activations_bytes: int
    """Bytes of a full step at the default K, computed from the model's widths. Requests may ask for a larger K."""
    free_bytes: int
    """Bytes free with the weights loaded."""
    graphs_bytes: int = 0
    """Bytes of captured graphs: the activations of their widest step."""
    tap_bytes: int = 0
    """As `Spare.tap_bytes`."""

    def spare(self, cache_bytes: int) -> Spare:
        """Return what such a cache leaves."""
        num_bytes = self.free_bytes - self.activations_bytes - self.graphs_bytes - cache_bytes
        return Spare(max(0, num_bytes), self.tap_bytes)

    def num_blocks(self, block_bytes: int, num_wanted: int, fraction: float) -> int:
        """Return at most num_wanted blocks, within that fraction of free memory, sparing a full step at the default K.

        Raises ConfigError when there is room for none.
        """
        room = min(int(self.free_bytes * fraction), self.free_bytes - self.activations_bytes) - self.graphs_bytes
        if room < block_bytes:
            raise ConfigError(
                f"no memory for a KV cache: a block takes {block_bytes} bytes, and of {self.free_bytes} free ones "
                f"{max(room, 0)} are for the cache (kv_cache_fraction {fraction:g}, and about "
                f"{self.activations_bytes + self.graphs_bytes} bytes for a step); free some, lower max_slots or "
                "max_prefill_tokens, or set kv_cache_tokens; where others share the GPU, raise gpu_memory_utilization"
            )
        return min(num_wanted, room // block_bytes)

    def check(self, kv_cache_tokens: int, num_bytes: int, most_tokens: int, device: str) -> None:
        """Raise ConfigError when a cache of a set size has no room."""
        if num_bytes > self.free_bytes:
            raise ConfigError(
                f"kv_cache_tokens is {kv_cache_tokens}, which takes {num_bytes} bytes, and {device} has "
                f"{self.free_bytes} free; lower it to at most {most_tokens}",
                param="kv_cache_tokens",
            )


def weights_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights: tied ones count once, quantised ones as they are stored."""
    return sum(_stored_bytes(parameter.data) for parameter in model.parameters())


def _stored_bytes(tensor: Tensor) -> int:
    if isinstance(tensor, DTensor):  # a split model's: count this rank's share
        return _stored_bytes(tensor.to_local())
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.numel() * tensor.element_size()
    return sum(_stored_bytes(getattr(tensor, name)) for name in flatten()[0])


def activations_bytes(config: PreTrainedConfig, itemsize: int, step_tokens: int) -> int:
    """Return about what a forward holds at once, in bytes: its widest layer's tensors.

    config: the text model's. step_tokens: fed by the fullest step.
    """
    num_layers = getattr(config, "num_hidden_layers", None) or 1
    return step_tokens * itemsize * max(_token_activations(layer_config(config, index)) for index in range(num_layers))


def _token_activations(config: PreTrainedConfig) -> int:
    """Return about how many numbers a layer of that configuration holds for each token."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    widths = [
        getattr(config, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
    ]
    widest = max([width for width in widths if isinstance(width, int)], default=4 * hidden)
    inner = max(3 * widest, 4 * heads * head_dim)  # gate, up, product or q k v o
    return 3 * hidden + inner  # residual, norm, input


def logits_bytes(num_logits: int) -> int:
    """Return the bytes of a step's logits where the host decides: in float32, and as the model gives them."""
    return 2 * num_logits * 4


def decision_bytes(num_logits: int) -> int:
    """Return the bytes that `decide_on_device` holds at once for a step's logits, them included.

    Rejection with penalties holds the most, 9.1 arrays of float32, where one of float64 counts twice. A tree with
    penalties holds 4.4 (the coupled rule three), and makes its noise for MAX_NUMBERS at a time, in twelve arrays of 8
    bytes.
    """
    return max(10 * 4 * num_logits, 5 * 4 * num_logits + 12 * 8 * min(num_logits, MAX_NUMBERS))


def masks_bytes(limits: Collection[tuple[int | None, int | None]], itemsize: int, num_tokens: int, context: int) -> int:
    """Return the bytes of the masks of a step's pieces of prompts, where attention takes them, and of the truth values
    that one is made from.

    limits: (window, chunk) of the layers, each once: those of the same limits share a mask. itemsize: bytes of one of
    its numbers, for all query heads that have a copy. num_tokens: of all pieces. context: most keys that one sees.
    """
    total = num_tokens * context
    for window, chunk in limits:
        reach = window or chunk or context
        total += num_tokens * min(context, num_tokens + reach) * itemsize
    return total


def index_scores_bytes(num_heads: int, num_tokens: int, context: int) -> int:
    """Return the bytes of a sparse indexer's scores, of so many heads, of all pieces of prompts: products in float32,
    and what is left of them. context: most keys that one sees.
    """
    return 2 * 4 * num_heads * num_tokens * context


def scores_bytes(config: PreTrainedConfig, itemsize: int, num_tokens: int) -> int:
    """Return about what an encoder's layer holds for each pair of tokens of one source, in bytes: a bias of position,
    and its sum with the mask.
    """
    return 2 * config.num_attention_heads * num_tokens**2 * itemsize


def readable_bytes(count: int) -> str:
    """Return the count in a unit for people: 1536 becomes 1.5 KiB."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}" if units[0] != "bytes" else f"{count} bytes"


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Hold a lock while free memory of a GPU is counted and taken, so that two workers do not count the same.

    The lock is this user's on this machine. Without a place for it nobody waits.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(places.hold_lock(places.shared_folder() / "memory.lock", TURN_TIMEOUT_S))
        except ConfigError as error:
            log.warning("free memory is counted without a lock: %s", error.message)
        yield


def new_storage(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a cache: on a CPU zeros that the machine gives page by page as they are written, on a GPU
    uninitialised. Raises OSError or RuntimeError where there is none.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def free_memory_bytes(device: torch.device) -> int:
    """Return the device's free bytes; on CPU what can be had without swapping, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free, allowed = _available_bytes(), _allowed_bytes()
    return free if allowed is None else min(free, allowed)


def shared_memory_bytes(device: torch.device, utilization: float, weights_bytes: int) -> int:
    """Return the free bytes of a GPU within this process's share of it.

    utilization: the share of the GPU's whole memory. Raises ConfigError where weights of that size leave nothing.
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
    return min(int(free * GPU_FRACTION), allowed - taken)  # of what is free, where somebody else takes more


@contextlib.contextmanager
def fits(model: str, device: torch.device) -> Iterator[None]:
    """Load the model. Raises ConfigError, which says what to set, in place of torch's OutOfMemoryError."""
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
    """Return what the container's limit leaves, its page cache counted as free; None without a limit."""
    for folder, limit_file, used_file, page_cache in _LIMITS:
        limit, used = _read_int(_CGROUP / folder / limit_file), _read_int(_CGROUP / folder / used_file)
        if limit is not None and used is not None:
            counts = _counts(_CGROUP / folder / "memory.stat")
            return max(limit - used + sum(counts.get(name, 0) for name in page_cache), 0)
    return None


def _counts(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value in map(str.split, lines)}


def _available_bytes() -> int:
    """Return MemAvailable, which counts the page cache as free and sysconf does not: weights just read are in it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_int(path: Path) -> int | None:
    """Return the number, or None when there is no such file or it holds "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
