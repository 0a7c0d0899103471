"""Finds the caller of a request by its `authorization` header, and enforces the limits of each API key.

Token buckets limit requests and tokens per minute; a count limits concurrent choices. `Admission` has one `Access`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.admission.key_ring import KeyRing
from outrider.wire.errors import InvalidRequest, RateLimited, Unauthenticated
from outrider.wire.settings.api_keys import ApiKey
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

HOW = "send it as `Authorization: Bearer KEY`, or over HTTP as `x-api-key: KEY`"
"""Sentence of error messages that explains how to send an API key."""
MAX_HEADER_CHARS = 1024
"""Number of characters of an `authorization` header that are read; the rest is ignored. `outrider keys` makes secrets
of 46 characters."""
MINUTE_S = 60.0
ROUNDING = 1e-3
"""Number of tokens or requests by which a bucket may fall short and still suffice. It absorbs the rounding errors of
floating-point sums."""
BUSY_RETRY_S = 1.0
"""Seconds after which a caller may retry if its API key has reached its limit of concurrent choices. When a running
choice will end cannot be predicted."""
Clock = Callable[[], float]


class AccessMetrics:
    """Prometheus series of requests, refusals and tokens by API key, and of requests without a valid key."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter("outrider_key_requests", "Requests, by API key.", ["key"], registry=registry)
        """Requests, by API key: `sum by (key) (rate(outrider_key_requests_total[5m]))`"""
        self.limited = Counter(
            "outrider_key_limited",
            "Requests refused for a limit of their API key.",
            ["key", "limit"],
            registry=registry,
        )
        """Refused requests, by API key and limit: `sum by (key, limit) (rate(outrider_key_limited_total[5m]))`"""
        self.tokens = Counter("outrider_key_tokens", "Tokens, by API key.", ["key", "kind"], registry=registry)
        """Tokens, by API key and kind (prompt or completion): `sum by (key, kind)
        (rate(outrider_key_tokens_total[5m]))`"""
        self.unauthenticated = Counter(
            "outrider_unauthenticated", "Requests without an API key that is valid.", ["reason"], registry=registry
        )
        """Requests without a valid API key, by reason (missing, unknown or expired): `sum by (reason)
        (rate(outrider_unauthenticated_total[5m]))`"""
        self.keys_outdated = Gauge(
            "outrider_api_keys_outdated",
            "1 while the file of API keys cannot be used, and those that it had are in force.",
            registry=registry,
        )
        """`outrider_api_keys_outdated == 1`: the file of API keys cannot be read. Keys that were revoked since the last
        successful read are still accepted."""


class Bucket:
    """A token bucket for a limit per minute. It holds the amount allowed in one minute and fills at a constant rate.

    The level may be negative, because `subtract` checks nothing. `wait_s` says when an amount is available again.

        # 60 per minute, full: subtract(90) leaves -30, and wait_s(1) is 31 s
    """

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_s = clock()

    def wait_s(self, amount: float) -> float:
        """Return the seconds until the bucket holds `amount` requests or tokens; 0.0 if it does now.

        For an `amount` above the limit per minute, return the seconds until the bucket holds that limit.
        """
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._filled_s) * self.per_minute / MINUTE_S)
        self._filled_s = now
        missing = min(amount, self.per_minute) - self._level
        if missing <= ROUNDING:
            return 0.0
        return missing * MINUTE_S / self.per_minute

    def subtract(self, amount: float) -> None:
        """Subtract `amount` requests or tokens from the bucket's level. A negative amount is added."""
        self._level -= amount


