"""Who asks: an `authorization` header to a `Caller`, whose API key limits what it may do. For both front ends.

The API keys in force, from a file that is read again when it changes. Used by `gateway.admission.keys`.

What one API key may still do: requests and tokens a minute by token buckets, answers at once by a count. No I/O.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter, Gauge

from outrider.wire.errors import ConfigError, InvalidRequest, RateLimited, Unauthenticated
from outrider.wire.log import get_logger
from outrider.wire.settings.api_keys import ApiKey, digest_of, read_keys

MINUTE_S = 60.0
ROUNDING = 1e-3
"""Tokens or requests: what clocks and sums may be off."""
BUSY_RETRY_S = 1.0
"""When to come back to a key that has all its answers running: nobody knows when one ends."""

Clock = Callable[[], float]


class Bucket:
    """Holds what a minute allows, and fills evenly. It may go below empty: then the debt is waited for."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_s = clock()

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there, 0 for now. More than a minute allows waits for a full bucket."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._filled_s) * self.per_minute / MINUTE_S)
        self._filled_s = now
        missing = min(amount, self.per_minute) - self._level
        return missing * MINUTE_S / self.per_minute if missing > ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Negative gives back."""
        self._level -= amount


class KeyLimits:
    """The state of one key. Raises RateLimited with the seconds after which the same request passes."""

    def __init__(self, key: ApiKey, clock: Clock = time.monotonic) -> None:
        self.key = key
        self._clock = clock
        self._requests = _bucket(key.requests_per_minute, clock)
        self._tokens = _bucket(key.tokens_per_minute, clock)
        self.num_answers = 0
        """Running or waiting."""

    def change(self, key: ApiKey) -> None:
        """The same key with other limits. A rate that stays keeps its level."""
        if key.requests_per_minute != self.key.requests_per_minute:
            self._requests = _bucket(key.requests_per_minute, self._clock)
        if key.tokens_per_minute != self.key.tokens_per_minute:
            self._tokens = _bucket(key.tokens_per_minute, self._clock)
        self.key = key

    def take_request(self) -> None:
        if self._requests is None:
            return
        self._refuse("requests_per_minute", self._requests, self._requests.wait_s(1))
        self._requests.take(1)

    @contextmanager
    def answers(self, count: int, param: str) -> Iterator[None]:
        """Holds `count` of the answers at once. Raises InvalidRequest naming `param` when that can never be."""
        most = self.key.max_concurrent
        if most is not None and count > most:
            raise InvalidRequest(
                f"the request asks for {count} answers at once, the API key {self.key.name!r} may have {most} "
                "(max_concurrent); split it",
                param=param,
            )
        if most is not None and self.num_answers + count > most:
            raise RateLimited(
                f"the API key {self.key.name!r} has {self.num_answers} answers running or waiting, may have {most} "
                f"(max_concurrent), and asks for {count} more; try again when one has ended",
                param="max_concurrent",
                retry_after_s=BUSY_RETRY_S,
            )
        self.num_answers += count
        try:
            yield
        finally:
            self.num_answers -= count

    def charge(self, num_tokens: int) -> None:
        """What a request may cost, before it begins. `settle` corrects it."""
        if self._tokens is None:
            return
        self._refuse("tokens_per_minute", self._tokens, self._tokens.wait_s(num_tokens))
        self._tokens.take(num_tokens)

    def settle(self, num_charged: int, num_used: int) -> None:
        if self._tokens is not None:
            self._tokens.take(num_used - num_charged)

    def _refuse(self, limit: str, bucket: Bucket, wait_s: float) -> None:
        if wait_s > 0.0:
            wait_s = _rounded_up(wait_s)
            raise RateLimited(
                f"the API key {self.key.name!r} is over its {limit} of {bucket.per_minute}; try again in {wait_s:g} s",
                param=limit,
                retry_after_s=wait_s,
            )


def _rounded_up(wait_s: float) -> float:
    """To the digits that trailers carry, and never down: who waits as told passes."""
    unit = 10.0 ** max(-3, math.floor(math.log10(wait_s)) - 4)
    return math.ceil(wait_s / unit) * unit


def _bucket(per_minute: int | None, clock: Clock) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, clock)


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


MAX_HEADER_CHARS = 1024
HOW = "send it as `Authorization: Bearer KEY`"


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


@dataclass(slots=True)
class Charge:
    """Tokens of one request: what it may cost is taken before it begins, `num_used` is what it did cost."""

    num_charged: int = 0
    num_prompt: int = 0
    num_used: int = 0
    """Prompt and output."""


class Caller:
    """Whoever sent a request; `name` is None where no keys are asked for, and then nothing is limited."""

    def __init__(self, name: str | None, limits: KeyLimits | None, metrics: AccessMetrics) -> None:
        self.name = name
        self._limits = limits
        self._metrics = metrics

    def take_request(self) -> None:
        """Raises RateLimited. To be called before the body is read."""
        if self._limits is None:
            return
        self._metrics.requests.labels(key=self.name).inc()
        with self._counted():
            self._limits.take_request()

    @contextmanager
    def answers(self, count: int, param: str) -> Iterator[None]:
        """Raises RateLimited, or InvalidRequest naming `param`."""
        if self._limits is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            with self._counted():
                stack.enter_context(self._limits.answers(count, param))
            yield

    @contextmanager
    def charged(self, num_prompt: int, num_output: int) -> Iterator[Charge]:
        """Takes what the request may cost, and in the end what it did. Raises RateLimited.

        num_prompt, num_output: tokens; of the output, the most that there can be.
        """
        charge = Charge(num_prompt + num_output, num_prompt)
        if self._limits is None:
            yield charge
            return
        with self._counted():
            self._limits.charge(charge.num_charged)
        try:
            yield charge
        finally:
            self._limits.settle(charge.num_charged, charge.num_used)
            prompt = min(charge.num_prompt, charge.num_used)
            self._metrics.tokens.labels(key=self.name, kind="prompt").inc(prompt)
            self._metrics.tokens.labels(key=self.name, kind="completion").inc(charge.num_used - prompt)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except RateLimited as error:
            self._metrics.limited.labels(key=self.name, limit=error.param).inc()
            raise


class Access:
    """One per gateway. `ring` is None where no API key is asked for."""

    def __init__(self, ring: KeyRing | None, registry: CollectorRegistry) -> None:
        self._ring = ring
        self._metrics = AccessMetrics(registry)
        if ring is not None:
            self._metrics.keys_outdated.set_function(ring.is_outdated)
        self._limits: dict[str, KeyLimits] = {}
        self._anonymous = Caller(None, None, self._metrics)

    @property
    def asks_for_keys(self) -> bool:
        return self._ring is not None

    def caller(self, authorization: str | None) -> Caller:
        """Of a request with this `authorization`. Raises Unauthenticated, and never says how near a key was."""
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
        limits = self._limits.get(key.name)
        if limits is None or limits.key.sha256 != key.sha256:
            limits = self._limits[key.name] = KeyLimits(key)
            self._forget_revoked()
        elif limits.key is not key:
            limits.change(key)
        return Caller(key.name, limits, self._metrics)

    def _refused(self, reason: str, message: str) -> Unauthenticated:
        self._metrics.unauthenticated.labels(reason=reason).inc()
        return Unauthenticated(message)

    def _forget_revoked(self) -> None:
        assert self._ring is not None
        names = {key.name for key in self._ring.keys}
        self._limits = {name: limits for name, limits in self._limits.items() if name in names}


def _secret(authorization: str | None) -> str | None:
    """None when there is none, or another scheme."""
    scheme, _, secret = (authorization or "")[:MAX_HEADER_CHARS].partition(" ")
    secret = secret.strip()
    return secret if secret and scheme.lower() == "bearer" else None
