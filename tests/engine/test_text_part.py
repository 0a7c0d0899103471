"""A multimodal checkpoint is served by its text part: the wrapper's own logits, without reading a tower."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from outrider.engine.kv_pool import KVPool
from outrider.engine.loading.loader import check_class, load_runner, network_class
from outrider.engine.loading.text_part import served_class
from outrider.engine.loading.tokenizer_files import tokenizer_files
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.model_id import INDEX, SAFE
from outrider.wire.settings.config import TargetConfig
from tests.rounds import some_ids
from tests.shrunk import shrunk
from tests.tiny_models import write_tokenizer

TOWER = "vision.safetensors"
TOLERANCE = 1e-4
"""Of the largest logit, float32."""


def wrapper(model_type: str, **published: Any) -> PreTrainedModel:
    """Return a whole model of random weights, tower included."""
    torch.manual_seed(0)
    config = shrunk(model_type, **published)
    model = AutoModelForImageTextToText._model_mapping[type(config)](config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "vision" not in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


def save_apart(model: PreTrainedModel, folder: Path) -> str:
    """Save the model with what is no text in a file of its own."""
    model.save_pretrained(folder)
    write_tokenizer(folder, model.config.get_text_config().vocab_size)
    tensors = load_file(folder / SAFE[0])
    is_text = {name: "language_model" in name or name.startswith("lm_head") for name in tensors}
    save_file({name: tensor for name, tensor in tensors.items() if not is_text[name]}, folder / TOWER)
    save_file({name: tensor for name, tensor in tensors.items() if is_text[name]}, folder / SAFE[0])
    weight_map = {name: SAFE[0] if is_text[name] else TOWER for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return str(folder)


def logits(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    return runner.forward([Row.of(runner.pool.new_table(), ids, 0, len(ids))])


def resident_bytes(path: Path) -> int:
    """Return how much of a file lies in the machine's memory."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
        del start
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def evict(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_apart(wrapper("mistral3", vision_config={"intermediate_size": 8192}), tmp_path_factory.mktemp("wrapper"))


def test_a_wrapper_has_its_own_logits_and_nothing_of_its_tower_is_read(folder: str) -> None:
    tower = Path(folder) / TOWER
    evict(tower)
    with safe_open(tower, framework="pt") as file:
        assert file.keys()
    of_header = resident_bytes(tower)
    evict(tower)
    runner = load_runner(TargetConfig(model=folder, device="cpu", kv_cache_tokens=256))
    if of_header < tower.stat().st_size / 2:  # else this file system keeps all files in memory
        assert resident_bytes(tower) <= of_header
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = some_ids(40, runner.facts.vocab_size, 1)
    with torch.inference_mode():
        truth = whole(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(runner, ids), truth, atol=TOLERANCE * truth.abs().max().item(), rtol=0)
    text = sum(parameter.numel() for name, parameter in whole.named_parameters() if "vision" not in name)
    assert runner.facts.is_text_part and runner.facts.num_parameters < text < 2 * runner.facts.num_parameters
