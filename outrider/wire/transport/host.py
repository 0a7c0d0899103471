"""Prepare a worker process before torch is imported: pin it, size its threads, tune its allocator."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import parse_cores
from outrider.wire.transport.rpc import tune_malloc


def pin_process(cpu_cores: str | None) -> frozenset[int]:
    """Keep every thread of this process, and those it makes later, on these cores. Return the cores in force.

    Call before importing torch: it sizes its thread pools at import. Raises ConfigError for cores that are not there.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    if cpu_cores is None:
        return allowed
    wanted = parse_cores(cpu_cores)
    if not wanted <= frozenset(range(os.cpu_count() or 1)):
        raise ConfigError(
            f"cpu_cores is {cpu_cores!r}, this machine has cores 0 to {(os.cpu_count() or 1) - 1}", param="cpu_cores"
        )
    for task in Path("/proc/self/task").iterdir():  # threads that exist already must be moved one by one
        try:
            os.sched_setaffinity(int(task.name), wanted)
        except ProcessLookupError:  # ended meanwhile
            continue
        except OSError as error:
            raise ConfigError(f"cpu_cores is {cpu_cores!r}: {error.strerror}", param="cpu_cores") from None
    os.environ["OMP_NUM_THREADS"] = str(len(wanted))
    return wanted


def split_evenly(cores: Iterable[int], num_parts: int) -> list[frozenset[int]]:
    """Return neighbouring cores for each part, or all cores for every part when there are fewer cores than parts."""
    ordered = sorted(cores)
    if len(ordered) < num_parts:
        return [frozenset(ordered)] * num_parts
    bounds = [len(ordered) * part // num_parts for part in range(num_parts + 1)]
    return [frozenset(ordered[begin:end]) for begin, end in pairwise(bounds)]


def prepare_process(cpu_cores: str | None) -> frozenset[int]:
    """Pin the process and tune its allocator, before torch is imported. Return the cores in force.

    Raises ConfigError for cores that are not there.
    """
    cores = pin_process(cpu_cores)
    tune_malloc()
    return cores


def new_epoch() -> int:
    """Return a random number for this worker's life, never 0, so that two lives never share one."""
    return int.from_bytes(os.urandom(8), "little") | 1