class Caller:
    """The user for whom requests count: one API key with its limits, or everybody if the gateway has no API keys.

    Without API keys nothing is limited. A RateLimited that a method raises holds the seconds after which to retry.
    """

    def __init__(self, key: ApiKey | None, metrics: AccessMetrics, clock: Clock = time.monotonic) -> None:
        self.key = key
        self.num_choices = 0
        """Number of the key's choices that run or wait."""
        self._metrics = metrics
        self._clock = clock
        self._requests = self._tokens = None
        if key is not None:
            self._requests = _bucket(key.requests_per_minute, clock)
            self._tokens = _bucket(key.tokens_per_minute, clock)

    @property
    def name(self) -> str | None:
        """Name of the API key; None if the gateway has no API keys."""
        if self.key is None:
            return None
        return self.key.name

    @property
    def weight(self) -> float:
        """Weight of the API key in the queue; 1 without a key.

        While choices wait, a key with weight 2 gets twice as many places as a key with weight 1.
        """
        if self.key is None:
            return 1.0
        return self.key.weight

    def change(self, key: ApiKey) -> None:
        """Apply changed limits of the same API key.

        For a limit per minute that has not changed, the tokens or requests used so far still count.
        """
        previous = self.key
        self.key = key
        if previous is None or key.requests_per_minute != previous.requests_per_minute:
            self._requests = _bucket(key.requests_per_minute, self._clock)
        if previous is None or key.tokens_per_minute != previous.tokens_per_minute:
            self._tokens = _bucket(key.tokens_per_minute, self._clock)

    def count_request(self) -> None:
        """Count a request before its body is read. Raises RateLimited if the key's requests per minute are used up."""
        if self.key is not None:
            self._metrics.requests.labels(key=self.key.name).inc()
            self._charge("requests_per_minute", self._requests, 1)

    @contextmanager
    def count_choices(self, count: int, param: str) -> Iterator[None]:
        """Context manager: count `count` choices against the key's limit of concurrent choices until the block ends.

        Raises RateLimited if too many run now, or InvalidRequest that names the field `param` if `count` alone exceeds
        the limit.
        """
        if self.key is not None and self.key.max_concurrent is not None:
            self._check_concurrent(count, self.key.max_concurrent, param)
        self.num_choices += count
        try:
            yield
        finally:
            self.num_choices -= count

    def _check_concurrent(self, count: int, max_concurrent: int, param: str) -> None:
        if count > max_concurrent:
            raise InvalidRequest(
                f"the request asks for {count} answers at once, the API key {self.name!r} may have {max_concurrent} "
                "(max_concurrent); split it",
                param=param,
            )
        if self.num_choices + count > max_concurrent:
            raise self._limited(
                "max_concurrent",
                f"the API key {self.name!r} has {self.num_choices} answers running or waiting, may have "
                f"{max_concurrent} (max_concurrent), and asks for {count} more; try again when one has ended",
                BUSY_RETRY_S,
            )

    def charge(self, num_tokens: int) -> None:
        """Count the tokens of a request against the key's limit of tokens per minute, before the request begins.

        num_tokens: the most tokens that the request may use; `settle` corrects the count. Raises RateLimited if
        fewer are left now; if the whole limit is left, any number may be charged.
        """
        self._charge("tokens_per_minute", self._tokens, num_tokens)

    def settle(self, num_charged: int, num_prompt: int, num_output: int) -> None:
        """Correct the count of tokens after a request has ended.

        num_charged: tokens counted by `charge`. num_prompt, num_output: numbers of prompt and output tokens that the
        request really used.
        """
        if self._tokens is not None:
            self._tokens.subtract(num_prompt + num_output - num_charged)
        if self.key is not None:
            self._metrics.tokens.labels(key=self.key.name, kind="prompt").inc(num_prompt)
            self._metrics.tokens.labels(key=self.key.name, kind="completion").inc(num_output)

    def _charge(self, limit: str, bucket: Bucket | None, amount: int) -> None:
        if bucket is None:
            return
        wait_s = bucket.wait_s(amount)
        if wait_s > 0.0:
            wait_s = _rounded_up(wait_s)
            why = f"the API key {self.name!r} is over its {limit} of {bucket.per_minute}; try again in {wait_s:g} s"
            raise self._limited(limit, why, wait_s)
        bucket.subtract(amount)

    def _limited(self, limit: str, message: str, retry_after_s: float) -> RateLimited:
        self._metrics.limited.labels(key=self.name, limit=limit).inc()
        return RateLimited(message, param=limit, retry_after_s=retry_after_s)


def _rounded_up(wait_s: float) -> float:
    """Rounds up to the digits that trailers carry: a caller that waits for the stated time must pass.

    # 31.23456 to 31.235, in units of 10 ** (1 - 4)
    """
    unit = 10.0 ** max(-3, math.floor(math.log10(wait_s)) - 4)
    return math.ceil(wait_s / unit) * unit


def _bucket(per_minute: int | None, clock: Clock) -> Bucket | None:
    if per_minute is None:
        return None
    return Bucket(per_minute, clock)


class Access:
    """All callers of a gateway: finds the caller of a request by its API key."""

    def __init__(self, ring: KeyRing | None, registry: CollectorRegistry) -> None:
        """Create the callers of the keys in `ring`. None means that the gateway has no API keys."""
        self._ring = ring
        self._metrics = AccessMetrics(registry)
        if ring is not None:
            self._metrics.keys_outdated.set_function(ring.is_outdated)
        self._callers: dict[str, Caller] = {}
        self._anonymous = Caller(None, self._metrics)

    @property
    def needs_keys(self) -> bool:
        """Whether requests need an API key."""
        return self._ring is not None

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller whose API key is in this `authorization` header.

        Raises Unauthenticated for a missing, unknown or expired key.
        """
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
            self._forget_removed(self._ring.keys)
            caller = self._callers[key.name] = Caller(key, self._metrics)
        elif caller.key is not key:
            caller.change(key)
        return caller

    def _forget_removed(self, keys: Iterable[ApiKey]) -> None:
        names = {key.name for key in keys}
        for name in self._callers.keys() - names:
            del self._callers[name]

    def _refused(self, reason: str, message: str) -> Unauthenticated:
        self._metrics.unauthenticated.labels(reason=reason).inc()
        return Unauthenticated(message)


def _secret(authorization: str | None) -> str | None:
    scheme, _, secret = (authorization or "")[:MAX_HEADER_CHARS].partition(" ")
    if scheme.lower() != "bearer":
        return None
    return secret.strip() or None
