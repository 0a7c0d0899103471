"""Files written at once or not at all: keys, certificates, API keys."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from outrider.wire.errors import ConfigError


def write_whole(path: str | Path, content: bytes, *, private: bool) -> None:
    """private: for its owner alone. A link stays one, and what it leads to is replaced. Raises ConfigError."""
    real = Path(os.path.realpath(path))
    try:
        handle, temporary = tempfile.mkstemp(dir=real.parent, prefix=f".{real.name}.")  # for its owner alone
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            if not private:
                os.chmod(temporary, 0o644)
            os.replace(temporary, real)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
