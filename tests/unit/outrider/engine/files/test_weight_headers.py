"""Weights from anybody: safetensors alone, and what is wrong with them is one line that names it."""

import json
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from outrider.engine.attention.fused_weights import MIN_TABLE_BYTES
from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.loading.loader import check_weights, load_runner, read_config
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from tests.unit.outrider.engine.files.folders import Change, load_dense, refusal, with_fields

INDEX = "model.safetensors.index.json"


class Trap:
    """Leaves a file where it was unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_by_name(folder: Path, tmp_path: Path, name: str) -> None:
    sprung = tmp_path / "sprung"
    torch.save({"weight": Trap(sprung)}, folder / name)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model.safetensors \(the weights; other formats are not loaded\)"):
        load_dense(folder)
    assert not sprung.exists()


def test_pickles_beside_the_weights_are_never_opened(folder: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Trap(sprung)))
    assert load_dense(folder).facts.num_parameters > 0
    assert not sprung.exists()


def index_of(*shards: object) -> Change:
    """Return what makes the folder's weights one file for each of `shards`, by an index alone."""

    def apply(folder: Path) -> None:
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "weights.bin")
        torch.save(tensors, folder / "weights.pt")
        safetensors.torch.save_file(tensors, folder / "a.safetensors", metadata={"format": "pt"})
        safetensors.torch.save_file(tensors, folder.parent / "x.safetensors", metadata={"format": "pt"})
        weight_map = {name: shards[number % len(shards)] for number, name in enumerate(sorted(tensors))}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return apply


@pytest.mark.parametrize(
    "shards",
    [
        ("weights.bin",),
        ("weights.pt",),
        ("a.safetensors", "weights.bin"),
        ("weights.bin", "a.safetensors"),
        ("../x.safetensors",),
        ("{parent}/x.safetensors",),
        (5,),
        (None,),
        (["a.safetensors"],),
    ],
    ids=str,
)
def test_an_index_names_safetensors_files_beside_it_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shards: tuple[Any, ...]
) -> None:
    def load_pickle(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", load_pickle)
    index_of(*(each.format(parent=folder.parent) if isinstance(each, str) else each for each in shards))(folder)
    for read in (partial(load_dense, folder), partial(Checkpoint, str(folder))):
        assert f"{INDEX} says that" in refusal(read)


def test_an_index_of_safetensors_files_is_read(folder: Path) -> None:
    index_of("a.safetensors")(folder)
    assert check_weights(str(folder), read_config(str(folder))).config.num_hidden_layers == 2
    shutil.copyfile(folder / "a.safetensors", folder / "model.safetensors")
    assert f"has model.safetensors and an {INDEX} that does not name it" in refusal(partial(load_dense, folder))


def test_config_json_names_no_other_weights(folder: Path) -> None:
    """transformers would take an index of another name, and pickles by it."""
    with_fields("config.json", transformers_weights="other.safetensors.index.json")(folder)
    assert "transformers_weights" in refusal(partial(load_dense, folder))


def test_complex_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.norm.weight"] = torch.complex(tensors["model.norm.weight"], tensors["model.norm.weight"])
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    assert f"model.norm.weight in {path} is complex (C64)" in refusal(partial(load_dense, folder))


def test_a_huge_table_is_not_made_for_a_context_that_config_json_alone_names(folder: Path) -> None:
    """A head of 8 columns: 32 bytes of tables for a position."""
    with_fields("config.json", max_position_embeddings=MIN_TABLE_BYTES // 32 + 1)(folder)
    config = TargetConfig(model=str(folder), device="cpu", dtype="float32", kv_cache_tokens=256, max_slots=2)
    assert load_runner(config.model_copy(update={"context_limit": 64})).path.name == "fused"
    with pytest.raises(ConfigError, match=r"MiB of rotary tables for a context of .*; set context_limit"):
        load_runner(config.model_copy(update={"attention_path": "fused"}))
