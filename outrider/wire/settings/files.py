"""`write_whole`, which replaces a file as a whole or not at all. Used for API keys, certificates and their keys."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from outrider.wire.errors import ConfigError


def write_whole(path: str | Path, content: bytes, *, private: bool) -> None:
    """Write `content` to a file. If that fails, leave the file as it was and raise ConfigError.

    private: whether a new file is readable by its owner only. A file that is replaced keeps its owner, group and mode
    if this process may set them. If `path` is a link, the file that it leads to is replaced.
    """
    real = Path(os.path.realpath(path))
    try:
        handle, temporary = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name}.")  # readable by its owner alone
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            if not private:
                os.chmod(temporary, 0o644)
            with contextlib.suppress(FileNotFoundError):
                _make_like(temporary, os.stat(real))
            os.replace(temporary, real)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _make_like(path: str, before: os.stat_result) -> None:
    # The mode is copied only with the group: another group must not read what the mode allowed to that one.
    for owner in (before.st_uid, -1):
        with contextlib.suppress(OSError):
            os.chown(path, owner, before.st_gid)
            os.chmod(path, stat.S_IMODE(before.st_mode))
            return
