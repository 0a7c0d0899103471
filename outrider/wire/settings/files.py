"""Files written at once or not at all: keys, certificates, API keys."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from outrider.wire.errors import ConfigError


def write_whole(path: str | Path, content: bytes, *, private: bool) -> None:
    """private: a new file is for its owner alone. One that is replaced keeps its owner, group and mode, where this
    process may give them. A link stays one, and what it leads to is replaced. Raises ConfigError.
    """
    real = Path(os.path.realpath(path))
    try:
        handle, temporary = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name}.")  # for its owner alone
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
    """Its mode only with its group, as another group must not read what was for that one."""
    for owner in (before.st_uid, -1):
        with contextlib.suppress(OSError):
            os.chown(path, owner, before.st_gid)
            os.chmod(path, stat.S_IMODE(before.st_mode))
            return
