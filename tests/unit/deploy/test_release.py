"""A release's versions are those that the tests ran with, and the CHANGELOG has its notes."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deploy.docker.requirements import requirements

REPO = Path(__file__).resolve().parents[3]
RUNTIME = ["engine", "ray", "trace", "certs", "tune"]
TOLD = ("torch", "transformers", "ray", "grpcio", "protobuf", "fastapi", "pydantic", "tokenizers")


def bounds() -> dict[str, Version]:
    """By name: what pyproject.toml asks for at least."""
    asked = [Requirement(line) for line in requirements(REPO / "pyproject.toml", RUNTIME)]
    return {canonicalize_name(one.name): Version(next(iter(one.specifier)).version) for one in asked}


def pins(name: str) -> dict[str, str]:
    """The versions that a constraints file pins, by normalized name."""
    lines = (line.partition("#")[0].strip() for line in (REPO / name).read_text().splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(package): version for package, version in pairs}


def test_the_oldest_versions_tested_are_the_bounds_of_the_package() -> None:
    oldest = pins("constraints-oldest.txt")
    assert {name: Version(oldest[name]) for name in bounds()} == bounds()


def test_the_newest_versions_tested_are_within_the_bounds() -> None:
    newest = pins("constraints.txt")
    assert {name for name, least in bounds().items() if Version(newest[name]) < least} == set()


def test_the_documented_tested_versions_are_right() -> None:
    text = (REPO / "docs/releases.md").read_text()
    classifiers = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["classifiers"]
    pythons = [one.rpartition(" ")[2] for one in classifiers if one.startswith("Programming Language :: Python :: ")]
    assert f"| Python | {pythons[0]} | {pythons[-1]} |" in text
    for name in TOLD:
        assert f"| {name} | {pins('constraints-oldest.txt')[name]} | {pins('constraints.txt')[name]} |" in text


def test_the_changelog_has_notes_of_this_version() -> None:
    version = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
    heading = rf"^## \[(?:{re.escape(version)}\]|Unreleased\] - {re.escape(version)}$)"
    assert re.search(heading, (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("docker", ["echo ERROR: OCI exporter is not supported >&2; exit 1", None])
def test_an_engine_that_exports_no_archives_is_refused_before_anything_is_built(
    docker: str | None, tmp_path: Path
) -> None:
    for program in ("dirname", "git"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    if docker is not None:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{docker}\n")
        (tmp_path / "docker").chmod(0o755)
    script = ["/bin/sh", REPO / "deploy/release.sh"]
    made = subprocess.run(script, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert made.returncode == 3 and "--no-images" in made.stderr


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
