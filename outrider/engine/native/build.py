"""Compile the C++ library for the processor of this machine and keep it in the cache folder. Called by `library`.

The file's name contains a hash of the sources, flags and processor, and a hash of the compiler, so that a folder that
several machines or versions share has a file for each. If two workers start at once, both compile, and the last rename
wins. Without a compiler, a file that any compiler made from these sources for this processor is used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from outrider.wire.processes.folders import cache_folder
from outrider.wire.telemetry.phases import log_phase

FLAGS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
)
"""Compiler flags for the C++ kernels. None of them allows the compiler to reorder the additions of a sum, since its
bits must be the same everywhere."""
FOLDER = Path(__file__).parent
"""Folder of the C++ sources."""
COMPILE_TIMEOUT_S = 300
"""Maximum time in seconds of one compilation. An unfinished output file that is older than twice this time was left by
a killed process, and is removed."""

_REMEDY = "set OUTRIDER_CACHE_DIR to a folder that can be"


class BuildError(Exception):
    """Raised if the C++ kernels cannot be compiled: no compiler, or it rejects the sources. The message is one line."""


def built_library() -> Path:
    """Return the path of the shared library of the C++ kernels for this machine. The library is compiled first if it
    does not exist. Raises BuildError.
    """
    path, compiler = library_path()
    if not path.exists():
        log_phase("compiling the C++ forward, once on this machine")
        compile_to(path, compiler)
    return path


def library_path() -> tuple[Path, str]:
    """Return the path of the shared library of the C++ kernels for this machine, and the path of the compiler to make
    it with. The library may not exist yet.

    If there is no compiler, return the path of an existing library and an empty string. Raises BuildError if there is
    neither.
    """
    folder = cache_folder()
    name = f"fused-{_machine_key()}"
    try:
        compiler = find_compiler()
    except BuildError:
        existing = sorted(folder.glob(f"{name}-*.so"))
        if existing:
            return existing[0], ""
        raise
    return folder / f"{name}-{_hash(compiler, _version(compiler))}.so", compiler


def find_compiler() -> str:
    """Return the path of the compiler $CXX or, without it, c++, g++ or clang++. Raises BuildError if there is none."""
    names = ["c++", "g++", "clang++"]
    chosen = os.environ.get("CXX")
    if chosen:
        names = [chosen]
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler: {', '.join(names)} not found; install g++ or set CXX")


def check_owner(path: Path) -> None:
    """Raise BuildError for a library file that another account owns or may write to: loading it would run that
    account's code.
    """
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise BuildError(f"{path} belongs to another account (uid {status.st_uid})")
    if status.st_mode & 0o022:
        raise BuildError(f"{path} may be written by other accounts")


def check_writable(folder: Path) -> None:
    """Raise BuildError if a file cannot be created in this folder, or the folder itself."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK | os.X_OK):
        raise BuildError(f"cannot build in {folder}: {existing} cannot be written; {_REMEDY}")


def compile_to(path: Path, compiler: str) -> None:
    """Compile the shared library of the C++ kernels to `path`. Raises BuildError.

    The compiler writes to another file name first, so that no other process loads an unfinished library.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so.part")
        os.close(handle)
        command = [compiler, *FLAGS, *_machine_flags(), str(FOLDER / "fused.cpp"), "-o", temporary]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        if done.returncode:
            raise BuildError(f"{compiler} failed: {_first_error(done.stderr)}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
    except OSError as error:
        raise BuildError(f"cannot build in {path.parent}: {error}; {_REMEDY}") from error
    except subprocess.SubprocessError as error:
        raise BuildError(f"cannot build in {path.parent}: {error}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _remove_abandoned(folder: Path) -> None:
    # Files of builds that were killed.
    for part in folder.glob("*.so.part"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - part.stat().st_mtime > 2 * COMPILE_TIMEOUT_S:
                part.unlink()


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for line in lines:
        if "error" in line.lower():
            return line
    if lines:
        return lines[0]
    return "no message"


def _machine_flags() -> tuple[str, ...]:
    if platform.machine() in ("aarch64", "arm64"):
        return ("-mcpu=native",)
    return ("-march=native",)


@functools.lru_cache
def _machine_key() -> str:
    texts: list[str] = []
    for source in sorted((*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp"))):
        texts += (source.name, source.read_text())
    return _hash(*FLAGS, *_machine_flags(), platform.machine(), _instruction_sets(), *texts)


def _hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


@functools.lru_cache
def _version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error


def _instruction_sets() -> str:
    # Those of the processor, from which -march=native chooses.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return line
    return platform.processor()
