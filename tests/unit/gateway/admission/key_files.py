"""Files of API keys, and what they let in, on a clock of the test's own."""

from pathlib import Path

from prometheus_client import CollectorRegistry

from gateway.admission.key_limits import Access
from gateway.admission.key_ring import KeyRing
from outrider.wire.settings.api_keys import ApiKey, digest_of, write_keys
from tests.unit.clock import Clock


def entry(name: str, secret: str, **fields: object) -> ApiKey:
    return ApiKey(name=name, sha256=digest_of(secret), **fields)


def access_of(file: Path, *keys: ApiKey, clock: Clock | None = None) -> Access:
    write_keys(file, keys)
    return Access(KeyRing(str(file), clock or Clock()), CollectorRegistry())
