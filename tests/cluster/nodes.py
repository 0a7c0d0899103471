"""Machines of a Ray cluster, played on this one: a network of our own, and in it a namespace with a cable for each.

All of it is gone when the process that entered it and the machines have ended; the network outside is not touched.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

from outrider.wire.processes.descendants import descendants
from tests.forked import REPO, clean_environment

HEAD, FIRST, SECOND, THIRD = (f"10.83.0.{number}" for number in range(1, 5))
PORT = 6399
_BRIDGE = "machines"
_INSIDE = "OUTRIDER_TEST_NETWORK"
_STORE_BYTES = 80 << 20
_HEALTH = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}


class NoNetwork(Exception):
    """This machine gives no network namespaces."""


def enter_network() -> None:
    """Run this same command again in a network of its own, where the head is. Raises NoNetwork."""
    if os.environ.pop(_INSIDE, None):
        _ip("link", "set", "lo", "up")
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("address", "add", f"{HEAD}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        return
    unshare = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    try:
        subprocess.run([*unshare, "ip", "link", "add", _BRIDGE, "type", "bridge"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoNetwork(str(error)) from error
    os.execvpe("unshare", [*unshare, sys.executable, *sys.orig_argv[1:]], {**os.environ, _INSIDE: "1"})


class Nodes:
    """Use as `with`, in a network of its own: leaving the block ends every machine. Joined only with the token."""

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

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *raised: object) -> None:
        for address in list(self._running):
            self._kill(address)

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
        command = [str(Path(sys.executable).parent / "ray"), "start", *where, *options, *dashboard]
        log = self._folder / f"{address}.log"
        self._running[address] = self._run(address, command, log)
        give_up = time.monotonic() + 120
        while b"Ray runtime started" not in log.read_bytes():
            if self._running[address].poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the machine {address} did not start:\n{log.read_text()}")
            time.sleep(0.1)

    def lose(self, address: str) -> None:
        """As when its power goes: nobody hears from it any more, not even that its connections have ended."""
        _ip("link", "set", _cable(address), "down")
        self._kill(address)

    def _run(self, address: str, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        """In a namespace of its own, unless it is the head's: the command waits until its cable is in."""
        waiting = [] if address == HEAD else ["unshare", "--net", "sh", "-c", 'read -r _ && exec "$@"', "sh"]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*waiting, *command], cwd=REPO, env=self.env, stdin=subprocess.PIPE, stdout=out, stderr=out
            )
        if waiting:
            _plug_in(address, process.pid)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # broken: it has ended, and the log says why
            stdin.write(b"\n")
        return process

    def _kill(self, address: str) -> None:
        """SIGKILL to everything on it at once."""
        process = self._running.pop(address)
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        if address != HEAD:  # it would go with the namespace, but later than another machine of this name may come
            _ip("link", "delete", _cable(address), check=False)


def _cable(address: str) -> str:
    """Name of the end that is in our bridge."""
    return f"cable-{address.rpartition('.')[2]}"


def _plug_in(address: str, pid: int) -> None:
    """Connect the namespace that this process is about to have."""
    ours, give_up = os.readlink("/proc/self/ns/net"), time.monotonic() + 10
    while os.readlink(f"/proc/{pid}/ns/net") == ours:
        if time.monotonic() > give_up:
            raise RuntimeError(f"the machine {address} has no network namespace of its own")
        time.sleep(0.01)
    _ip("link", "add", _cable(address), "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _ip("link", "set", _cable(address), "master", _BRIDGE, "up")
    for command in (
        ("link", "set", "lo", "up"),
        ("address", "add", f"{address}/24", "dev", "eth0"),
        ("link", "set", "eth0", "up"),
    ):
        _ip(*command, inside=pid)


def _ip(*arguments: str, inside: int | None = None, check: bool = True) -> None:
    """`inside`: a process in the namespace that is meant, ours without."""
    there = [] if inside is None else ["nsenter", f"--target={inside}", "--net"]
    subprocess.run([*there, "ip", *arguments], check=check, stderr=None if check else subprocess.DEVNULL)
