"""What `make release` says of a version, and that the versions it says are those that the tests ran with."""

from __future__ import annotations

import io
import os
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from deploy.docker.requirements import requirements
from deploy.release import __main__ as making
from deploy.release.notes import ReleaseError, changes, pins, versions
from tests.upgrade import __main__ as upgrading

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


def test_a_source_archive_forgets_who_packed_it_and_when(tmp_path: Path) -> None:
    packed = []
    for mtime, names in ((1, ["a/one.py", "a/two.py"]), (2_000_000_000, ["a/two.py", "a/one.py"])):
        path = tmp_path / f"{mtime}.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size, member.mtime, member.uid, member.uname = len(name), mtime, mtime % 9, str(mtime)
                tar.addfile(member, io.BytesIO(name.encode()))
        making.settle(path, 1_700_000_000)
        packed.append(path.read_bytes())
    assert packed[0] == packed[1]
    with tarfile.open(tmp_path / "1.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    assert (tmp_path / "a/two.py").read_text() == "a/two.py"
    assert os.stat(tmp_path / "a/one.py").st_mtime == 1_700_000_000


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


def test_an_upgrade_from_a_commit_that_is_none_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["upgrade", "no-such-commit"])
    with pytest.raises(SystemExit):
        upgrading.main()
    assert "'no-such-commit' is no commit, branch or tag" in capsys.readouterr().err
