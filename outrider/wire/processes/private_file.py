"""Warn of a file with a secret that more accounts can reach than should. Called by whoever reads the file."""

from __future__ import annotations

import stat
from pathlib import Path

from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

OPEN_BITS = stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH
"""Not a group's right to read: a Secret that is mounted into a pod is read by its group."""


def warn_if_open(path: Path) -> None:
    """Log a warning where others may read or write the file, or its group may write it. A missing file has no mode."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    if mode & OPEN_BITS:
        log.warning("%s has mode %04o: other accounts may read or change it; chmod 600 it", path, mode)
