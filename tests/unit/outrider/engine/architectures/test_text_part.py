"""A multimodal checkpoint is served by its text part: the wrapper's own logits, without reading a tower."""

import ctypes
import json
import mmap
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, MistralForCausalLM, PreTrainedModel

from outrider.engine.architectures.text_part import whole_class
from outrider.engine.files.tokenizer_files import tokenizer_files
from outrider.engine.loading.loader import check_class, load_runner
from outrider.engine.model_check import CheckTask, read_model
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import INDEX_FILE, SAFETENSORS_FILES
from outrider.wire.settings.config import TargetConfig
from tests.shrunk import shrunk
from tests.tiny_models import write_tokenizer

TEXT, TOWER = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TOWER_WIDTH = 12 << 10
"""Of a tower's MLPs: two layers have 38 MB, which no reading ahead of a header brings."""
TOLERANCE = 1e-4
"""Of the largest logit, float32."""


def wrapper(model_type: str, tower_width: int | None = None) -> PreTrainedModel:
    """Return a whole model of random weights, tower included."""
    torch.manual_seed(0)
    config = shrunk(model_type)
    if tower_width is not None:
        config.vision_config.intermediate_size = tower_width
    model: PreTrainedModel = whole_class(config)(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "vision" not in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


def save_apart(model: PreTrainedModel, folder: Path) -> str:
    """Save the model with what is no text in a file of its own."""
    model.save_pretrained(folder)
    write_tokenizer(folder, model.config.get_text_config().vocab_size)
    tensors = load_file(folder / SAFETENSORS_FILES[0])
    is_text = {name: "language_model" in name or name.startswith("lm_head") for name in tensors}
    save_file({name: tensor for name, tensor in tensors.items() if not is_text[name]}, folder / TOWER)
    save_file({name: tensor for name, tensor in tensors.items() if is_text[name]}, folder / TEXT)
    (folder / SAFETENSORS_FILES[0]).unlink()
    weight_map = {name: TEXT if is_text[name] else TOWER for name in tensors}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return str(folder)


def logits(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    return runner.forward([Row.of(runner.pool.new_table(), ids, 0, len(ids))])


def check_logits(runner: ModelRunner, whole: PreTrainedModel) -> None:
    """Compare on every id: some are special ones of images."""
    ids = random.Random(0).sample(range(runner.facts.vocab_size), runner.facts.vocab_size)
    with torch.inference_mode():
        truth = whole(input_ids=torch.tensor([ids])).logits[0]
    atol = TOLERANCE * truth.abs().max().item()
    torch.testing.assert_close(logits(runner, ids), truth, atol=atol, rtol=0)


def resident_bytes(path: Path) -> int:
    """Return how much of a file's second half lies in the machine's memory: the system reads ahead of a header."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
        del start
    return sum(page & 1 for page in pages[len(pages) // 2 :]) * mmap.PAGESIZE


def evict(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_apart(wrapper("mistral3", TOWER_WIDTH), tmp_path_factory.mktemp("wrapper"))


def test_a_wrapper_has_its_own_logits_and_nothing_of_its_tower_is_read(folder: str) -> None:
    tower = Path(folder) / TOWER
    evict(tower)
    can_evict = not resident_bytes(tower)
    runner = load_runner(TargetConfig(model=folder, device="cpu", kv_cache_tokens=256))
    if can_evict:  # else this file system keeps all files in memory
        assert resident_bytes(tower) == 0
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    assert resident_bytes(tower) > tower.stat().st_size / 4
    check_logits(runner, whole)
    text = sum(parameter.numel() for name, parameter in whole.named_parameters() if "vision" not in name)
    assert runner.facts.is_text_part and runner.facts.num_parameters < text < 2 * runner.facts.num_parameters
    assert "text only" in str(read_model(folder, CheckTask(folder, [], "cpu", "auto")))
    assert runner.path.name != "paged" or runner.path._model.__class__ is MistralForCausalLM  # type: ignore[attr-defined]


def test_a_class_of_text_that_does_not_run_by_itself_leaves_the_wrapper(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AttributeError("'MistralConfig' object has no attribute 'vision'")

    monkeypatch.setattr(MistralForCausalLM, "forward", fail)
    runner = load_runner(TargetConfig(model=folder, device="cpu", kv_cache_tokens=256))
    check_logits(runner, AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_vl", "kimi_k25", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llava_next", "qwen2_5_omni"))],
)
def test_a_wrapper_is_run_by_its_own_forward_where_no_class_of_text_computes_the_same(
    model_type: str, tmp_path: Path
) -> None:
    """Three sections of positions; special ids with another's embedding; a parameter of the wrapper's own; a wrapper
    around a wrapper.
    """
    whole = wrapper(model_type)
    whole.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, whole.config.get_text_config().vocab_size)
    check_logits(
        load_runner(TargetConfig(model=str(tmp_path), device="cpu", kv_cache_tokens=256)),
        getattr(whole, "thinker", whole),
    )


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("florence2", "is an encoder-decoder model that reads images with its encoder, so it has no text part"),
        ("blip-2", "writes nothing without pixel_values, so it has no text part to serve; use a model of text"),
        ("paligemma", "reads its prompt in both directions .* and is no causal language model, so it has no text part"),
        ("qwen3_5", "keeps a running state that is not served yet"),
        ("siglip", "is no causal language model of transformers"),
    ],
)
def test_a_wrapper_without_a_text_part_is_refused_from_its_configuration(model_type: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_class(CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_the_template_of_a_processor_is_the_tokenizers(name: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 97)
    (tmp_path / name).write_text(json.dumps({"chat_template": "{{ messages }}"}))
    found = json.loads(tokenizer_files(str(tmp_path)).tokenizer_config_json)
    assert found["chat_template"] == "{{ messages }}" and "eos_token" in found
