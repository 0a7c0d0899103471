"""Reads the file of API keys, and reads it again when it changes."""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Callable
from pathlib import Path

from outrider.wire.errors import ConfigError
from outrider.wire.processes.private_file import warn_if_open
from outrider.wire.settings.api_keys import ApiKey, digest_of, read_keys
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

LOOK_S = 1.0
"""Shortest time between two checks whether the file of API keys has changed, in seconds. A check is made when a request
arrives or metrics are scraped, so a key that was removed from the file is accepted for at most this long."""
RETRY_S = 10.0
"""Seconds after which an unusable file of API keys is read again although it has not changed. Reading may have failed
for another reason, such as too many open files."""

Mark = tuple[int, int, int, int, int, int]
"""Modification time in ns, inode, size, mode, owner and group of a file. If one differs from that at the last read, the
file has changed."""


class KeyRing:
    """The API keys in a file, which is read again when it changes.

    If the changed file is unusable, the error is logged and the previous keys stay valid.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file. Raises ConfigError if it cannot be used."""
        self._path = path
        self._clock = clock
        self._mark = _mark_of(path)
        self._checked_s = clock()
        self._failure: str | None = None
        """Error of the last attempt to read the file; None if `keys` are the keys in the file."""
        self._retry_at_s = 0.0
        self.keys = read_keys(path)
        warn_if_open(Path(path))

    def is_outdated(self) -> bool:
        """Return whether the last attempt to read the file of API keys failed. The keys of the last successful read
        then stay in use.
        """
        self._reload()
        return self._failure is not None

    def find(self, secret: str) -> ApiKey | None:
        """Return the API key with this secret; None if no key has it.

        The secret's digest is compared with that of every key, each in constant time.
        """
        self._reload()
        digest = digest_of(secret)
        match = None
        for key in self.keys:  # all of them, so that the time does not depend on which one matches
            if hmac.compare_digest(key.sha256, digest):
                match = key
        return match

    def _reload(self) -> None:
        now = self._clock()
        if now - self._checked_s < LOOK_S:
            return
        self._checked_s = now
        mark = _mark_of(self._path)
        changed = mark != self._mark
        if not changed and (self._failure is None or now < self._retry_at_s):
            return
        self._mark = mark
        try:
            self.keys = read_keys(self._path)
        except ConfigError as error:
            if changed or error.message != self._failure:
                log.error("the API keys stay as they were: %s", error.message)
            self._failure = error.message
            self._retry_at_s = now + RETRY_S
        else:
            self._failure = None
            warn_if_open(Path(self._path))
            log.info("%d API keys from %s", len(self.keys), self._path)


def _mark_of(path: str) -> Mark | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size, stat.st_mode, stat.st_uid, stat.st_gid
