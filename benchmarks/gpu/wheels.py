"""Wheels that a bare GPU machine lacks: collected here by `make gpu-wheels`, unpacked there by the kit itself.

`python -m benchmarks.gpu.wheels` downloads them into .whl, for CPython 3.12 on x86-64 Linux, at the versions of
constraints.txt. There the kit unpacks those whose package is missing or older into a folder that it puts before all
others on its children's path: a bare machine has no virtual environment, and a wheel is an archive.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FOLDER = REPO / ".whl"
LIST = Path(__file__).with_suffix(".txt")
PACKAGES = [line for line in LIST.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
NEEDED = {
    "grpc": "grpcio",
    "google.protobuf": "protobuf",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "llguidance": "llguidance",
    "orjson": "orjson",
    "pydantic": "pydantic",
    "pydantic_settings": "pydantic-settings",
    "prometheus_client": "prometheus-client",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
    "yaml": "pyyaml",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "torch": "torch",
    "transformers": "transformers",
}
"""Packages by the module that the kit imports of them."""
PLATFORMS = (
    "manylinux_2_31_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
"""Tags that pip is given, since it takes each literally. llguidance is of 2_31."""


def collect(folder: Path, python: str) -> list[Path]:
    """Download the wheels for that Python into an empty folder and return them. Ends this process where pip fails."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    wanted = [f"{name}=={version}" for name, version in pinned().items()]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    if subprocess.run([*command, "-d", str(folder), *wanted]).returncode:
        sys.exit("pip could not download the wheels of the GPU kit, see above")
    return sorted(folder.glob("*.whl"))


def pinned() -> dict[str, str]:
    """Return the versions of PACKAGES in constraints.txt."""
    found = {}
    for line in (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        if version:
            found[normalized(name)] = version.strip()
    return {name: found[name] for name in PACKAGES}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def unpack(destination: Path, folder: Path = FOLDER) -> list[str]:
    """Unpack the wheels whose package is missing or older here; return their names and versions."""
    unpacked = []
    for wheel in sorted(folder.glob("*.whl")):
        name, version, *tags = wheel.stem.split("-")
        if fits(tags) and is_older(installed(name), version):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(destination)
            unpacked.append(f"{normalized(name)} {version}")
    return unpacked


def fits(tags: list[str]) -> bool:
    """Return whether a wheel of these tags (python, ABI, platform) is for this interpreter."""
    python, abi, _ = tags[-3:]
    if python.startswith("py"):  # of any Python 3: py3 or py2.py3
        return "py3" in python
    minor = int(python.removeprefix("cp3"))  # cp312
    return minor == sys.version_info.minor or (abi == "abi3" and minor < sys.version_info.minor)


def is_older(installed_version: str | None, version: str) -> bool:
    return installed_version is None or _numbers(installed_version) < _numbers(version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def installed(name: str) -> str | None:
    """Return a package's version here; None where it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing() -> list[str]:
    """Return what is missing of what the kit imports, each with the wheel that brings it."""
    found = []
    for module, package in NEEDED.items():
        if installed(package) is None:
            how = "make gpu-wheels brings it" if package in PACKAGES else "not among the kit's wheels"
            found.append(f"{package} (module {module}; {how})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Download the wheels that a bare GPU machine lacks.")
    parser.add_argument("--python", default="3.12", help="of that machine")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    for wheel in collect(options.folder, options.python):
        print(f"{wheel.stat().st_size / 2**20:6.2f} MiB  {wheel.name}")


if __name__ == "__main__":
    main()
