"""Rank 0's side of tensor parallelism: has its followers started, commands them, misses them. Used by `leading`."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.parallel import messages
from outrider.engine.parallel.checks import check_devices
from outrider.engine.parallel.group import STEP_TIMEOUT, Group, join_group
from outrider.engine.parallel.meeting import Guest, make_private, receive_guests
from outrider.engine.paths.forward_path import ForwardPath
from outrider.engine.step_plan import Row
from outrider.wire.errors import OutriderError, Unavailable
from outrider.wire.host import split_evenly
from outrider.wire.log import get_logger

MEETING_TIMEOUT_S = 120.0
_STORE = "store"
_GRACE_S = 5.0

log = get_logger(__name__)


class Team:
    """The followers of a worker, from their start to their end. `close` in any case."""

    def __init__(self, num_ranks: int, on_lost: Callable[[OutriderError], None]) -> None:
        """on_lost: called once, from a thread, when a follower ends before `close`."""
        self.num_ranks = num_ranks
        self._on_lost = on_lost
        self._processes: list[subprocess.Popen[bytes]] = []
        self._guests: list[Guest] = []
        self.group: Group | None = None
        """Once gathered."""
        self._folder: Path | None = None
        self._is_ours = False
        self._closing = threading.Event()
        self._noticed = threading.Event()
        self._lost: OutriderError | None = None

    def gather(self, device: torch.device, settings: dict[str, Any], shared_folder: str | None) -> Group:
        """Start the followers, or await those that come to shared_folder by themselves, and join with them.

        settings: what `follower` loads with; JSON. Raises OutriderError when they do not all come.
        """
        if shared_folder is None:
            check_devices(device, self.num_ranks)
            self._folder, self._is_ours = Path(tempfile.mkdtemp(prefix="outrider-ranks-")), True
            self._spawn(device)
        else:
            self._folder = make_private(Path(shared_folder))
        self._guests = receive_guests(self._folder, self.num_ranks, MEETING_TIMEOUT_S, STEP_TIMEOUT.total_seconds())
        store = self._folder / _STORE
        store.unlink(missing_ok=True)  # of a life before
        threading.Thread(target=self._watch, name="followers", daemon=True).start()
        for guest in self._guests:
            told = settings | {"store": str(store), "device": device.type}
            guest.commands.send(json.dumps(told).encode())
        self.group = join_group(store, 0, self.num_ranks, device.type)
        return self.group

    def tell(self, message: bytes) -> None:
        """Raises Unavailable when a follower has gone."""
        try:
            for guest in self._guests:
                guest.commands.send(message)
        except OSError as error:
            raise self.why(error) from None

    def why(self, error: Exception) -> OutriderError:
        """What is behind an error in something that all ranks do: the follower that was lost, if one was."""
        return self.lost or Unavailable(f"the ranks no longer work together: {error}")

    @property
    def lost(self) -> OutriderError | None:
        """Says which follower has gone, if one has. Waits a moment: an error that it caused may arrive before it."""
        self._noticed.wait(0.3)
        return self._lost

    def close(self) -> None:
        """Followers end; those that do not are killed. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        for guest in self._guests:
            try:
                guest.commands.send(messages.encode_end())
            except OSError:
                continue  # gone already
        for guest in self._guests:
            guest.close()
        self._end_processes()
        if self.group is not None:
            self.group.leave()
        if self._folder is not None and self._is_ours:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, device: torch.device) -> None:
        cores = split_evenly(os.sched_getaffinity(0), self.num_ranks)
        for rank in range(1, self.num_ranks):
            command = [sys.executable, "-m", "outrider.engine.parallel.follower", str(self._folder), str(rank)]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": _visible(device, rank)}
            environment.pop("OMP_NUM_THREADS", None)
            self._processes.append(
                subprocess.Popen(
                    [*command, ",".join(map(str, sorted(cores[rank])))],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr.fileno(),  # stdout is for this process's own lines
                )
            )

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for guest in self._guests:
                selector.register(guest.life, selectors.EVENT_READ, guest)
            events = selector.select()
        if self._closing.is_set():
            return
        guest = events[0][0].data
        words = guest.life.receive()
        said = f": {words.decode(errors='replace')}" if words else ", its process has ended"
        self._lost = Unavailable(f"rank {guest.rank} of {self.num_ranks} is lost{said}")
        self._noticed.set()
        self._on_lost(self._lost)

    def _end_processes(self) -> None:
        for process in self._processes:
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                log.warning("follower %d does not end and is killed", process.pid)
                process.kill()
                process.wait()


class ParallelPath:
    """Implements `ForwardPath` on rank 0: says what comes, then does its own part of it."""

    batch_invariant = False  # partial sums are added in an order that depends on where in a step a token lies

    def __init__(self, path: ForwardPath, team: Team) -> None:
        self._path = path
        self._team = team
        self.name = path.name
        self.block_size = path.block_size
        self.block_size = path.block_size

    @property
    def kv_bytes_per_token(self) -> int:
        return self._path.kv_bytes_per_token

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        self._team.tell(messages.encode_storage(num_blocks, block_size))
        self._path.set_storage(num_blocks, block_size)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._team.tell(messages.encode_copies(copies))
        self._path.copy_blocks(copies)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Raises Unavailable when a rank was lost on the way."""
        self._team.tell(messages.encode_forward(rows, with_past=self.name == "dense"))
        try:
            return self._path.forward(rows)
        except OutriderError:
            raise  # before anything was computed, and the followers came to the same
        except RuntimeError as error:
            raise self._team.why(error) from error


def _visible(device: torch.device, rank: int) -> str:
    """CUDA_VISIBLE_DEVICES of a follower: one GPU, its first; none on CPU."""
    if device.type == "cpu":
        return ""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(rank) if ours is None else ours.split(",")[rank].strip()
