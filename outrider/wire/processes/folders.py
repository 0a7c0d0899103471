"""Private folders and lock files of this user on this machine. Workers take locks before they pin cores, size a cache
or join their ranks; the launcher needs folders for sockets.

Every account may write to the system's folder for temporary files, so another account may already have created a file
of the same name. Therefore only files and folders are used that belong to this user and are closed to others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from outrider.wire.errors import ConfigError
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

MAX_SOCKET_PATH_BYTES = 107
"""Maximum bytes of the path of a Unix socket: the size of Linux's sockaddr_un.sun_path without the final zero."""
RAY_SOCKET = "/outrider-12345678/ray/session_2026-01-01_00-00-00_123456_4194304/sockets/plasma_store"
"""Example of the longest path that a socket of Ray has below the folder for temporary files. `parent_for_sockets` finds
a folder whose path is short enough for it."""
_POLL_S = 0.1
"""Seconds between two attempts to take a lock."""


def cache_folder() -> Path:
    """Return the path of Outrider's cache folder: $OUTRIDER_CACHE_DIR if it is set, otherwise ~/.cache/outrider."""
    return Path(os.environ.get("OUTRIDER_CACHE_DIR") or Path.home() / ".cache" / "outrider")


def make_private(folder: Path) -> Path:
    """Create a folder that only this user may access. If the folder exists already, check that it is such a folder.
    Return `folder`.

    Raises ConfigError if an existing one belongs to another account, is a link or a file, or is open to others. Raises
    OSError if the folder cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{str(folder)!r} is a link or a file in a folder's place; remove it")
    if found.st_uid != os.getuid():
        raise ConfigError(f"{str(folder)!r} belongs to another account (uid {found.st_uid}); remove it")
    if found.st_mode & 0o077:
        raise ConfigError(f"{str(folder)!r} is a folder which others may enter; remove it, or chmod it to 700")
    return folder


def shared_folder() -> Path:
    """Return the private folder for the locks of all workers of this user on this machine. Creates the folder if it is
    missing.

    It is in the system's folder for temporary files. If another account has taken its name there, it is in
    XDG_RUNTIME_DIR or in the cache folder. Raises ConfigError if none of the three can be used; the error says why for
    each of them.
    """
    refusals = list[str]()
    for parent in _parents():
        try:
            folder = make_private(parent / f"outrider-{os.getuid()}")
        except ConfigError as error:
            refusals.append(error.message)
        except OSError as error:
            refusals.append(f"{str(parent)!r}: {error.strerror}")
        else:
            if refusals:
                log.warning("locks are in %s: %s", folder, "; ".join(refusals))
            return folder
    raise ConfigError(f"there is no folder for locks of this user: {'; '.join(refusals)}")


def parent_for_sockets(path: str) -> Path:
    """Return a writable folder whose path, followed by `path`, is short enough for a Unix socket. It is the folder for
    temporary files if possible, otherwise another temporary folder of the system or of the user's session.

    path: the socket's path below the folder, such as /outrider-12345678/control.sock. Raises ConfigError if there is no
    such folder.
    """
    temporary = Path(tempfile.gettempdir())
    others = [Path("/tmp"), Path("/var/tmp")]
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session:
        others.append(Path(session))
    max_bytes = MAX_SOCKET_PATH_BYTES - len(os.fsencode(path))
    for parent in [temporary, *others]:
        if len(os.fsencode(parent)) <= max_bytes and os.access(parent, os.W_OK | os.X_OK):
            return parent
    raise ConfigError(
        f"the folder for temporary files is {str(temporary)!r}, {len(os.fsencode(temporary))} bytes, and sockets allow "
        f"{max_bytes} there; no other of {', '.join(map(str, others))} can be written. Set TMPDIR to a shorter one"
    )


def _parents() -> Iterator[Path]:
    with contextlib.suppress(OSError):  # there is no such folder on this machine
        yield Path(tempfile.gettempdir())
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield Path(runtime)
    folder = cache_folder() / platform.node()  # a home may be shared by machines, locks must not be
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    yield folder


def try_lock(path: Path) -> int | None:
    """Try to lock a file. Return the file descriptor that holds the lock until it is closed. None = another process
    holds the lock.

    Raises ConfigError if the file is a link or belongs to another account, or if its file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"the lock {str(path)!r} cannot be opened: {error.strerror}; remove it") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(descriptor)
        raise ConfigError(f"the lock {str(path)!r} is another account's, or no file; remove it")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"the file {str(path)!r} cannot be locked: {error.strerror}; set TMPDIR or XDG_RUNTIME_DIR to a folder "
            "on a disk of this machine"
        ) from None
    return descriptor


@contextlib.contextmanager
def hold_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Context manager: wait for the lock on the file `path`, and hold it during the block. If another process still
    holds it after `timeout_s` seconds, log a warning and run the block without the lock.

    Raises ConfigError if the file is a link or belongs to another account, or if its file system has no locks.
    """
    descriptor = try_lock(path)
    if descriptor is None:
        log.info("waiting for another process of this user, which holds %s", path)
    deadline_s = time.monotonic() + timeout_s
    while descriptor is None and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        descriptor = try_lock(path)
    if descriptor is None:
        log.warning("%s was held for %g s by another process of this user: going on without it", path, timeout_s)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
