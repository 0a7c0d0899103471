"""What is wrong with a machine, planted, and the remedy beside it."""

from __future__ import annotations

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


def test_too_few_files_too_little_shared_memory_and_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "100, and a full gateway needs about 576 -> ulimit -Hn" in text_of(machine.open_files(100), "warning")
    assert machine.open_files(-1).state == machine.open_files(4096).state == "ok"
    assert "missing -> mount a tmpfs" in text_of(machine.shared_memory(tmp_path / "none"), "warning")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "yet"))
    assert str(tmp_path) in text_of(machine.disk(tmp_path), "ok")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: Usage(0, 0, 64 << 20))
    assert "64 MiB free, and Ray wants 100 -> docker run --shm-size" in text_of(
        machine.shared_memory(tmp_path), "warning"
    )
    assert f"0.1 GiB free at {tmp_path} -> make room" in text_of(machine.disk(tmp_path), "warning")
