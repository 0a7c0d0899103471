"""What is wrong with a machine, planted, and the remedy beside it."""

import socket
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest

from outrider.cli.doctor import machine
from outrider.cli.doctor.machine import Finding

Usage = namedtuple("Usage", "total used free")


def text_of(found: Finding | list[Finding], state: str) -> str:
    """All of one finding, which must be in that state."""
    findings = found if isinstance(found, list) else [found]
    one = next(each for each in findings if each.state == state)
    return f"{one.check}: {one.found} -> {one.remedy}"


class Installed:
    """Stands in for importlib.metadata: what the package asks for, and which versions there are."""

    def __init__(self, wanted: list[str], python: str = ">=3.11") -> None:
        self.requires = lambda package: wanted
        self.metadata = lambda package: {"Requires-Python": python}
        self.version = metadata.version
        self.PackageNotFoundError = metadata.PackageNotFoundError


@pytest.mark.parametrize(
    ("wanted", "state", "found"),
    [
        (["rich>=9999"], "problem", "libraries: rich {} (needs >=9999) -> pip install 'rich>=9999'"),
        (['no-such-library>=2; extra == "engine"'], "problem", "extra engine: without no-such-library: no worker runs"),
        (['no-such-library>=2; extra == "ray"'], "warning", "extra ray: without no-such-library: `outrider up` needs"),
        (['no-such-library>=2; sys_platform == "win32"'], "ok", "Python: Python 3"),
    ],
)
def test_a_library_that_is_missing_or_old(
    monkeypatch: pytest.MonkeyPatch, wanted: list[str], state: str, found: str
) -> None:
    monkeypatch.setattr(machine, "metadata", Installed(wanted))
    findings = list(machine.versions())
    assert text_of(findings, state).startswith(found.format(metadata.version("rich")))
    assert sum(each.state != "ok" for each in findings) == (state != "ok")


def test_another_python_and_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is not installed" in text_of(list(machine.versions("no-such-package")), "warning")
    monkeypatch.setattr(machine, "metadata", Installed([], ">=3.99"))
    assert text_of(list(machine.versions()), "problem").endswith("-> needs >=3.99")


def test_variables_that_are_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_of(machine.settings(), "ok") == "environment: no settings in it -> "
    monkeypatch.setenv("OUTRIDER_GATEWAY_PROT", "1")
    monkeypatch.setenv("OUTRIDER_TARGET_DEVCE", "cpu")
    target, gateway = machine.settings()
    assert "OUTRIDER_TARGET_DEVCE is no setting of the target; did you mean" in text_of(target, "problem")
    assert "OUTRIDER_GATEWAY_PROT is no setting of the gateway; did you mean" in text_of(gateway, "problem")
    monkeypatch.delenv("OUTRIDER_GATEWAY_PROT")
    monkeypatch.delenv("OUTRIDER_TARGET_DEVCE")
    monkeypatch.setenv("OUTRIDER_CACHE_DIRR", "/tmp")
    (found,) = machine.settings()
    assert "OUTRIDER_CACHE_DIRR is a setting of no part; did you mean" in text_of(found, "problem")


def test_cores_that_are_shared_or_rationed(tmp_path: Path) -> None:
    four = frozenset(range(4))
    assert text_of(machine.cores(four, 1, tmp_path), "ok") == "cores: 4: the target gets 3, a draft 1 -> "
    assert "or --no-draft: workers" in text_of(machine.cores(frozenset({0}), 1, tmp_path), "warning")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("250000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert "the container may use 2.5 at a time" in text_of(machine.cores(four, 1, tmp_path), "warning")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert "may use 0.5 at a time -> give the container 4 CPUs" in text_of(machine.cores(four, 1, tmp_path), "warning")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cores(four, 1, tmp_path).state == "ok"


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = list(machine.ports("127.0.0.1", {"--port": port, "--grpc-port": 0}))
    assert f"port {port}: cannot listen on 127.0.0.1:{port}: Address already in use" in text_of(found, "problem")
    assert "end what listens there, or say --port PORT" in text_of(found, "problem")
    assert sum(each.state == "ok" for each in found) == 1


def test_an_address_that_is_not_this_machines() -> None:
    found = text_of(list(machine.ports("192.0.2.1", {"--port": 8000})), "problem")
    assert "192.0.2.1:8000: Cannot assign requested address; --host must be an address of this machine" in found
    assert "--port" not in found


def test_too_few_files_too_little_shared_memory_and_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "100, and a full gateway needs about 576 -> ulimit -Hn" in text_of(machine.open_files(100), "warning")
    assert machine.open_files(-1).state == machine.open_files(4096).state == "ok"
    assert "missing -> mount a tmpfs" in text_of(machine.shared_memory(tmp_path / "none"), "warning")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "yet"))
    assert str(tmp_path) in text_of(machine.disk(tmp_path), "ok")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: Usage(0, 0, 64 << 20))
    assert "64 MiB free, and Ray needs 100 -> docker run --shm-size" in text_of(
        machine.shared_memory(tmp_path), "warning"
    )
    assert f"0.1 GiB free at {tmp_path} -> make room" in text_of(machine.disk(tmp_path), "warning")
