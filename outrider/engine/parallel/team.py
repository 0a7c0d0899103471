"""Rank 0's part of tensor parallelism: start the other ranks, send them each call of the path, notice if one ends.

`Team` is created by the loader of a target with `tensor_parallel` above 1; `ParallelPath` wraps the attention path of
its model.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.engine.attention.forward_path import FeaturePath, ForwardPath, TreePath
from outrider.engine.parallel import rank_messages
from outrider.engine.parallel.checks import check_devices
from outrider.engine.parallel.group import STEP_TIMEOUT, Group, join_group
from outrider.engine.parallel.meeting import (
    GRACE_S,
    MEETING_TIMEOUT_S,
    SOCKET,
    RankLines,
    accept_ranks,
    make_meeting_place,
)
from outrider.engine.step_plan import Row, check_ids
from outrider.wire.errors import OutriderError, Unavailable
from outrider.wire.processes.folders import parent_for_sockets
from outrider.wire.settings.config import TargetConfig
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.host import split_evenly

_STORE = "store"
"""Name of the file in the ranks' folder through which they join the process group."""

log = get_logger(__name__)


class Team:
    """The processes of the ranks above 0 of a worker: starts them, sends them rank 0's commands, notices when one ends,
    and ends them. `close` must be called, also after an error.
    """

    def __init__(
        self, num_ranks: int, on_lost: Callable[[OutriderError], None], step_timeout: timedelta = STEP_TIMEOUT
    ) -> None:
        """Create a team without starting the other ranks; `gather` starts them.

        on_lost: called once, from any thread, if another rank ends before `close`, or if the ranks may no longer be in
        the same step. The worker must end then. step_timeout: a rank that takes longer in a forward is considered dead.
        """
        self.num_ranks = num_ranks
        """Number of ranks, rank 0 included."""
        self._on_lost = on_lost
        self._step_timeout = step_timeout
        self.processes: list[subprocess.Popen[bytes]] = []
        """Processes of other ranks that this process started."""
        self._guests: list[RankLines] = []
        self.group: Group | None = None
        """Process group of the ranks; None before `gather`."""
        self._folder: Path | None = None
        self._has_own_folder = False  # to be removed at the end
        self._closing = threading.Event()
        self._is_lost = threading.Event()
        self._lock = threading.Lock()  # of the first loss
        self._lost: OutriderError | None = None
        self.lost_in_silence = False
        """Whether the ranks stopped working together because the process of one ended without a message. Most likely it
        was killed."""

    def gather(self, device: torch.device, config: TargetConfig, shared_folder: str | None) -> Group:
        """Start the other ranks, or wait for ranks that another process starts, and join a process group with them.
        Return the group.

        config: the settings with which the ranks load. shared_folder: the folder in which ranks that another process
        starts connect; None = they are started here. Raises OutriderError unless all of them join.
        """
        store = self.meet(device, config, shared_folder)
        with self.together():
            for guest in self._guests:  # each imports torch first, and a process group waits long for one that has died
                if not guest.await_ready():
                    raise EOFError(f"rank {guest.rank} ended before it joined")
            self.group = join_group(store, 0, self.num_ranks, device.type)
        return self.group

    def meet(self, device: torch.device, config: TargetConfig, shared_folder: str | None) -> Path:
        """Start the other ranks, or wait for ranks that another process starts, and send them the settings with which
        they load.

        shared_folder: the folder in which ranks that another process starts connect; None = they are started here.
        Returns the path of the file through which the ranks join the process group. Raises OutriderError if the
        ranks cannot be started or do not come in time.
        """
        if shared_folder is None:
            check_devices(device, self.num_ranks)
            parent = parent_for_sockets(f"/outrider-ranks-12345678/{SOCKET}")
            self._folder = Path(tempfile.mkdtemp(prefix="outrider-ranks-", dir=parent))
            self._has_own_folder = True
            self._spawn(device)
        else:
            self._folder = make_meeting_place(Path(shared_folder))
        self._guests = accept_ranks(self._folder, self.num_ranks, MEETING_TIMEOUT_S)
        store = self._folder / _STORE
        store.unlink(missing_ok=True)  # an earlier run's
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        with self.together():
            settings = {**config.model_dump(), "device": device.type}
            self._send(json.dumps({"config": settings, "store": str(store)}).encode())
        return store

    def begin_steps(self) -> None:
        """Give commands and collective operations the time limit of steps, which is shorter than the limits during
        load. Call it when all ranks have loaded. A rank that takes longer is considered dead.
        """
        assert self.group is not None
        self.group.begin_steps(self._step_timeout)
        for guest in self._guests:
            guest.commands.set_timeout(self._step_timeout.total_seconds())

    @contextlib.contextmanager
    def together(self, message: bytes | None = None) -> Iterator[None]:
        """Context manager: send `message` (None = nothing) to the other ranks, then run the body, which must make the
        same collective operations as they do.

        After an error here, another rank may still be inside a collective operation, and would add its numbers to those
        of rank 0's next one. So any error ends the team: it is replaced by Unavailable, which every later call raises
        again.
        """
        if self._lost is not None:
            raise self._lost
        try:
            if message is not None:
                self._send(message)
            yield
        except Exception as error:
            self._is_lost.wait(GRACE_S)
            first_line = str(error).partition("\n")[0]
            reason = f"the {self.num_ranks} ranks no longer work together: {type(error).__name__}: {first_line}"
            raise self._lose(Unavailable(reason)) from error

    @property
    def loss_error(self) -> OutriderError | None:
        """Reason why the ranks stopped working together; None if they still do. Waits up to GRACE_S seconds for it,
        since the end of another rank may be noticed later than the error that it caused on rank 0.
        """
        if self._guests:
            self._is_lost.wait(GRACE_S)
        return self._lost

    def _send(self, message: bytes) -> None:
        for guest in self._guests:
            guest.commands.send(message)

    def _lose(self, error: OutriderError) -> OutriderError:
        # Returns the error of the first loss, which alone is passed on.
        with self._lock:
            if self._lost is not None:
                return self._lost
            self._lost = error
        self._is_lost.set()
        self._remove_folder()  # this process may end without `close`
        self._on_lost(error)
        return error

    def close(self) -> None:
        """End the processes of the other ranks, and kill those that do not end in time. Further calls do nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._lost is None:  # else they end with an error, so that Ray, too, takes them for failed
            for guest in self._guests:
                with contextlib.suppress(OSError):  # it has ended already
                    guest.commands.send(rank_messages.encode(rank_messages.END))
        for guest in self._guests:
            guest.close()
        self._end_processes()
        if self.group is not None:
            self.group.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None and self._has_own_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, device: torch.device) -> None:
        cores = split_evenly(os.sched_getaffinity(0), self.num_ranks)
        for rank in range(1, self.num_ranks):
            command = [sys.executable, "-m", "outrider.engine.loading.rank_process", str(self._folder), str(rank)]
            command.append(",".join(map(str, sorted(cores[rank]))))
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": _visible_devices(device, rank)}
            environment.pop("OMP_NUM_THREADS", None)
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),  # stdout is for this process's own lines
            )
            self.processes.append(process)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                for guest in self._guests:
                    selector.register(guest.life, selectors.EVENT_READ, guest)
            except ValueError:  # closed before this thread began
                return
            events = selector.select()
        if self._closing.is_set():
            return
        guest = events[0][0].data
        message = guest.life.receive()
        reason = ", its process has ended"
        if message:
            reason = f": {message.decode(errors='replace')}"
        self.lost_in_silence = not message
        self._lose(Unavailable(f"rank {guest.rank} of {self.num_ranks} is lost{reason}"))

    def _end_processes(self) -> None:
        for process in self.processes:
            try:
                process.wait(5 * GRACE_S)
            except subprocess.TimeoutExpired:
                log.warning("the rank with pid %d does not end and is killed", process.pid)
                process.kill()
                process.wait()


class ParallelPath:
    """Attention path of a split model on rank 0: it sends each call to the other ranks, then makes the call here, too.
    It runs token trees and returns hidden states if the wrapped path does.
    """

    batch_invariant = False  # partial sums are added in an order that depends on where in a step a token lies

    def __init__(self, path: ForwardPath, team: Team, vocab_size: int) -> None:
        self._path = path
        self._team = team
        self._vocab_size = vocab_size
        self.name = path.name
        self.block_size = path.block_size

    @property
    def kv_bytes_per_token(self) -> int:
        return self._path.kv_bytes_per_token

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        with self._team.together(rank_messages.encode(rank_messages.STORAGE, (num_blocks, block_size))):
            self._path.set_storage(num_blocks, block_size)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        blocks: list[int] = []
        for pair in copies:
            blocks += pair
        with self._team.together(rank_messages.encode(rank_messages.COPY, blocks)):
            self._path.copy_blocks(copies)

    def move_tokens(self, from_indices: Sequence[int], to_indices: Sequence[int]) -> None:
        assert isinstance(self._path, TreePath)
        with self._team.together(rank_messages.encode(rank_messages.MOVE, [*from_indices, *to_indices])):
            self._path.move_tokens(from_indices, to_indices)

    def set_taps(self, taps: Sequence[int]) -> None:
        """Set the taps on rank 0 alone, which has the whole hidden states after each layer."""
        assert isinstance(self._path, FeaturePath)
        self._path.set_taps(taps)

    @property
    def features(self) -> Tensor:
        assert isinstance(self._path, FeaturePath)
        return self._path.features

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Run a forward on all ranks and return the logits. Raises InvalidRequest for a token id outside the
        vocabulary. If a rank fails, raises Unavailable, then and at every later call.
        """
        if rows:  # a bad request must be found before it is sent to the other ranks
            check_ids(np.concatenate([np.asarray(row.new_ids, dtype=np.int64) for row in rows]), self._vocab_size)
        with self._team.together(rank_messages.encode_forward(rows, with_past=self.name == "dense")):
            return self._path.forward(rows)


def _visible_devices(device: torch.device, rank: int) -> str:
    # CUDA_VISIBLE_DEVICES of another rank: one GPU, or none on a CPU. With "2,5,7" here, rank 1 sees "5".
    if device.type == "cpu":
        return ""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    if own is None:
        return str(rank)
    return own.split(",")[rank].strip()
