"""Files of a head from anybody: what they hold, and pickles that are not opened."""

import json
import shutil
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from outrider.engine.heads import kinds
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.eagle3 import read_eagle3
from outrider.engine.heads.kinds import kind_of
from outrider.wire.errors import ConfigError
from tests.stack import DEMO_TARGET
from tests.unit.outrider.engine.files.folders import refusal, with_fields
from tests.unit.outrider.engine.heads.folders import files

DEMO_HEAD = Path(DEMO_TARGET).parent / "eagle3"


def test_a_head_is_no_deeper_than_its_tensors(tmp_path: Path) -> None:
    """Its network is built as often as its config.json says, on a draft's machine."""
    shutil.copytree(DEMO_HEAD, tmp_path / "head")
    with_fields("config.json", num_hidden_layers=60_000)(tmp_path / "head")
    message = refusal(lambda: read_eagle3(Checkpoint(str(tmp_path / "head")), TargetFiles(DEMO_TARGET)))
    assert "num_hidden_layers is 60000, and there are" in message
    with_fields("config.json", num_hidden_layers=10**6)(tmp_path / "head")
    assert "num_hidden_layers" in refusal(partial(Checkpoint, str(tmp_path / "head")))


def pickled_head(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"medusa_num_heads": 1}')
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder


def test_an_expanded_tensor_of_a_pickle_is_refused(tmp_path: Path) -> None:
    head = pickled_head(tmp_path / "head", {"0.0.linear.weight": torch.zeros(1).expand(2**36)})
    files = Checkpoint(str(head), allow_pickle=True)
    assert "0.0.linear.weight in" in refusal(lambda: files.names)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage is deprecated")
def test_a_quantised_tensor_of_a_pickle_is_refused(tmp_path: Path) -> None:
    quantised = torch.quantize_per_tensor(torch.zeros(4, 4), 0.1, 0, torch.qint8)
    files = Checkpoint(str(pickled_head(tmp_path / "head", {"0.0.linear.weight": quantised})), allow_pickle=True)
    assert "0.0.linear.weight in it" in refusal(lambda: files.names)


def test_a_compressed_pickle_is_refused(tmp_path: Path) -> None:
    """64 KiB that unpack to 64 MiB."""
    head = pickled_head(tmp_path / "head", {"0.0.linear.weight": torch.zeros(2**20)})
    path = head / "medusa_lm_head.pt"
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    files = Checkpoint(str(head), allow_pickle=True)
    assert "is compressed" in refusal(lambda: files.names)


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "num_hidden_layers": 1}


def test_an_ordinary_pickled_model_is_not_opened(tmp_path: Path) -> None:
    """Its own loader says what it wants; a head's is asked for, since its config cannot tell the kind."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 4}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert kind_of(Checkpoint(str(tmp_path))) is kinds.MODEL
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match="a pickle"):
        kind_of(Checkpoint(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", r"config\.json is not JSON"),
        ("config.json", "[]", r"config\.json is no JSON object"),
        ("model.safetensors", "nothing", r"cannot read .*model\.safetensors"),
        ("model.safetensors.index.json", "{}", "is not an index of weights"),
        ("model.safetensors.index.json", '{"weight_map": {"fc.weight": "a.safetensors"}}', r"has no a\.safetensors"),
    ],
)
def test_damaged_files_are_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    files(tmp_path, LLAMA)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        kind_of(Checkpoint(str(tmp_path)))


def test_a_folder_without_weights_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match="has no weights"):
        kind_of(Checkpoint(str(tmp_path)))
