"""The API keys in force, from a file that is read again when it changes. Used by `gateway.access`."""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Callable

from outrider.wire.api_keys import ApiKey, digest_of, read_keys
from outrider.wire.errors import ConfigError
from outrider.wire.log import get_logger

log = get_logger(__name__)

LOOK_S = 1.0
"""How often the file is looked at, while requests come or metrics are read."""

RETRY_S = 10.0
"""A file that could not be used is tried again after this, though unchanged: it need not be the file that was wrong."""

Mark = tuple[int, int, int, int, int, int]
"""A file's modification time (ns), inode and size, and who may read it: mode, owner and group."""


class KeyRing:
    """Raises ConfigError for a file that cannot be used at start. One that breaks later is logged; the keys stay."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._mark = _mark_of(path)
        self._looked_s = clock()
        self._failure: str | None = None
        """Why the keys are not those of the file."""
        self._retry_at_s = 0.0
        self.keys = read_keys(path)

    def is_outdated(self) -> bool:
        """Whether the file cannot be used now, so that older keys are in force."""
        self._look()
        return self._failure is not None

    def find(self, secret: str) -> ApiKey | None:
        """The key of this secret. It is compared with all of them, each in constant time."""
        self._look()
        digest = digest_of(secret)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
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
            self._failure, self._retry_at_s = error.message, now + RETRY_S
        else:
            self._failure = None
            log.info("%d API keys from %s", len(self.keys), self._path)


def _mark_of(path: str) -> Mark | None:
    """None for a file that is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode, found.st_uid, found.st_gid
