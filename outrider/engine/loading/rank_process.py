"""Run a follower of a tensor-parallel target: a process with one rank's part of the weights.

    python -m outrider.engine.loading.rank_process FOLDER RANK CORES

Started by rank 0 (`parallel.team`), or inside a Ray actor by `deploy`. It connects to rank 0, loads what rank 0 loads
in the same order, self-test included, and repeats rank 0's forwards until rank 0 sends END. If rank 0 ends without END,
this process ends at once, in the middle of a forward if need be. Torch is imported after the process is pinned to its
cores.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from outrider.engine.parallel.meeting import GRACE_S, MEETING_TIMEOUT_S, RankZeroLines, connect_to_rank_zero
from outrider.wire.errors import OutriderError
from outrider.wire.settings.config import TargetConfig
from outrider.wire.telemetry.log import adopt_loggers, configure_logging, get_logger, log_end
from outrider.wire.transport.host import prepare_process

log = get_logger(__name__)


def run_rank(folder: Path, rank: int, cpu_cores: str | None, on_abandoned: Callable[[], None]) -> int:
    """Run one follower (a rank other than 0 of a tensor-parallel target) until rank 0 ends. Return the exit code of the
    process: 0 if rank 0 sent the message END, 1 if it ended without.

    folder: folder with the socket on which rank 0 listens. rank: this follower's number, from 1. cpu_cores: the setting
    of this name, the cores to which the process is pinned. on_abandoned: called, perhaps from another thread, just
    before this process ends because rank 0 ended without END. Raises OutriderError for a model that cannot be loaded,
    after reporting it to rank 0.
    """
    cores = prepare_process(cpu_cores)
    host = connect_to_rank_zero(folder, rank, MEETING_TIMEOUT_S)
    ended = threading.Event()
    threading.Thread(target=_end_with_rank_0, args=(host, ended, on_abandoned), name="rank-0", daemon=True).start()
    message = host.commands.receive()
    if message is None:
        on_abandoned()
        return 1
    start = json.loads(message)
    config = TargetConfig(**start["config"])
    configure_logging(config.log_level, f"target rank {rank}", config.log_format)
    try:
        is_orderly = _serve(host, rank, config, Path(start["store"]), len(cores))
    except OutriderError as error:
        host.report(error.message)
        raise
    except Exception as error:
        host.report(f"{type(error).__name__}: {error}")
        raise
    if not is_orderly:
        on_abandoned()
        return 1
    ended.set()
    return 0


def _serve(host: RankZeroLines, rank: int, config: TargetConfig, store: Path, num_threads: int) -> bool:
    """Load, then repeat rank 0's forwards; return whether rank 0 ended them by END."""
    import torch

    from outrider.engine.loading.loader import load_runner
    from outrider.engine.parallel.group import Group, join_group
    from outrider.engine.parallel.rank_messages import END, decode

    torch.set_num_threads(num_threads)
    groups: list[Group] = []

    def join(found: torch.device) -> Group:
        host.send_ready()
        groups.append(join_group(store, rank, config.tensor_parallel, found.type))
        return groups[0]

    path = load_runner(config, join).path
    adopt_loggers()
    groups[0].begin_steps()
    is_orderly = False
    with torch.inference_mode():
        while not is_orderly and (message := host.commands.receive()) is not None:
            kind, arguments = decode(message)
            if kind == END:
                is_orderly = True
            else:
                getattr(path, kind)(*arguments)
    groups[0].close()
    return is_orderly


def _end_with_rank_0(host: RankZeroLines, ended: threading.Event, on_abandoned: Callable[[], None]) -> None:
    host.life.receive()  # returns when rank 0 closes this connection, on which nothing is sent
    if not ended.wait(GRACE_S):  # a collective that waits for rank 0 would wait for minutes
        on_abandoned()
        os._exit(1)


def main(argv: list[str]) -> int:
    """Run one follower with the command line's arguments: folder, rank and cores. Return the exit code of the
    process.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # terminals and `systemctl kill` send them to all; rank 0 handles them
    configure_logging("info", f"target rank {argv[1]}")
    try:
        folder = Path(argv[0])
        return run_rank(folder, int(argv[1]), argv[2], lambda: shutil.rmtree(folder, ignore_errors=True))
    except OutriderError as error:
        log_end(f"target rank {argv[1]}", error.message)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
