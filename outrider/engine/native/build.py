"""Compile the C++ forward for this very processor and keep the result. Called by `library`.

The file's name carries a hash of the sources, the flags and the processor, and one of the compiler, so a folder shared
by machines or versions holds a file for each. Two workers that start at once each compile and one rename wins. Where
there is no compiler, a file that another one made for these sources and this processor will do.
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

from outrider.wire.processes.places import cache_folder
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
FOLDER = Path(__file__).parent
COMPILE_TIMEOUT_S = 300
"""Seconds for one compilation; an unfinished file twice as old was abandoned."""

_REMEDY = "set OUTRIDER_CACHE_DIR to a folder that can be"


class BuildError(Exception):
    """Raised when there is no compiler here, or it does not take our sources; the message is one line."""


def built_library() -> Path:
    """Return the shared library for this machine, compiled if it is not there yet. Raises BuildError."""
    path, compiler = library_place()
    if not path.exists():
        log_phase("compiling the C++ forward, once on this machine")
        compile_to(path, compiler)
    return path


def library_place() -> tuple[Path, str]:
    """Return where this machine's library lies or will lie, and the compiler that makes it.

    Raises BuildError where there is neither a compiler nor a library that another one made.
    """
    folder, name = cache_folder(), f"fused-{_machine_key()}"
    try:
        compiler = find_compiler()
    except BuildError:
        made = sorted(folder.glob(f"{name}-*.so"))
        if made:
            return made[0], ""
        raise
    return folder / f"{name}-{_hash(compiler, _version(compiler))}.so", compiler


def find_compiler() -> str:
    """Return $CXX when it is set, else the first of the usual names that is found. Raises BuildError."""
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["c++", "g++", "clang++"]
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler: {', '.join(names)} not found; install g++ or set CXX")


def check_owner(path: Path) -> None:
    """Raise BuildError for a library that another account wrote or may write: to load it is to run its code."""
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0):
        raise BuildError(f"{path} belongs to another account (uid {found.st_uid})")
    if found.st_mode & 0o022:
        raise BuildError(f"{path} may be written by other accounts")


def check_writable(folder: Path) -> None:
    """Raise BuildError where `compile_to` could not write."""
    there = folder
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK | os.X_OK):
        raise BuildError(f"cannot build in {folder}: {there} cannot be written; {_REMEDY}")


def compile_to(path: Path, compiler: str) -> None:
    """Compile to `path`, under another name first so that nobody ever loads half a file. Raises BuildError."""
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
    """Remove what builds that were killed left behind."""
    for part in folder.glob("*.so.part"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - part.stat().st_mtime > 2 * COMPILE_TIMEOUT_S:
                part.unlink()


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")


def _machine_flags() -> tuple[str, ...]:
    return ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native",)


@functools.lru_cache
def _machine_key() -> str:
    sources = sorted((*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")))
    texts = (text for source in sources for text in (source.name, source.read_text()))
    return _hash(*FLAGS, *_machine_flags(), platform.machine(), _processor(), *texts)


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


def _processor() -> str:
    """Return the processor's instruction sets, by which -march=native decides."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
