"""Machines of a Ray cluster, played on this one: each `ray start` has an address of its own of 127.0.0.0/8."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

from outrider.cli.processes import descendants
from tests.forked import REPO, clean_environment

HEAD, FIRST, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"
PORT = 6399
_STORE_BYTES = 80 << 20
_HEALTH = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}


class Nodes:
    """Use as `with`: leaving the block ends every machine. Joined only with the token."""

    def __init__(self, folder: Path) -> None:
        """`folder`: short, since sockets lie in it."""
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        self.env = {
            **clean_environment(),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_worker_niceness": "0",
            **{f"RAY_health_check_{name}": str(value) for name, value in _HEALTH.items()},
        }

    @property
    def address(self) -> str:
        return f"{HEAD}:{PORT}"

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *raised: object) -> None:
        for address in list(self._running):
            self.kill(address)

    def start(self, address: str, labels: str, num_cpus: int) -> None:
        """The head is the first one. Returns when the machine has joined. Raises RuntimeError when it has not."""
        where = ["--head", f"--port={PORT}"] if address == HEAD else [f"--address={self.address}"]
        folder = self._folder / address.rpartition(".")[2]
        options = [
            f"--node-ip-address={address}",
            f"--num-cpus={num_cpus}",
            f"--labels={labels}",
            f"--object-store-memory={_STORE_BYTES}",
            f"--temp-dir={folder}",
            "--disable-usage-stats",
            "--block",
        ]
        dashboard = ["--include-dashboard=false"] if address == HEAD else []
        ray = str(Path(sys.executable).parent / "ray")
        log = self._folder / f"{address}.log"
        with log.open("wb") as out:
            self._running[address] = subprocess.Popen(
                [ray, "start", *where, *options, *dashboard], cwd=REPO, env=self.env, stdout=out, stderr=out
            )
        give_up = time.monotonic() + 120
        while b"Ray runtime started" not in log.read_bytes():
            if self._running[address].poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the machine {address} did not start:\n{log.read_text()}")
            time.sleep(0.1)

    def kill(self, address: str) -> None:
        """SIGKILL to everything on it at once: as when its power goes."""
        process = self._running.pop(address)
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def pids(self, address: str) -> set[int]:
        process = self._running[address]
        return {process.pid, *descendants(process.pid)}
