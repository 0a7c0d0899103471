"""The file of API keys, the command that writes it, and who gets in with it."""

from __future__ import annotations

import logging
import os
import resource
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from gateway.admission.key_ring import LOOK_S, RETRY_S, KeyRing
from gateway.admission.keys import Access
from outrider.cli.main import app
from outrider.wire.errors import ConfigError, RateLimited, Unauthenticated
from outrider.wire.settings.api_keys import ApiKey, digest_of, new_key, read_keys, write_keys

NOW = datetime.now(UTC)


def cli(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["keys", *args])
    return result.exit_code, result.stdout, result.stderr


def entry(name: str, secret: str, **fields: object) -> ApiKey:
    return ApiKey(name=name, sha256=digest_of(secret), **fields)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# --- the command -------------------------------------------------------------------------------------------------


def test_a_new_key_is_printed_once_and_kept_as_a_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    code, secret, notes = cli("new", "me", "--file", str(file), "--requests-per-minute", "5", "--expires-days", "1")
    secret = secret.strip()
    assert code == 0 and "not shown again" in notes and secret not in notes
    assert secret.startswith("or-") and len(secret) == 3 + 43
    assert secret not in file.read_text()
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    (key,) = read_keys(file)
    assert (key.name, key.sha256, key.requests_per_minute) == ("me", digest_of(secret), 5)
    assert key.expires and timedelta(hours=23) < key.expires - NOW < timedelta(hours=25)
    assert cli("new", "me", "--file", str(file))[0] == 1, "a name stands for one key"
    other = cli("new", "you", "--file", str(file))[1].strip()
    assert other != secret and len(read_keys(file)) == 2


def test_list_and_revoke(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.yaml")
    for name in ("me", "you"):
        cli("new", name, "--file", file, "--max-concurrent", "3")
    code, shown, _ = cli("list", "--file", file)
    assert code == 0 and "me" in shown and "you" in shown and "3" in shown
    assert not any(key.sha256 in shown for key in read_keys(file))
    assert cli("revoke", "me", "--file", file)[0] == 0
    assert [key.name for key in read_keys(file)] == ["you"]
    code, _, told = cli("revoke", "me", "--file", file)
    assert code == 1 and "'me'" in told and "you" in told


# --- the file ----------------------------------------------------------------------------------------------------

HASH = "ab" * 32


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("keys: [}", "neither YAML nor JSON, line 1"),
        ("\x80\x81", "neither YAML nor JSON"),
        ("", "the file"),
        ("[]", "the file"),
        ("key: []", "key"),
        ("keys: [{name: me}]", "keys.0.sha256"),
        (f"keys: [{{name: me, sha256: {HASH}, limit: 1}}]", "keys.0.limit"),
        (f"keys: [{{name: me, sha256: {HASH}, max_concurrent: 0}}]", "keys.0.max_concurrent"),
        (f"keys: [{{name: me, sha256: {HASH}, weight: 0}}]", "keys.0.weight"),
        (f"keys: [{{name: me, sha256: {HASH}, expires: never}}]", "keys.0.expires"),
        (f"keys: [{{name: me, sha256: {HASH}, expires: 2027-02-30}}]", "neither YAML nor JSON"),
        ("keys: [{name: me, sha256: or-secret}]", "keys.0.sha256"),
        (f"keys: [{{name: me, sha256: {HASH}}}, {{name: me, sha256: {HASH[::-1]}}}]", "two keys of the name"),
        (f"keys: [{{name: me, sha256: {HASH}}}, {{name: you, sha256: {HASH}}}]", "two keys of the sha256"),
    ],
)
def test_a_file_that_cannot_be_used_says_where(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as refused:
        read_keys(file)
    assert told in refused.value.message and str(file) in refused.value.message
    assert "or-secret" not in refused.value.message


def test_a_link_stays_one_and_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    file, link = tmp_path / "keys.yaml", tmp_path / "link.yaml"
    link.symlink_to(file)
    write_keys(link, (entry("me", "x"),))
    assert link.is_symlink() and len(read_keys(file)) == 1
    with pytest.raises(ConfigError, match="cannot write"):
        write_keys(tmp_path / "none" / "keys.yaml", ())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.yaml", "link.yaml"]


def test_a_file_that_is_replaced_keeps_its_owner_and_mode(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    write_keys(file, (entry("me", "or-1"), entry("you", "or-2")))
    if os.geteuid() == 0:
        os.chown(file, 10001, 10002)
    file.chmod(0o640)
    before = os.stat(file)
    assert cli("revoke", "me", "--file", str(file))[0] == 0
    after = os.stat(file)
    assert after.st_ino != before.st_ino
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)


def test_a_mode_is_not_kept_for_another_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.yaml"
    write_keys(file, (entry("me", "or-1"),))
    file.chmod(0o640)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("outrider.wire.settings.files.os.chown", refuse)
    write_keys(file, ())
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600


# --- who gets in -------------------------------------------------------------------------------------------------


def outdated(registry: CollectorRegistry) -> float | None:
    return registry.get_sample_value("outrider_api_keys_outdated")


def access_of(file: Path, *keys: ApiKey, clock: Clock | None = None) -> Access:
    write_keys(file, keys)
    return Access(KeyRing(str(file), clock or Clock()), CollectorRegistry())


def test_only_known_keys_get_in(tmp_path: Path) -> None:
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


def test_the_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "k", Clock()
    access = access_of(file, entry("me", "or-1", requests_per_minute=1), clock=clock)
    access.caller("Bearer or-1").take_request()

    def look() -> None:
        clock.now += LOOK_S

    write_keys(file, (entry("me", "or-1", requests_per_minute=1, max_concurrent=2), entry("you", "or-2")))
    look()
    assert access.caller("Bearer or-2").name == "you"
    with pytest.raises(RateLimited):
        access.caller("Bearer or-1").take_request()  # the bucket is the same one
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
    access.caller("Bearer or-3").take_request()  # another key, though of the same name


def test_a_file_that_others_may_read_or_change_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.yaml"
    write_keys(file, (entry("me", "x"),))
    KeyRing(str(file))
    assert "has mode" not in caplog.text
    file.chmod(0o604)
    KeyRing(str(file))
    assert f"{file} has mode 0604: other accounts may read or change it" in caplog.text


def test_a_file_that_could_not_be_read_is_tried_again_and_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_what_a_key_used_is_counted_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "k"
    write_keys(file, (entry("me", "or-1", requests_per_minute=2, tokens_per_minute=100),))
    registry = CollectorRegistry()
    access = Access(KeyRing(str(file), Clock()), registry)
    caller = access.caller("Bearer or-1")
    caller.take_request()
    caller.charge(10 + 90)
    caller.settle(10 + 90, 10, 7)
    caller.take_request()
    with pytest.raises(RateLimited):
        caller.take_request()
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


def test_a_request_that_fails_before_it_begins_costs_nothing(tmp_path: Path) -> None:
    caller = access_of(tmp_path / "k", entry("me", "or-1", tokens_per_minute=100)).caller("Bearer or-1")
    for _ in range(5):
        caller.charge(100)
        caller.settle(100, 0, 0)
