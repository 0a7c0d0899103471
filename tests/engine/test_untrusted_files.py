"""Model folders whose files would run code when they are loaded: none of it runs."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.loading.loader import load_runner
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from tests.tiny_models import tiny_llama


class Trap:
    """Leaves a file where it was unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tiny_llama(tmp_path / "model", vocab_size=300))


def load(folder: Path) -> Any:
    return load_runner(
        TargetConfig(
            model=str(folder),
            device="cpu",
            dtype="float32",
            kv_cache_tokens=256,
            max_slots=2,
            context_limit=None,
            attention_path="dense",
        )
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_by_name(folder: Path, tmp_path: Path, name: str) -> None:
    sprung = tmp_path / "sprung"
    torch.save({"weight": Trap(sprung)}, folder / name)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model.safetensors \(the weights; other formats are not loaded\)"):
        load(folder)
    assert not sprung.exists()


def test_pickles_beside_the_weights_are_never_opened(folder: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Trap(sprung)))
    assert load(folder).facts.num_parameters > 0
    assert not sprung.exists()


def test_code_beside_the_weights_is_never_run(folder: Path, tmp_path: Path) -> None:
    """A configuration that names classes of its own, as transformers runs them with trust_remote_code."""
    sprung = tmp_path / "sprung"
    code = f"from pathlib import Path\nPath({str(sprung)!r}).touch()\nclass Own: pass\n"
    for name in ("own.py", "modeling_own.py", "tokenization_own.py"):
        (folder / name).write_text(code)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    classes = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "modeling_own.Own", "AutoTokenizer": ["own.Own", None]}
    path.write_text(json.dumps({**config, "auto_map": classes}))
    assert load(folder).facts.num_parameters > 0, "the architecture is known: it is loaded as what transformers has"
    path.write_text(json.dumps({**config, "auto_map": classes, "model_type": "own"}))
    with pytest.raises(ConfigError):
        load(folder)
    assert not sprung.exists()
    shutil.rmtree(folder)
