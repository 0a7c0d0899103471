"""`warn_if_open`: a warning of a secret's file that other accounts may read. Called where such a file is read."""

from __future__ import annotations

import stat
from pathlib import Path

from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

OPEN_BITS = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH
"""Mode bits that are warned of. The group may read: a pod reads a Secret that is mounted into it as its group."""


def warn_if_open(path: Path) -> None:
    """Log a warning if other accounts may read or write the file, or its group may write it. A missing file is none."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    if mode & OPEN_BITS:
        log.warning("%s has mode %04o: other accounts may read or change it; chmod 600 it", path, mode)
