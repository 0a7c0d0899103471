"""Finds who asks by the `authorization` header, and limits what each API key may do: requests and tokens a minute by
token buckets, answers at once by a count. The file of keys is read again when it changes.
"""

from __future__ import annotations

import hmac
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge

from outrider.wire.errors import ConfigError, InvalidRequest, RateLimited, Unauthenticated
from outrider.wire.processes.private_file import warn_if_open
from outrider.wire.settings.api_keys import ApiKey, digest_of, read_keys
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

HOW = "send it as `Authorization: Bearer KEY`, or over HTTP as `x-api-key: KEY`"
MAX_HEADER_CHARS = 1024
"""What is read of an `authorization` header; `outrider keys` makes secrets of 46 characters."""
MINUTE_S = 60.0
ROUNDING = 1e-3
"""Tokens or requests: what clocks and sums may be off."""
BUSY_RETRY_S = 1.0
"""When to come back to a key that has all its answers running: nobody knows when one ends."""
LOOK_S = 1.0
"""How often the file is looked at, while requests come or metrics are read. Doubled, a key that was revoked gets in for
twice as long.
"""
RETRY_S = 10.0
"""A file that could not be used is tried again after this, though unchanged: it need not be the file that was wrong."""

Clock = Callable[[], float]


class AccessMetrics:
    """Series by API key; as many as the file has names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter("outrider_key_requests", "Requests, by API key.", ["key"], registry=registry)
        """sum by (key) (rate(outrider_key_requests_total[5m]))"""
        self.limited = Counter(
            "outrider_key_limited",
            "Requests refused for a limit of their API key.",
            ["key", "limit"],
            registry=registry,
        )
        """sum by (key, limit) (rate(outrider_key_limited_total[5m]))"""
        self.tokens = Counter("outrider_key_tokens", "Tokens, by API key.", ["key", "kind"], registry=registry)
        """sum by (key, kind) (rate(outrider_key_tokens_total[5m])): prompt or completion."""
        self.unauthenticated = Counter(
            "outrider_unauthenticated", "Requests without an API key that is valid.", ["reason"], registry=registry
        )
        """sum by (reason) (rate(outrider_unauthenticated_total[5m])): missing, unknown or expired."""
        self.keys_outdated = Gauge(
            "outrider_api_keys_outdated",
            "1 while the file of API keys cannot be used, and those that it had are in force.",
            registry=registry,
        )
        """outrider_api_keys_outdated == 1: a key that was revoked since still gets in."""


class Bucket:
    """Holds what a minute allows, and fills evenly. It may go below empty: then the debt is waited for."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_s = clock()

    def wait_s(self, amount: float) -> float:
        """Return the seconds until `amount` is there. More than a minute allows waits for a full bucket."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._filled_s) * self.per_minute / MINUTE_S)
        self._filled_s = now
        missing = min(amount, self.per_minute) - self._level
        return missing * MINUTE_S / self.per_minute if missing > ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Take `amount` out; a negative one is given back."""
        self._level -= amount


class Caller:
    """Who sends requests: one object an API key, which holds what the key may still do. It limits and counts nothing
    where no keys are asked for. RateLimited carries the seconds after which the same request passes.
    """

    def __init__(self, key: ApiKey | None, metrics: AccessMetrics, clock: Clock = time.monotonic) -> None:
        self.key = key
        self.num_answers = 0
        """Running or waiting."""
        self._metrics = metrics
        self._clock = clock
        self._requests = self._tokens = None
        if key is not None:
            self._requests = _bucket(key.requests_per_minute, clock)
            self._tokens = _bucket(key.tokens_per_minute, clock)

    @property
    def name(self) -> str | None:
        """Return the API key's name, None where no keys are asked for."""
        return None if self.key is None else self.key.name

    @property
    def weight(self) -> float:
        return 1.0 if self.key is None else self.key.weight

    def change(self, key: ApiKey) -> None:
        """Take other limits of the same key. A rate that stays keeps its level."""
        before, self.key = self.key, key
        if before is None or key.requests_per_minute != before.requests_per_minute:
            self._requests = _bucket(key.requests_per_minute, self._clock)
        if before is None or key.tokens_per_minute != before.tokens_per_minute:
            self._tokens = _bucket(key.tokens_per_minute, self._clock)

    def take_request(self) -> None:
        """Count a request, before its body is read. Raises RateLimited."""
        if self.key is not None:
            self._metrics.requests.labels(key=self.key.name).inc()
            self._take("requests_per_minute", self._requests, 1)

    @contextmanager
    def answers(self, count: int, param: str) -> Iterator[None]:
        """Hold `count` of the answers at once. Raises RateLimited, or InvalidRequest naming `param` when so many can
        never be had.
        """
        most = None if self.key is None else self.key.max_concurrent
        if most is not None and count > most:
            raise InvalidRequest(
                f"the request asks for {count} answers at once, the API key {self.name!r} may have {most} "
                "(max_concurrent); split it",
                param=param,
            )
        if most is not None and self.num_answers + count > most:
            raise self._limited(
                "max_concurrent",
                f"the API key {self.name!r} has {self.num_answers} answers running or waiting, may have {most} "
                f"(max_concurrent), and asks for {count} more; try again when one has ended",
                BUSY_RETRY_S,
            )
        self.num_answers += count
        try:
            yield
        finally:
            self.num_answers -= count

    def charge(self, num_tokens: int) -> None:
        """Take what a request may cost, before it begins; `settle` corrects it. Raises RateLimited."""
        self._take("tokens_per_minute", self._tokens, num_tokens)

    def settle(self, num_charged: int, num_prompt: int, num_output: int) -> None:
        """Take what a request did cost, in tokens, for what it was charged."""
        if self._tokens is not None:
            self._tokens.take(num_prompt + num_output - num_charged)
        if self.key is not None:
            self._metrics.tokens.labels(key=self.key.name, kind="prompt").inc(num_prompt)
            self._metrics.tokens.labels(key=self.key.name, kind="completion").inc(num_output)

    def _take(self, limit: str, bucket: Bucket | None, amount: int) -> None:
        if bucket is None:
            return
        wait_s = bucket.wait_s(amount)
        if wait_s > 0.0:
            wait_s = _rounded_up(wait_s)
            why = f"the API key {self.name!r} is over its {limit} of {bucket.per_minute}; try again in {wait_s:g} s"
            raise self._limited(limit, why, wait_s)
        bucket.take(amount)

    def _limited(self, limit: str, message: str, retry_after_s: float) -> RateLimited:
        self._metrics.limited.labels(key=self.name, limit=limit).inc()
        return RateLimited(message, param=limit, retry_after_s=retry_after_s)


