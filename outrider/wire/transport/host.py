"""`prepare_process`, which a worker calls before it imports torch. It pins the process to cores and tunes the allocator
of its memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from outrider.wire.errors import ConfigError
from outrider.wire.settings.cores import parse_cores
from outrider.wire.transport.rpc import tune_malloc


def pin_process(cpu_cores: str | None) -> frozenset[int]:
    """Pin all present and later threads of this process to CPU cores. Return the cores on which it may run.

    cpu_cores: the setting of that name, such as "0,2-3"; None = leave the process as it is. Call it before importing
    torch, which chooses the sizes of its thread pools at import. Raises ConfigError for cores that this machine does
    not have.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    if cpu_cores is None:
        return allowed
    cores = parse_cores(cpu_cores)
    if not cores <= frozenset(range(os.cpu_count() or 1)):
        raise ConfigError(
            f"cpu_cores is {cpu_cores!r}, this machine has cores 0 to {(os.cpu_count() or 1) - 1}", param="cpu_cores"
        )
    for task in Path("/proc/self/task").iterdir():  # existing threads are pinned one by one
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:  # the thread has ended since
            continue
        except OSError as error:
            raise ConfigError(f"cpu_cores is {cpu_cores!r}: {error.strerror}", param="cpu_cores") from None
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    return cores


def split_evenly(cores: Iterable[int], num_parts: int) -> list[frozenset[int]]:
    """Split cores into `num_parts` sets of neighbouring cores. If there are fewer cores than parts, each part gets all
    cores.
    """
    # 5 cores in 2 parts: {0, 1} and {2, 3, 4}
    ordered = sorted(cores)
    if len(ordered) < num_parts:
        return [frozenset(ordered)] * num_parts
    parts = list[frozenset[int]]()
    for part in range(num_parts):
        begin = len(ordered) * part // num_parts
        end = len(ordered) * (part + 1) // num_parts
        parts.append(frozenset(ordered[begin:end]))
    return parts


def prepare_process(cpu_cores: str | None) -> frozenset[int]:
    """Pin this process to the cores of the setting `cpu_cores` (None = do not pin it), and tune its memory allocator.
    Return the cores on which it may run.

    Call it before importing torch. Raises ConfigError for cores that this machine does not have.
    """
    cores = pin_process(cpu_cores)
    tune_malloc()
    return cores


def new_epoch() -> int:
    """Return a new epoch, the number that identifies one life of a worker: 64 random bits, never 0."""
    return int.from_bytes(os.urandom(8), "little") | 1
