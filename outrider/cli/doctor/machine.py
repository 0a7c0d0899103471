"""Checks of this machine for `outrider doctor`. Each yields what was found, and a remedy. Imports no torch."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from outrider.wire.errors import ConfigError
from outrider.wire.processes.folders import RAY_SOCKET, parent_for_sockets
from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig, check_variables
from outrider.wire.settings.cores import shares
from outrider.wire.transport.address import check_free

State = Literal["ok", "warning", "problem"]
WITHOUT: dict[str, tuple[State, str]] = {
    "engine": ("problem", "no worker runs here, only gateways and the command line"),
    "ray": ("warning", "`outrider up` needs --no-ray"),
    "certs": ("ok", "no `outrider certs`"),
    "quant": ("ok", "no checkpoints that torchao quantised"),
    "trace": ("ok", "no trace_endpoint"),
    "tune": ("ok", "no `--png` of `outrider tune`"),
}
"""For each extra of the package: (state of the finding if one of its libraries is missing, what does not work then)."""
RAY_STORE_BYTES = 100 << 20
"""Number of bytes of shared memory that `outrider up` gives to Ray's object store."""
OWN_FILES = 256
"""Approximate number of files and sockets that a gateway has open in addition to its users' connections."""
SPARE_DISK_BYTES = 1 << 30
"""Number of free bytes on the disk below which there is a warning. Logs, the compiled forward and downloads need
them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of `outrider doctor`."""

    check: str
    """Name of the check that made this finding, as text for the user."""
    state: State
    found: str
    """What was found, as text for the user."""
    remedy: str = ""
    """What the user should do if the state is not ok; empty = nothing."""


def checks(host: str, port: int, grpc_port: int, num_drafts: int) -> Iterator[Finding]:
    """Yield the findings of all checks that need no torch.

    host, port, grpc_port: host, HTTP port and gRPC port on which the gateway would listen. num_drafts: number of draft
    workers among which cores would be divided.
    """
    yield from versions()
    yield from settings()
    yield cores(frozenset(os.sched_getaffinity(0)), num_drafts)
    yield from ports(host, {"--port": port, "--grpc-port": grpc_port})
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield shared_memory(Path("/dev/shm"))
    yield temporary_files()
    yield disk(Path.home())


def versions(package: str = "outrider") -> Iterator[Finding]:
    """Check the versions of Python and of the libraries against the requirements of an installed package. Yields a
    finding on Python, one on the libraries that are always needed, and one per extra of the package.
    """
    try:
        requirements = list(map(Requirement, metadata.requires(package) or ()))
        python = metadata.metadata(package)["Requires-Python"]
    except metadata.PackageNotFoundError:
        yield Finding("versions", "warning", f"{package} is not installed, so nothing says what it needs", "make setup")
        return
    found = f"Python {platform.python_version()}"
    if SpecifierSet(python).contains(platform.python_version()):
        yield Finding("Python", "ok", f"{found}, {sys.executable}")
    else:
        yield Finding("Python", "problem", found, f"needs {python}")
    for extra in ("", *WITHOUT):
        yield _check_libraries([own for own in requirements if _is_of(own, extra)], extra)


def _is_of(requirement: Requirement, extra: str) -> bool:
    # "x; extra == 'ray'" is of the extra ray; "x" and "x; python_version > '3'" are of the package itself, extra ""
    marker = requirement.marker
    is_of_package = marker is None or marker.evaluate({"extra": ""})
    if not extra:
        return is_of_package
    return not is_of_package and marker is not None and marker.evaluate({"extra": extra})


def _check_libraries(requirements: list[Requirement], extra: str) -> Finding:
    missing = list[str]()
    outdated = list[str]()
    installed = list[str]()
    to_install = list[str]()
    for requirement in requirements:
        needed = f"'{requirement.name}{requirement.specifier}'"
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(requirement.name)
            to_install.append(needed)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            installed.append(f"{requirement.name} {version}")
        else:
            outdated.append(f"{requirement.name} {version} (needs {requirement.specifier})")
            to_install.append(needed)
    check = "libraries"
    if extra:
        check = f"extra {extra}"
    remedy = f"pip install {' '.join(to_install)}"
    if outdated:
        return Finding(check, "problem", ", ".join(outdated), remedy)
    if missing:
        state, loss = WITHOUT.get(extra, ("problem", "nothing runs"))
        return Finding(check, state, f"without {', '.join(missing)}: {loss}", remedy)
    if extra:
        return Finding(check, "ok", ", ".join(installed))
    return Finding(check, "ok", f"{len(installed)} as asked for")


