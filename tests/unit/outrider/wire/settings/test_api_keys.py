"""The file of API keys, and the command that writes it."""

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.wire.errors import ConfigError
from outrider.wire.settings.api_keys import digest_of, read_keys, write_keys
from tests.unit.gateway.admission.key_files import entry

NOW = datetime.now(UTC)


def cli(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["keys", *args])
    return result.exit_code, result.stdout, result.stderr


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
def test_an_invalid_file_is_refused_with_the_place(tmp_path: Path, text: str, told: str) -> None:
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
