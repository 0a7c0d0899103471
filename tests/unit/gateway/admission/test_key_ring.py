"""The file of API keys is read again when it changes, and one that cannot be used changes nothing."""

import logging
import resource
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from gateway.admission.key_limits import Access
from gateway.admission.key_ring import LOOK_S, RETRY_S, KeyRing
from outrider.wire.errors import RateLimited, Unauthenticated
from outrider.wire.settings.api_keys import write_keys
from tests.unit.clock import Clock
from tests.unit.gateway.admission.key_files import access_of, entry


def outdated(registry: CollectorRegistry) -> float | None:
    return registry.get_sample_value("outrider_api_keys_outdated")


def test_the_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "k", Clock()
    access = access_of(file, entry("me", "or-1", requests_per_minute=1), clock=clock)
    access.caller("Bearer or-1").count_request()

    def look() -> None:
        clock.now += LOOK_S

    write_keys(file, (entry("me", "or-1", requests_per_minute=1, max_concurrent=2), entry("you", "or-2")))
    look()
    assert access.caller("Bearer or-2").name == "you"
    with pytest.raises(RateLimited):
        access.caller("Bearer or-1").count_request()  # the bucket is the same one
    file.write_text("keys: [{name: me")
    look()
    with caplog.at_level(logging.ERROR):
        assert access.caller("Bearer or-2").name == "you"
    assert "the API keys stay as they were" in caplog.text
    file.unlink()
    look()
    assert access.caller("Bearer or-2").name == "you"
    write_keys(file, (entry("me", "or-3", requests_per_minute=1),))
    look()
    for gone in ("or-1", "or-2"):
        with pytest.raises(Unauthenticated):
            access.caller(f"Bearer {gone}")
    access.caller("Bearer or-3").count_request()  # another key, though of the same name


def test_a_file_that_others_may_read_or_change_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.yaml"
    write_keys(file, (entry("me", "x"),))
    KeyRing(str(file))
    assert "has mode" not in caplog.text
    file.chmod(0o604)
    KeyRing(str(file))
    assert f"{file} has mode 0604: other accounts may read or change it" in caplog.text


def test_an_unreadable_file_is_tried_again_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock, registry = tmp_path / "k", Clock(), CollectorRegistry()
    write_keys(file, (entry("me", "or-1"), entry("you", "or-2")))
    access = Access(KeyRing(str(file), clock), registry)
    write_keys(file, (entry("you", "or-2"),))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        for _ in range(3):
            clock.now += RETRY_S
            assert outdated(registry) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (told,) = (record.message for record in caplog.records if record.levelno == logging.ERROR)
    assert f"cannot read {file}: Too many open files" in told
    clock.now += RETRY_S
    assert outdated(registry) == 0
    with pytest.raises(Unauthenticated):
        access.caller("Bearer or-1")
