"""What `make release` says of a version, and that the versions it says are those that the tests ran with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from deploy.docker.requirements import requirements
from deploy.release import __main__ as making
from deploy.release.notes import ReleaseError, changes, pins, versions

REPO = Path(__file__).resolve().parents[2]
RUNTIME = ["engine", "ray", "trace", "certs", "tune"]
CHANGELOG = """\
# Changelog

## [Unreleased] - 0.3.0

### Added

- New.

### Removed

- Gone.

## [0.2.0] - 2026-01-02

### Fixed

- Mended.

## [0.1.0] - 2026-01-01
"""


def bounds() -> dict[str, Version]:
    """By name: what pyproject.toml asks for at least."""
    asked = [Requirement(line) for line in requirements(REPO / "pyproject.toml", RUNTIME)]
    return {one.name.lower(): Version(next(iter(one.specifier)).version) for one in asked}


@pytest.mark.parametrize(
    ("version", "entries"), [("0.3.0", {"Added": "- New.", "Removed": "- Gone."}), ("0.2.0", {"Fixed": "- Mended."})]
)
def test_the_notes_of_a_version_are_its_entries(version: str, entries: dict[str, str]) -> None:
    assert changes(CHANGELOG, version) == entries


@pytest.mark.parametrize("version", ["0.1.0", "0.2", "0.4.0"])
def test_a_version_of_which_the_changelog_says_nothing_is_not_released(version: str) -> None:
    with pytest.raises(ReleaseError, match=rf"CHANGELOG.md says nothing of version {version}: write"):
        changes(CHANGELOG, version)


def test_a_kind_that_nobody_knows_is_named() -> None:
    with pytest.raises(ReleaseError, match=r"\['Mended'\] under 0.2.0"):
        changes(CHANGELOG.replace("### Fixed", "### Mended"), "0.2.0")


@pytest.mark.parametrize(
    ("version", "old", "new", "says"),
    [
        ("0.3.0", "### Removed", "### Added", r"\['Added'\] more than once under 0.3.0"),
        ("0.3.0", "- Gone.", "", r"nothing in \['Removed'\] under 0.3.0"),
        ("0.2.0", "### Fixed", "- Lost.\n\n### Fixed", "of no kind under 0.2.0"),
    ],
)
def test_no_entry_is_left_out_of_the_notes(version: str, old: str, new: str, says: str) -> None:
    with pytest.raises(ReleaseError, match=says):
        changes(CHANGELOG.replace(old, new), version)


def test_the_oldest_versions_tested_are_the_bounds_of_the_package() -> None:
    oldest = pins(REPO / "constraints-oldest.txt")
    assert {name: Version(oldest[name]) for name in bounds()} == bounds()


def test_the_newest_versions_tested_are_within_the_bounds() -> None:
    newest = pins(REPO / "constraints.txt")
    assert {name for name, least in bounds().items() if Version(newest[name]) < least} == set()


def test_the_versions_that_the_documentation_says_were_tested_are_those() -> None:
    assert versions(REPO) in (REPO / "docs/releases.md").read_text()


def test_an_archive_forgets_who_packed_it_and_when(tmp_path: Path) -> None:
    packed = []
    for mtime, names in ((1, ["one.py", "two.py"]), (2_000_000_000, ["two.py", "one.py"])):
        folder = tmp_path / str(mtime)
        folder.mkdir()
        for name in names:
            (folder / name).write_text(name)
            os.utime(folder / name, (mtime, mtime))
        path = tmp_path / f"{mtime}.tar.gz"
        making.pack(folder, "a", path, 1_700_000_000)
        packed.append(path.read_bytes())
    assert packed[0] == packed[1]
    with tarfile.open(tmp_path / "1.tar.gz") as tar:
        assert {(one.uid, one.gid, one.uname, one.gname) for one in tar.getmembers()} == {(0, 0, "", "")}
        tar.extractall(tmp_path, filter="data")
    assert (tmp_path / "a/two.py").read_text() == "two.py"
    assert os.stat(tmp_path / "a/one.py").st_mtime == 1_700_000_000


def test_a_release_that_fails_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dist, is_running = tmp_path / "dist", False

    def output(command: list[str | Path], **_: str) -> str:
        if command[0] == "docker" and not is_running:
            raise ReleaseError("docker buildx build ... gave 1")
        return ""

    def extract(tree: Path) -> None:
        shutil.copytree(REPO / making.CHART, tree / making.CHART)
        for name in ("pyproject.toml", "CHANGELOG.md", "constraints.txt", "constraints-oldest.txt"):
            shutil.copy(REPO / name, tree)

    monkeypatch.setattr(making, "output", output)
    monkeypatch.setattr(making, "extract", extract)
    monkeypatch.setattr(making, "commit_time", lambda: "1700000000")
    monkeypatch.setattr(making, "bill", lambda *_: None)
    for folder in ("dist", "first", "second"):
        (tmp_path / folder).mkdir()
    (dist / "before").touch()
    with pytest.raises(ReleaseError, match="the image outrider-gateway was not built"):
        making.release(dist, ["gateway"], tmp_path / "first")
    assert [path.name for path in dist.iterdir()] == ["before"]
    is_running = True
    making.release(dist, ["gateway"], tmp_path / "second")
    version = making.version_of(REPO)
    archives = {f"outrider-{version}.tar.gz", f"outrider-{version}.tgz"}
    assert {path.name for path in dist.iterdir()} == {*archives, "NOTES.md", "SHA256SUMS"}
    assert {line.split()[1] for line in (dist / "SHA256SUMS").read_text().splitlines()} == {*archives, "NOTES.md"}
    with tarfile.open(dist / f"outrider-{version}.tar.gz") as tar:
        assert {f"outrider-{version}/{name}" for name in ("constraints.txt", making.CHART)} <= set(tar.getnames())
    with tarfile.open(dist / f"outrider-{version}.tgz") as tar:
        assert {"outrider/Chart.yaml", "outrider/templates/pool-deployment.yaml"} <= set(tar.getnames())


@pytest.mark.parametrize(
    ("docker", "says"),
    [("echo ERROR: OCI exporter is not supported >&2; exit 1", "exporter is not"), (None, "no command")],
)
def test_an_engine_that_exports_no_archives_is_refused_before_anything_is_built(
    docker: str | None, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if docker is not None:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{docker}\n")
        (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["release"])
    monkeypatch.setattr(making, "release", None)
    assert making.main() == making.NO_ENGINE
    said = capsys.readouterr().err
    assert says in said and "make release ARGS=--no-images" in said


@pytest.mark.parametrize("url", ["https://torch.example/cpu", None])
def test_the_bill_is_of_the_torch_that_the_images_take(
    url: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(making, "output", lambda command, **_: commands.append([*map(str, command)]))
    monkeypatch.setattr(making.venv, "create", lambda _: None)
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    if url:
        monkeypatch.setenv("TORCH_INDEX_URL", url)
    making.bill(REPO, tmp_path, tmp_path, "1")
    making.image("worker", "0.1.0", REPO, tmp_path, "1")
    libraries, built = commands[0], commands[-1]
    assert "install" in libraries and built[0] == "docker"
    asked = libraries[libraries.index("--extra-index-url") + 1] if "--extra-index-url" in libraries else None
    assert asked == url
    assert (f"TORCH_INDEX_URL={url}" in built) == bool(url)


def test_python_beside_a_clone_imports_an_editable_install(tmp_path: Path) -> None:
    clone = tmp_path / "outrider"
    for package in ("outrider", "gateway"):
        (clone / package).mkdir(parents=True)
        (clone / package / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(REPO / name, clone / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=clone, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    imported = "import site, sys; site.addsitedir(sys.argv[1]); import outrider; print(outrider.__file__)"
    started = [sys.executable, "-S", "-c", imported, tmp_path / "site"]  # -S: without this environment's own install
    found = subprocess.run(started, cwd=tmp_path, check=True, capture_output=True, text=True, env={})
    assert found.stdout == f"{clone / 'outrider/__init__.py'}\n"
