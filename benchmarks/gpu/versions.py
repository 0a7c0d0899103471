"""Section `versions`: what the machine has, what is missing of it, and the native library's build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu import wheels
from benchmarks.gpu.bench import Bench

LIBRARIES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "grpcio",
    "protobuf",
    "llguidance",
)
COMPILERS = ("c++", "gcc", "nvcc", "make")
DRIVER = Path("/proc/driver/nvidia/version")


def run(bench: Bench) -> None:
    bench.tell("libraries", python=sys.version.split()[0], **{name: wheels.installed(name) for name in LIBRARIES})
    bench.tell("tools", **{name: shutil.which(name) for name in COMPILERS}, commit=_commit())
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bench.tell("host", cores=len(os.sched_getaffinity(0)), memory_gib=memory_bytes / 2**30)
    for name in wheels.missing():
        bench.find(f"missing: {name}")
    name = "no GPU"
    if bench.on_card:
        name = tell_gpu(bench)
    build_s = build_native(bench)
    bench.sum_up(f"{name}, torch {torch.__version__}, native library in {build_s:.1f} s")


def tell_gpu(bench: Bench) -> str:
    """Report the GPU, with what torch has for it; return its name."""
    found = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    bench.tell(
        "gpu",
        name=found.name,
        memory_gib=total_bytes / 2**30,
        free_gib=free_bytes / 2**30,
        multiprocessors=found.multi_processor_count,
        l2_mib=found.L2_cache_size / 2**20,
        capability=f"{found.major}.{found.minor}",
        cuda=torch.version.cuda,
        driver=DRIVER.read_text().splitlines()[0] if DRIVER.is_file() else None,
        varlen=_varlen(),
    )
    return str(found.name)


def _varlen() -> str:
    """Return the keywords of torch's attention over pages, by which `flash` is decided."""
    import inspect

    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return f"none: {error}"
    return ", ".join(inspect.signature(varlen_attn).parameters)


def build_native(bench: Bench) -> float:
    """Build the native library, or find it built, and return the seconds that took: later sections then have it."""
    from outrider.engine.native.build import BuildError
    from outrider.engine.native.library import library

    began_s = time.monotonic()
    try:
        library()
    except BuildError as error:
        bench.find(f"the native library cannot be built, so that all noise is made in NumPy: {error}")
    return time.monotonic() - began_s


def _commit() -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
