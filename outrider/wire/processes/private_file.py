"""`warn_if_open` warns of a file with a secret that other accounts may read. Called where such a file is read."""

from __future__ import annotations

import stat
from pathlib import Path

from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

OPEN_BITS = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH
"""Permission bits for which a warning about a private file is logged. The group's read bit is not among them, since a
pod reads a mounted Secret as a member of its group."""


def warn_if_open(path: Path) -> None:
    """Log a warning if other accounts may read or write the file, or its group may write it. If the file does not
    exist, there is no warning.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    if mode & OPEN_BITS:
        log.warning("%s has mode %04o: other accounts may read or change it; chmod 600 it", path, mode)
