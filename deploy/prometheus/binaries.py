"""Find the programs prometheus and promtool: in PATH, or unpacked from Debian's package into the cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from outrider.wire.processes.folders import cache_folder


class NotFound(Exception):
    """Raised if a program of Prometheus is not on this machine and cannot be fetched. The message has the reason and a
    remedy.
    """


def find(program: str, *, fetch: bool = True) -> Path:
    """Return the path of `program`, prometheus or promtool. Raises NotFound if it is neither here nor fetched.

    fetch: whether Debian's package is fetched if the program is not on this machine yet.
    """
    in_path = shutil.which(program)
    if in_path is not None:
        return Path(in_path)
    folder = cache_folder() / "prometheus"
    unpacked = folder / "usr" / "bin" / program
    if not unpacked.exists():
        if not fetch:
            raise NotFound(f"{program} is neither in PATH nor in {folder}; make check-alerts fetches it")
        _unpack_debian(folder, program)
    return unpacked


def _unpack_debian(folder: Path, program: str) -> None:
    """Fetch and unpack the package in a folder beside `folder`, and move it there as a whole."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise NotFound(f"{program} is not in PATH, and this is no Debian to fetch it from; install Prometheus")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        try:
            _run(["apt-get", "download", "prometheus"], scratch)
            (package,) = Path(scratch).glob("prometheus_*.deb")
            _run(["dpkg-deb", "-x", package.name, "unpacked"], scratch)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(Path(scratch) / "unpacked", folder)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            reason: object = error
            if isinstance(error, subprocess.CalledProcessError):
                reason = error.stderr
            raise NotFound(
                f"{program} is not in PATH and Debian's package cannot be had: {reason}; "
                "try `apt-get update`, or put Prometheus into PATH"
            ) from None


def _run(command: list[str], folder: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=300)