def settings() -> list[Finding]:
    """Check for environment variables that look like settings but are none. Returns a finding on the first such
    variable of each service (target, draft worker, gateway), or one finding that there is none.
    """
    messages = list[str]()
    for config in (TargetConfig, DraftConfig, GatewayConfig):
        try:
            check_variables(config)
        except ConfigError as error:
            messages.append(error.message)
    if not messages:
        given = _variables("OUTRIDER_TARGET_", "OUTRIDER_DRAFT_") + _variables("OUTRIDER_GATEWAY_")
        return [Finding("environment", "ok", ", ".join(given) or "no settings in it")]
    distinct = dict.fromkeys(messages)  # each part would stop at a variable of none
    return [Finding("environment", "problem", message, "unset it, or correct its name") for message in distinct]


def _variables(*prefixes: str) -> list[str]:
    return sorted(name for name in os.environ if name.startswith(prefixes))


def cores(offered: frozenset[int], num_drafts: int, cgroup: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Check how many cores `outrider up` would give to target and drafts, and whether the container may use that many.

    offered: cores that this process may use. num_drafts: number of draft workers. cgroup: folder with the container's
    limits.
    """
    of_target, of_draft = shares(len(offered), 1, num_drafts)
    found = f"{len(offered)}: the target gets {of_target:g}"
    if num_drafts:
        found += f", a draft {of_draft:g}"
    quota = _quota(cgroup)
    if quota is not None and quota < len(offered):
        remedy = (
            f"give the container {len(offered)} CPUs, or its processes {max(1, int(quota))} cores (cpuset, taskset)"
        )
        return Finding("cores", "warning", f"{found}; the container may use {quota:g} at a time", remedy)
    if of_target < 1:
        remedy = "more cores, or --no-draft: workers that share a core wait for each other"
        return Finding("cores", "warning", found, remedy)
    return Finding("cores", "ok", found)


def _quota(cgroup: Path) -> float | None:
    """Return the number of cores that the container may use at a time, by cgroup v2 or v1; None = there is no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    if not quota.strip().isdigit():  # "max" in v2, "-1" in v1
        return None
    return int(quota) / int(period)


def ports(host: str, required: Mapping[str, int]) -> Iterator[Finding]:
    """Check whether a gateway could listen on `host` at its ports. required: each port, by the option that sets it."""
    for option, port in required.items():
        try:
            check_free(host, port, option)
        except ConfigError as error:
            remedy = "127.0.0.1 for this machine alone, 0.0.0.0 for all its addresses"
            if error.param == "port":
                remedy = f"end what listens there, or say {option} PORT"
            yield Finding(f"port {port}", "problem", error.message, remedy)
        else:
            yield Finding(f"port {port}", "ok", f"free on {host}")


def open_files(limit: int) -> Finding:
    """Check whether a gateway may have a connection open for each request that runs or waits. limit: hard limit of open
    files per process.
    """
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "no limit")
    fields = GatewayConfig.model_fields
    needed = fields["max_running"].default + fields["max_queue"].default + OWN_FILES
    if limit < needed:
        return Finding("open files", "warning", f"{limit}, and a full gateway needs about {needed}", "ulimit -Hn 65536")
    return Finding("open files", "ok", f"{limit}")


def shared_memory(folder: Path) -> Finding:
    """Check whether Ray's object store fits into shared memory. If it does not, Ray uses the disk. folder: where shared
    memory is mounted.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return Finding(str(folder), "warning", "missing", "mount a tmpfs there, or say --no-ray")
    found = f"{free >> 20} MiB free"
    if free < RAY_STORE_BYTES:
        remedy = "docker run --shm-size 256m, or say --no-ray"
        return Finding(str(folder), "warning", f"{found}, and Ray needs {RAY_STORE_BYTES >> 20}", remedy)
    return Finding(str(folder), "ok", found)


def temporary_files() -> Finding:
    """Check whether there is a folder for temporary files with so short a path that the paths of Ray's sockets in it
    are valid.
    """
    check = "temporary files"
    wanted = tempfile.gettempdir()
    try:
        parent = parent_for_sockets(RAY_SOCKET)
    except ConfigError as error:
        return Finding(check, "warning", error.message, "TMPDIR=/tmp, or say --no-ray")
    if str(parent) == wanted:
        return Finding(check, "ok", wanted)
    return Finding(check, "ok", f"{wanted}; Ray's in {parent}, where the paths of its sockets fit")


def disk(home: Path) -> Finding:
    """Check whether the disk has space to download models and to keep the compiled C++ forward. home: folder whose disk
    is checked.
    """
    folder = Path(os.environ.get("HF_HOME") or home / ".cache")
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{free / (1 << 30):.1f} GiB free at {folder}"
    if not os.access(folder, os.W_OK):
        return Finding("disk", "warning", f"{folder} cannot be written", "set HF_HOME and OUTRIDER_CACHE_DIR")
    if free < SPARE_DISK_BYTES:
        return Finding("disk", "warning", found, "make room, or set HF_HOME and OUTRIDER_CACHE_DIR to another disk")
    return Finding("disk", "ok", found)
