"""What is fetched of a model, and what is said where it cannot be, against a mirror on this machine."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.models import hub
from tests.hub_mirror import COMMIT, Mirror
from tests.unit.outrider.cli.models.pulled import INDEX, MODEL, NEEDED, SHARDS, SMALL, held, pulled, refused


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


def test_a_tokenizer_of_another_form_comes_where_there_is_no_tokenizer_json(mirror: Mirror) -> None:
    mirror.files["tokenizer.model"] = mirror.files["merges.txt"] = b"pieces"
    assert "tokenizer.model" not in held(Path(pulled().stdout.strip()))
    del mirror.files["tokenizer.json"]
    assert {"tokenizer.model", "merges.txt"} <= held(Path(pulled().stdout.strip())).keys()


def test_what_came_damaged_is_thrown_away(mirror: Mirror, tmp_path: Path) -> None:
    name = next(iter(SHARDS))
    mirror.damaged.add(name)
    refused(pulled(), name, "checksum")
    mirror.damaged.clear()
    assert held(Path(pulled().stdout.strip())) == NEEDED


def test_a_disk_that_is_too_small_is_refused_before_the_download(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_refusal_has_a_remedy(mirror: Mirror, status: int, code: str, words: tuple[str, ...]) -> None:
    mirror.refusal = (status, code)
    refused(pulled(), *words)


def test_no_network(mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    refused(pulled(), "http://127.0.0.1:1 is out of reach", "HF_ENDPOINT", "--offline")


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
