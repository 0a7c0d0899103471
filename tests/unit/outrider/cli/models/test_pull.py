"""`outrider pull`: what it fetches and what it says where it cannot, against a mirror on this machine."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from huggingface_hub import constants
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.models import hub
from tests.hub_mirror import COMMIT, Mirror, mirroring

MODEL = "team/model"
SMALL = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "chat_template.jinja": b"{{ messages }}"}
SHARDS = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 200_000 for i in (1, 2)}
INDEX = json.dumps({"weight_map": {f"layer.{i}": name for i, name in enumerate(SHARDS)}}).encode()
NEEDED = {**SMALL, **SHARDS, "model.safetensors.index.json": INDEX}
OTHER_FORMS = dict.fromkeys(
    ("pytorch_model.bin", "consolidated.safetensors", "model.gguf", "onnx/model.onnx", "README.md"), b"the same again"
)


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Mirror]:
    with mirroring(MODEL, {**NEEDED, **OTHER_FORMS}) as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield made


def pulled(*args: str) -> Result:
    return CliRunner().invoke(app, ["pull", MODEL, *args])


def refused(made: Result, *words: str) -> None:
    assert made.exit_code == 1 and not made.stdout
    error = made.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in error, made.stderr


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_cache_gets_what_is_served_and_nothing_twice(mirror: Mirror, tmp_path: Path) -> None:
    made = pulled()
    folder = Path(made.stdout.strip())
    assert made.exit_code == 0 and folder == tmp_path / "hub/models--team--model/snapshots" / COMMIT
    assert held(folder) == NEEDED
    assert f"outrider up --target {MODEL} " in made.stderr
    before = mirror.num_bytes.copy()
    assert before == {name: len(content) for name, content in NEEDED.items()}
    assert pulled().exit_code == 0 and mirror.num_bytes == before
    mirror.refusal = (500, "")
    assert pulled("--offline").stdout.strip() == str(folder)


def test_of_a_gguf_file_nothing_else_is_fetched(mirror: Mirror, tmp_path: Path) -> None:
    for args, folder in (((), tmp_path / "hub/models--team--model/snapshots" / COMMIT), (("--to", "own"), Path("own"))):
        mirror.num_bytes.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            made = CliRunner().invoke(app, ["pull", f"{MODEL}:model.gguf", *args])
        assert Path(made.stdout.strip()) == folder / "model.gguf" and set(mirror.num_bytes) <= {"model.gguf"}
    made = CliRunner().invoke(app, ["pull", f"{MODEL}:model.gguf", "--offline"])
    assert made.stdout.strip().endswith(f"{COMMIT}/model.gguf")
    refused(CliRunner().invoke(app, ["pull", f"{MODEL}:other.gguf"]), "has no other.gguf", f"{MODEL}:model.gguf")


def test_a_folder_of_ones_own_of_another_revision(mirror: Mirror, tmp_path: Path) -> None:
    own = tmp_path / "own"
    assert pulled("--to", str(own), "--revision", "v1").exit_code == 0
    assert held(own) == NEEDED and not list((tmp_path / "hub").rglob("*.safetensors"))
    (own / "config.json").write_bytes(b"[]")  # of the same length
    os.utime(own / "config.json", (later := time.time() + 60, later))
    mirror.num_bytes.clear()
    made = pulled("--to", str(own), "--revision", "v1")
    assert f"outrider up --target {own} " in made.stderr
    assert held(own) == NEEDED and set(mirror.num_bytes) == {"config.json"}


def test_a_tokenizer_of_another_form_comes_where_there_is_no_tokenizer_json(mirror: Mirror) -> None:
    mirror.files["tokenizer.model"] = mirror.files["merges.txt"] = b"pieces"
    assert "tokenizer.model" not in held(Path(pulled().stdout.strip()))
    del mirror.files["tokenizer.json"]
    assert {"tokenizer.model", "merges.txt"} <= held(Path(pulled().stdout.strip())).keys()


def test_another_revision_is_started_by_its_folder(mirror: Mirror) -> None:
    made = pulled("--revision", COMMIT)
    assert f"outrider up --target {made.stdout.strip()} " in made.stderr


def test_what_came_damaged_is_thrown_away(mirror: Mirror, tmp_path: Path) -> None:
    name = next(iter(SHARDS))
    mirror.damaged.add(name)
    refused(pulled(), name, "checksum")
    mirror.damaged.clear()
    assert held(Path(pulled().stdout.strip())) == NEEDED


def test_a_disk_that_is_too_small_is_told_before(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage._replace(free=300_000))
    refused(pulled(), "needs 0.4 MB", "0.3 MB free", "HF_HOME")
    assert not set(SHARDS) & set(mirror.num_bytes)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "RepoNotFound", (f"no {MODEL}", "HF_TOKEN")),
        (401, "", ("401", MODEL, "HF_TOKEN")),
        (403, "GatedRepo", (MODEL, "let in", "HF_TOKEN")),
        (403, "", ("403", "HF_TOKEN")),
        (404, "RevisionNotFound", ("no revision main", "--revision")),
        (503, "", ("503", "try again later")),
    ],
)
def test_a_refusal_says_what_to_do(mirror: Mirror, status: int, code: str, words: tuple[str, ...]) -> None:
    mirror.refusal = (status, code)
    refused(pulled(), *words)


def test_no_network(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    refused(pulled(), "http://127.0.0.1:1 is out of reach", "HF_ENDPOINT", "--offline")


def test_offline_says_what_is_missing(mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(pulled(), f"{MODEL} at main is not in {tmp_path / 'hub'}", "HF_HOME")
    own = tmp_path / "own"
    own.mkdir()
    (own / "model.safetensors.index.json").write_bytes(INDEX)
    refused(pulled("--to", str(own)), "config.json, " + ", ".join(SHARDS), "are not in")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({**SMALL, "pytorch_model.bin": b"0"}, ("no model.safetensors", "it has", "pytorch_model.bin")),
        ({f"{i}.bin": b"0" for i in range(12)}, ("it has 0.bin, 1.bin, 10.bin,", "7.bin and 2 more")),
        ({"model.safetensors": b"0"}, ("no config.json",)),
        ({**SMALL, "model.safetensors.index.json": INDEX}, (f"no {next(iter(SHARDS))}",)),
        ({**SMALL, "model.safetensors.index.json": b"[]"}, ("no JSON object",)),
    ],
)
def test_what_cannot_be_served_is_not_fetched(mirror: Mirror, files: dict[str, bytes], words: tuple[str, ...]) -> None:
    mirror.files = files
    refused(pulled(), MODEL, *words)
    assert not any(name.endswith(("model.safetensors", ".bin")) for name in mirror.num_bytes)


def test_a_folder_is_not_pulled() -> None:
    made = CliRunner().invoke(app, ["pull", "models/demo"])
    refused(made, "models/demo is a folder here")
    for other in ("https://hub.example/a/b", "a/b/c", "README.md"):
        refused(CliRunner().invoke(app, ["pull", other]), other, "OWNER/NAME")


def test_what_can_be_no_folder_is_named(mirror: Mirror) -> None:
    refused(pulled("--to", "README.md"), "--to is README.md, which is a file")
    refused(pulled("--to", "/proc/x"), "--to is /proc/x, and cannot be made there")
