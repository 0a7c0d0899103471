"""Token buckets and counts of API keys, on a clock of the test's own, and who gets in with a key."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from gateway.admission.key_limits import Access, AccessMetrics, Caller
from gateway.admission.key_ring import KeyRing
from outrider.wire.errors import InvalidRequest, RateLimited, Unauthenticated
from outrider.wire.settings.api_keys import ApiKey, digest_of, new_key, write_keys
from tests.unit.clock import Clock
from tests.unit.gateway.admission.key_files import access_of, entry

NOW = datetime.now(UTC)


def limits(clock: Clock, **fields: object) -> Caller:
    key = ApiKey(name="me", sha256="0" * 64, **fields)
    return Caller(key, AccessMetrics(CollectorRegistry()), clock)


def test_a_minutes_requests_at_once_then_evenly() -> None:
    clock = Clock()
    key = limits(clock, requests_per_minute=30)
    for _ in range(30):
        key.count_request()
    with pytest.raises(RateLimited, match=r"requests_per_minute of 30.* in 2 s") as refused:
        key.count_request()
    assert refused.value.retry_after_s == 2.0
    clock.now += 2.0
    key.count_request()
    with pytest.raises(RateLimited):
        key.count_request()
    clock.now += 3600
    for _ in range(30):
        key.count_request()
    with pytest.raises(RateLimited):
        key.count_request()


def test_tokens_are_charged_before_and_settled_after() -> None:
    clock = Clock()
    key = limits(clock, tokens_per_minute=600)
    key.charge(500)
    with pytest.raises(RateLimited, match="tokens_per_minute") as refused:
        key.charge(200)
    assert refused.value.retry_after_s == 10.0
    key.settle(500, 30, 20)
    key.charge(200)
    key.settle(200, 150, 50)
    key.charge(350)


def test_more_than_a_minute_allows_waits_for_a_full_bucket() -> None:
    clock = Clock()
    key = limits(clock, tokens_per_minute=600)
    key.charge(5000)
    key.settle(5000, 1000, 200)
    with pytest.raises(RateLimited) as refused:
        key.charge(1)
    assert refused.value.retry_after_s == pytest.approx(60.1)
    with pytest.raises(RateLimited) as refused:
        key.charge(5000)
    assert refused.value.retry_after_s == 120.0
    clock.now += 120.0
    key.charge(5000)


def test_answers_at_once() -> None:
    key = limits(Clock(), max_concurrent=4)
    with pytest.raises(InvalidRequest, match="asks for 5 answers") as never:
        key.count_choices(5, "n").__enter__()
    assert never.value.param == "n"
    with key.count_choices(3, "n"):
        with pytest.raises(RateLimited, match="3 answers running") as refused, key.count_choices(2, "n"):
            pass
        assert refused.value.retry_after_s
        with key.count_choices(1, "n"):
            assert key.num_choices == 4
    assert key.num_choices == 0
    with pytest.raises(ZeroDivisionError), key.count_choices(4, "n"):
        raise ZeroDivisionError
    assert key.num_choices == 0


@settings(max_examples=200)
@given(st.integers(1, 10**6), st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 100)), max_size=20))
def test_a_request_after_the_retry_time_passes(per_minute: int, steps: list[tuple[int, float]]) -> None:
    """Whatever came before, and in the precision that the wait is sent in."""
    clock = Clock()
    key = limits(clock, tokens_per_minute=per_minute)
    for amount, later in steps:
        clock.now += later
        try:
            key.charge(amount)
        except RateLimited as error:
            clock.now += float(f"{error.retry_after_s:g}")
            key.charge(amount)


def test_only_listed_keys_are_accepted(tmp_path: Path) -> None:
    secret = new_key()
    gone = entry("old", "or-old", expires=NOW - timedelta(seconds=1))
    access = access_of(tmp_path / "k", entry("me", secret, expires=NOW + timedelta(days=1)), gone)
    assert access.caller(f"Bearer {secret}").name == "me"
    assert access.caller(f"bearer  {secret} ").name == "me"
    for header, told in (
        (None, "is needed"),
        ("", "is needed"),
        ("Bearer", "is needed"),
        ("Bearer ", "is needed"),
        (f"Basic {secret}", "is needed"),
        (secret, "is needed"),
        (f"Bearer {secret[:-1]}", "not known"),
        (f"Bearer {secret}x", "not known"),
        (f"Bearer {digest_of(secret)}", "not known"),
        (f"Bearer {'ö' * 5000}", "not known"),
        ("Bearer or-old", "'old' expired"),
    ):
        with pytest.raises(Unauthenticated, match=told) as refused:
            access.caller(header)
        assert secret not in refused.value.message


def test_what_a_key_used_is_counted_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "k"
    write_keys(file, (entry("me", "or-1", requests_per_minute=2, tokens_per_minute=100),))
    registry = CollectorRegistry()
    access = Access(KeyRing(str(file), Clock()), registry)
    caller = access.caller("Bearer or-1")
    caller.count_request()
    caller.charge(10 + 90)
    caller.settle(10 + 90, 10, 7)
    caller.count_request()
    with pytest.raises(RateLimited):
        caller.count_request()
    with pytest.raises(RateLimited):
        caller.charge(100)
    with pytest.raises(Unauthenticated):
        access.caller("Bearer or-2")

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("outrider_key_requests_total", key="me") == 3
    assert value("outrider_key_limited_total", key="me", limit="requests_per_minute") == 1
    assert value("outrider_key_limited_total", key="me", limit="tokens_per_minute") == 1
    assert value("outrider_key_tokens_total", key="me", kind="prompt") == 10
    assert value("outrider_key_tokens_total", key="me", kind="completion") == 7
    assert value("outrider_unauthenticated_total", reason="unknown") == 1
