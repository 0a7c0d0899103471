"""How much memory a KV cache may take. Used by the loader."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes(device: torch.device) -> int:
    """Of the device; on CPU what the machine could give without swapping, within the container's limit if any."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _available_bytes()
    limit, used = _read_int(_CGROUP / "memory.max"), _read_int(_CGROUP / "memory.current")
    return free if limit is None or used is None else min(free, max(limit - used, 0))


def _available_bytes() -> int:
    """MemAvailable counts the page cache as free, which sysconf does not: weights just read are in it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_int(path: Path) -> int | None:
    """None when there is no such file or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
