"""Torch's process group of the ranks, and the numbers on which they must agree. Used by all ranks."""

from __future__ import annotations

import contextlib
import os
import zlib
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from outrider.wire.errors import ConfigError
from outrider.wire.telemetry.log import get_logger

JOIN_TIMEOUT = timedelta(seconds=60)
"""Maximum time (a timedelta) in which all ranks must join the process group. It begins when all of them have connected
to rank 0 and are ready to join."""
LOAD_TIMEOUT = timedelta(minutes=30)
"""Maximum time (a timedelta) of one collective operation during load. It is long, since ranks that have read their part
of the weights wait there for slower ranks."""
STEP_TIMEOUT = timedelta(seconds=60)
"""Maximum time (a timedelta) of one collective operation in a forward. A rank that takes longer is considered dead."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Group:
    """This process as one rank of a process group (torch.distributed). Methods that are collective operations must be
    called by all ranks, in the same order.
    """

    rank: int
    """Number of this process among the ranks, from 0 to `num_ranks` - 1."""
    num_ranks: int
    """Number of ranks, that is of processes, in the group."""

    def smallest(self, number: int) -> int:
        """Return the smallest `number` of all ranks; each rank passes its own. A collective operation."""
        return self._reduced(number, dist.ReduceOp.MIN)

    def check_same(self, what: str, value: str) -> None:
        """Raise ConfigError, naming `what`, unless all ranks pass the same `value`. A collective operation."""
        number = zlib.crc32(value.encode())
        if self._reduced(number, dist.ReduceOp.MIN) != self._reduced(number, dist.ReduceOp.MAX):
            raise ConfigError(f"the ranks differ in {what}: rank {self.rank} has {value!r}; use tensor_parallel 1")

    def begin_steps(self, timeout: timedelta = STEP_TIMEOUT) -> None:
        """Give all further collective operations the time limit `timeout`, which is shorter than the limit during load.
        Call it when all ranks have loaded. A rank that takes longer is considered dead.
        """
        _set_timeout(timeout)

    def close(self) -> None:
        """Take this process out of the group. Further calls do nothing."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @staticmethod
    def _reduced(number: int, operation: dist.ReduceOp.RedOpType) -> int:
        value = torch.tensor([number], dtype=torch.int64)  # on the host: gloo's part of the group
        dist.all_reduce(value, operation)
        return int(value)


def join_group(store_path: Path, rank: int, num_ranks: int, device_type: str) -> Group:
    """Join the process group; block until all ranks have joined. Raises RuntimeError if one of them does not.

    store_path: the file through which the ranks find each other. device_type: cpu or cuda; a rank uses the first GPU
    that is visible to it. Data is sent over the loopback interface, so that nothing listens on the network.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_RANK"] = "0"  # transformers takes it for the device's number
    backend = "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(store_path), num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=JOIN_TIMEOUT)
    _set_timeout(LOAD_TIMEOUT)
    return Group(rank, num_ranks)


def _set_timeout(timeout: timedelta) -> None:
    # For all later collectives of all groups: the model's mesh may have groups of its own.
    with contextlib.suppress(AttributeError):  # torch's own, but not public; without it the first timeout stays
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timeout, group)