def _rounded_up(wait_s: float) -> float:
    """To the digits that trailers carry, and never down: who waits as told passes."""
    unit = 10.0 ** max(-3, math.floor(math.log10(wait_s)) - 4)
    return math.ceil(wait_s / unit) * unit


def _bucket(per_minute: int | None, clock: Clock) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, clock)


Mark = tuple[int, int, int, int, int, int]
"""A file's modification time (ns), inode and size, and who may read it: mode, owner and group."""


class KeyRing:
    """Reads the file of API keys, again when it changes. One that breaks is logged, and its last keys stay."""

    def __init__(self, path: str, clock: Clock = time.monotonic) -> None:
        """Raises ConfigError for a file that cannot be used."""
        self._path = path
        self._clock = clock
        self._mark = _mark_of(path)
        self._looked_s = clock()
        self._failure: str | None = None
        """Why the keys are not those of the file."""
        self._retry_at_s = 0.0
        self.keys = read_keys(path)
        warn_if_open(Path(path))

    def is_outdated(self) -> bool:
        """Return whether the file cannot be used now, so that older keys are in force."""
        self._look()
        return self._failure is not None

    def find(self, secret: str) -> ApiKey | None:
        """Return the key of this secret. It is compared with all of them, each in constant time."""
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
            warn_if_open(Path(self._path))
            log.info("%d API keys from %s", len(self.keys), self._path)


def _mark_of(path: str) -> Mark | None:
    """None for a file that is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode, found.st_uid, found.st_gid


class Access:
    """Finds who asks; one per gateway. `ring` is None where no API key is asked for."""

    def __init__(self, ring: KeyRing | None, registry: CollectorRegistry) -> None:
        self._ring = ring
        self._metrics = AccessMetrics(registry)
        if ring is not None:
            self._metrics.keys_outdated.set_function(ring.is_outdated)
        self._callers: dict[str, Caller] = {}
        self._anonymous = Caller(None, self._metrics)

    @property
    def asks_for_keys(self) -> bool:
        return self._ring is not None

    def caller(self, authorization: str | None) -> Caller:
        """Return who sends this `authorization` header. Raises Unauthenticated, and never says how near a key was."""
        if self._ring is None:
            return self._anonymous
        secret = _secret(authorization)
        if secret is None:
            raise self._refused("missing", f"an API key is needed here; {HOW}")
        key = self._ring.find(secret)
        if key is None:
            raise self._refused("unknown", "the API key is not known here; check it, or ask for a new one")
        if key.expires is not None and key.expires <= datetime.now(UTC):
            raise self._refused(
                "expired", f"the API key {key.name!r} expired at {key.expires.isoformat()}; ask for a new one"
            )
        caller = self._callers.get(key.name)
        if caller is None or caller.key is None or caller.key.sha256 != key.sha256:
            names = {each.name for each in self._ring.keys}
            self._callers = {name: each for name, each in self._callers.items() if name in names}
            caller = self._callers[key.name] = Caller(key, self._metrics)
        elif caller.key is not key:
            caller.change(key)
        return caller

    def _refused(self, reason: str, message: str) -> Unauthenticated:
        self._metrics.unauthenticated.labels(reason=reason).inc()
        return Unauthenticated(message)


def _secret(authorization: str | None) -> str | None:
    """None when there is none, or another scheme."""
    scheme, _, secret = (authorization or "")[:MAX_HEADER_CHARS].partition(" ")
    secret = secret.strip()
    return secret if secret and scheme.lower() == "bearer" else None
