"""Checks of this machine for `outrider doctor`: what would go wrong here, the value found, and the remedy. No torch."""

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
from outrider.wire.processes.places import RAY_SOCKET, parent_for_sockets
from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig, check_variables
from outrider.wire.settings.pools import shares
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
"""By extra of the package: how bad it is that something of it is missing, and what does not work then."""
RAY_STORE_BYTES = 100 << 20
"""What `outrider up` lets Ray keep in shared memory."""
OWN_FILES = 256
"""Files that a gateway holds beside its users' connections, about. Doubled, a lower limit is warned of."""
SPARE_DISK_BYTES = 1 << 30
"""Less is warned of: logs, the compiled forward and downloads go there. Doubled, it is warned of sooner."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    state: State
    found: str
    remedy: str = ""


def checks(host: str, port: int, grpc_port: int, num_drafts: int) -> Iterator[Finding]:
    """Check all that needs no torch. The arguments are as `outrider up` takes them."""
    yield from versions()
    yield from settings()
    yield cores(frozenset(os.sched_getaffinity(0)), num_drafts)
    yield from ports(host, {"--port": port, "--grpc-port": grpc_port})
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield shared_memory(Path("/dev/shm"))
    yield temporary_files()
    yield disk(Path.home())


def versions(package: str = "outrider") -> Iterator[Finding]:
    """Python and every library against what the package asks for."""
    try:
        wanted = [Requirement(each) for each in metadata.requires(package) or ()]
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
        own = [each for each in wanted if _is_of(each, extra)]
        yield _libraries(own, extra)


def _is_of(requirement: Requirement, extra: str) -> bool:
    """Whether a requirement is of an extra and not of the package itself; of the package where `extra` is empty."""
    marker = requirement.marker
    of_package = marker is None or marker.evaluate({"extra": ""})
    return of_package if not extra else not of_package and marker is not None and marker.evaluate({"extra": extra})


def _libraries(wanted: list[Requirement], extra: str) -> Finding:
    check = f"extra {extra}" if extra else "libraries"
    missing, old, there, lacking = list[str](), list[str](), list[str](), list[str]()
    for each in wanted:
        try:
            version = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            missing.append(each.name)
        else:
            if each.specifier.contains(version, prereleases=True):
                there.append(f"{each.name} {version}")
                continue
            old.append(f"{each.name} {version} (needs {each.specifier})")
        lacking.append(f"'{each.name}{each.specifier}'")
    remedy = f"pip install {' '.join(lacking)}"
    if old:
        return Finding(check, "problem", ", ".join(old), remedy)
    if missing:
        state, loss = WITHOUT.get(extra, ("problem", "nothing runs"))
        return Finding(check, state, f"without {', '.join(missing)}: {loss}", remedy)
    return Finding(check, "ok", ", ".join(there) if extra else f"{len(there)} as asked for")


def settings() -> list[Finding]:
    """Check whether the environment has variables that name no setting: the first of each part, which stops at it."""
    given = sorted(name for name in os.environ if name.startswith(("OUTRIDER_TARGET_", "OUTRIDER_DRAFT_")))
    given += sorted(name for name in os.environ if name.startswith("OUTRIDER_GATEWAY_"))
    messages: list[str] = []
    for config in (TargetConfig, DraftConfig, GatewayConfig):
        try:
            check_variables(config)
        except ConfigError as error:
            messages.append(error.message)
    if not messages:
        return [Finding("environment", "ok", ", ".join(given) or "no settings in it")]
    distinct = dict.fromkeys(messages)  # a variable of no part stops each of them
    return [Finding("environment", "problem", message, "unset it, or correct its name") for message in distinct]


def cores(offered: frozenset[int], num_drafts: int, cgroup: Path = Path("/sys/fs/cgroup")) -> Finding:
    """How `outrider up` would share the cores out, and whether the container may use them."""
    of_target, of_draft = shares(len(offered), 1, num_drafts)
    found = f"{len(offered)}: the target gets {of_target:g}" + (f", a draft {of_draft:g}" if num_drafts else "")
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
    """Cores that the container may use at a time, by cgroup v2 or v1; None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    return int(quota) / int(period) if quota.strip().isdigit() else None


def ports(host: str, wanted: Mapping[str, int]) -> Iterator[Finding]:
    """Whether the ports that a gateway would listen on are free. wanted: by option."""
    for option, port in wanted.items():
        try:
            check_free(host, port, option)
        except ConfigError as error:
            end_it = f"end what listens there, or say {option} PORT"
            remedy = (
                end_it if error.param == "port" else "127.0.0.1 for this machine alone, 0.0.0.0 for all its addresses"
            )
            yield Finding(f"port {port}", "problem", error.message, remedy)
        else:
            yield Finding(f"port {port}", "ok", f"free on {host}")


def open_files(most: int) -> Finding:
    """Whether a gateway may hold a connection for each answer that runs or waits. most: the hard limit."""
    if most == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "no limit")
    fields = GatewayConfig.model_fields
    needed = fields["max_running"].default + fields["max_queue"].default + OWN_FILES
    if most < needed:
        return Finding("open files", "warning", f"{most}, and a full gateway needs about {needed}", "ulimit -Hn 65536")
    return Finding("open files", "ok", f"{most}")


def shared_memory(folder: Path) -> Finding:
    """Whether Ray has room for its store; where there is too little it takes a disk."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return Finding(str(folder), "warning", "missing", "mount a tmpfs there, or say --no-ray")
    found = f"{free >> 20} MiB free"
    if free < RAY_STORE_BYTES:
        remedy = "docker run --shm-size 256m, or say --no-ray"
        return Finding(str(folder), "warning", f"{found}, and Ray wants {RAY_STORE_BYTES >> 20}", remedy)
    return Finding(str(folder), "ok", found)


def temporary_files() -> Finding:
    """Whether Ray's sockets fit into the folder for temporary files, or into another."""
    check = "temporary files"
    wanted = tempfile.gettempdir()
    try:
        parent = parent_for_sockets(RAY_SOCKET)
    except ConfigError as error:
        return Finding(check, "warning", error.message, "TMPDIR=/tmp, or say --no-ray")
    where = wanted if str(parent) == wanted else f"{wanted}; Ray's in {parent}, where the paths of its sockets fit"
    return Finding(check, "ok", where)


def disk(home: Path) -> Finding:
    """Whether models can be fetched and the C++ forward be kept."""
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
