"""Folders and locks where every account may write: what another account made before us is not taken."""

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from deploy import actors
from outrider.cli.doctor import machine
from outrider.wire.errors import ConfigError
from outrider.wire.processes import folders

OTHER = os.getuid() + 1


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files, beside one for the user's session and one for the cache."""
    for name in ("tmp", "run"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "tmp"


def taken_by_mode(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def taken_by_link(place: Path) -> None:
    (place.parent / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(place.parent / "elsewhere")


def taken_by_file(place: Path) -> None:
    place.touch()


@pytest.mark.parametrize(
    ("take", "why"),
    [
        (taken_by_mode, "which others may enter"),
        (taken_by_link, "is a link or a file in a folder's place"),
        (taken_by_file, "is a link or a file in a folder's place"),
    ],
)
def test_a_place_that_another_account_prepared_is_not_taken(
    temporary: Path, caplog: pytest.LogCaptureFixture, take: object, why: str
) -> None:
    name = f"outrider-{os.getuid()}"
    assert callable(take)
    take(temporary / name)
    cores = actors.lock_cores(1, offered=frozenset({0, 1}))
    assert cores == {0} and (temporary.parent / "run" / name / "core-0.0").exists()
    assert why in caplog.text and name in caplog.text
    assert list(temporary.glob("**/core-*")) == []


def test_a_folder_or_a_lock_of_another_account_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders.make_private(tmp_path / "mine")
    assert folders.make_private(folder) == folder and folder.stat().st_mode & 0o777 == 0o700
    (folder / "lock").touch()
    monkeypatch.setattr(os, "getuid", lambda: OTHER)
    with pytest.raises(ConfigError, match=rf"mine' belongs to another account \(uid {OTHER - 1}\)"):
        folders.make_private(folder)
    with pytest.raises(ConfigError, match="lock' is another account's"):
        folders.try_lock(folder / "lock")


def test_a_lock_is_the_users_alone_and_no_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "any-new-file")
    with pytest.raises(ConfigError, match="link' cannot be opened"):
        folders.try_lock(tmp_path / "link")
    assert not (tmp_path / "any-new-file").exists()
    held = folders.try_lock(tmp_path / "lock")
    assert held is not None and (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
    assert folders.try_lock(tmp_path / "lock") is None
    os.close(held)


def test_a_file_system_without_locks_is_named_and_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"core-0\.0' cannot be locked: No locks available; set TMPDIR"):
        actors.lock_cores(1, tmp_path, frozenset({0, 1}))


def test_without_any_place_for_locks_a_worker_starts_and_is_pinned_to_no_cores(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: OTHER)  # what is made from now on is another's
    monkeypatch.setattr(actors, "is_limited", lambda: False)
    assert actors._cores_here(1) is None
    assert "pinned to no cores: there is no folder for locks of this user" in caplog.text
    for parent in ("tmp", "run", "cache"):
        assert f"{temporary.parent / parent}" in caplog.text


def test_sockets_get_a_folder_that_is_short_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "a-batch-systems-job"
    session = tmp_path / "s"
    for folder in (job, session):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(job))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert folders.parent_for_sockets("/short") == job
    assert folders.parent_for_sockets(folders.RAY_SOCKET) == Path("/tmp")
    assert machine.temporary_files().found == f"{job}; Ray's in /tmp, where the paths of its sockets fit"
    monkeypatch.setattr(os, "access", lambda folder, _: Path(folder) == session)
    assert folders.parent_for_sockets("/" + "y" * (106 - len(str(session)))) == session
    with pytest.raises(ConfigError, match=rf"'{job}', {len(str(job))} bytes, and sockets allow 21 there; no other of"):
        folders.parent_for_sockets(folders.RAY_SOCKET)
    assert (machine.temporary_files().state, machine.temporary_files().remedy) == (
        "warning",
        "TMPDIR=/tmp, or say --no-ray",
    )
