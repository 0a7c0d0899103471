"""Describe the machine that a measurement ran on, for comparing results."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def machine() -> dict[str, str]:
    """Return what is known of processor, memory, load and software, in words."""
    lines = _lines("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    memory = [line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "cpu": f"{names[0] if names else platform.processor()} ({', '.join(flag for flag in _FLAGS if flag in flags)})",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int(memory[0]) / 2**20:.1f} GiB" if memory else "unknown",
        "load at start": f"{os.getloadavg()[0]:.2f}",
        "software": f"Python {platform.python_version()}, {platform.system()} {platform.release()}",
    }


def source_commit() -> str | None:
    """Return the commit of this checkout, None where it is no repository."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # a repository further up is somebody else's
        return None
    commit, changed = _git(root, "rev-parse", "--short", "HEAD"), _git(root, "status", "--porcelain", "-uno")
    return commit and commit + (" and changes" if changed else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        made = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return made.stdout.strip() if made.returncode == 0 else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
