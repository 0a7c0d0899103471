"""Who asks: an `authorization` header to a `Caller`, whose API key limits what it may do. For both front ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.key_limits import KeyLimits
from gateway.key_ring import KeyRing
from outrider.wire.errors import RateLimited, Unauthenticated

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
