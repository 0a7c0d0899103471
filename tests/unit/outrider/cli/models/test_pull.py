"""`outrider pull`: folders, revisions and what it says of them, against a mirror on this machine."""

import os
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from outrider.cli.main import app
from tests.hub_mirror import COMMIT, Mirror
from tests.unit.outrider.cli.models.pulled import INDEX, MODEL, NEEDED, SHARDS, held, pulled, refused


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


def test_another_revision_is_started_by_its_folder(mirror: Mirror) -> None:
    made = pulled("--revision", COMMIT)
    assert f"outrider up --target {made.stdout.strip()} " in made.stderr


def test_offline_names_the_missing_files(mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(pulled(), f"{MODEL} at main is not in {tmp_path / 'hub'}", "HF_HOME")
    own = tmp_path / "own"
    own.mkdir()
    (own / "model.safetensors.index.json").write_bytes(INDEX)
    refused(pulled("--to", str(own)), "config.json, " + ", ".join(SHARDS), "are not in")


def test_a_folder_is_not_pulled() -> None:
    made = CliRunner().invoke(app, ["pull", "models/demo"])
    refused(made, "models/demo is a folder here")
    for other in ("https://hub.example/a/b", "a/b/c", "README.md"):
        refused(CliRunner().invoke(app, ["pull", other]), other, "OWNER/NAME")


def test_what_can_be_no_folder_is_named(mirror: Mirror) -> None:
    refused(pulled("--to", "README.md"), "--to is README.md, which is a file")
    refused(pulled("--to", "/proc/x"), "--to is /proc/x, and cannot be made there")
