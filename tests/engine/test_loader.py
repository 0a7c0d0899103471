"""What cannot be served is refused at load, in one line that names it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from outrider.engine import memory
from outrider.engine.attention.dense import DenseLayer
from outrider.engine.files.tokenizer_files import tokenizer_files
from outrider.engine.loading.loader import load_runner
from outrider.engine.loading.self_test import NUM_BLOCKS
from outrider.engine.memory import Budget, Spare
from outrider.engine.model_runner import ModelRunner
from outrider.wire.errors import ConfigError
from outrider.wire.models.fingerprint import first_difference, tokenizer_fingerprint
from outrider.wire.settings.config import TargetConfig
from tests.forked import CONTEXT
from tests.native import skip_without_library
from tests.tiny_models import tiny_llama


def load(model: str, **changes: Any) -> ModelRunner:
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "auto",
        "kv_cache_tokens": None,
        "max_slots": 2,
        "context_limit": None,
        "attention_path": "dense",
    }
    return load_runner(TargetConfig(model=model, **{**options, **changes}))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("original"), vocab_size=300)


@pytest.fixture
def folder(original: str, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def test_facts_and_cache_size(original: str) -> None:
    runner = load(original)
    facts = runner.facts
    assert (facts.model_id, facts.vocab_size, facts.context_limit) == (original, 300, 256)
    assert (facts.dtype, facts.device, facts.eos_token_ids, runner.path.name) == ("float32", "cpu", (0,), "dense")
    assert facts.num_parameters == sum(t.numel() for t in load_file(Path(original) / "model.safetensors").values())
    assert (runner.pool.num_blocks, runner.pool.block_size, runner.pool.num_in_use) == (2 * 16, 16, 0)


def test_the_cache_takes_its_fraction_of_the_free_memory(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = 16 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, head width, float32
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _: 1000 * block_bytes)
    assert load(original, kv_cache_fraction=0.01).pool.num_blocks == 10
    assert load(original, kv_cache_fraction=0.02).pool.num_blocks == 20
    assert load(original).pool.num_blocks == 2 * 16  # both slots' contexts, and no more
    assert load(original, max_slots=64).pool.num_blocks == 100  # a tenth
    monkeypatch.setattr("outrider.engine.loading.cache_size.ANSWER_TOKENS", 64)
    assert load(original, max_slots=3).pool.num_blocks == 16  # one context at least
    assert load(original, max_slots=8).pool.num_blocks == 8 * 4
    with pytest.raises(ConfigError, match=rf"a block takes {block_bytes} bytes, .*kv_cache_fraction 0\.0001"):
        load(original, kv_cache_fraction=0.0001)


def test_a_cache_never_takes_what_a_step_needs() -> None:
    budget = Budget(weights_bytes=0, activations_bytes=300, free_bytes=1000)
    assert budget.num_blocks(block_bytes=100, num_wanted=50, fraction=1.0) == 7
    assert budget.num_blocks(block_bytes=100, num_wanted=50, fraction=0.5) == 5
    assert budget.num_blocks(block_bytes=100, num_wanted=3, fraction=0.5) == 3
    with pytest.raises(ConfigError, match="about 300 bytes for a step"):
        budget.num_blocks(block_bytes=701, num_wanted=50, fraction=1.0)
    assert replace(budget, graphs_bytes=200).num_blocks(block_bytes=100, num_wanted=50, fraction=0.9) == 5
    assert replace(budget, graphs_bytes=200, tap_bytes=7).spare(400) == Spare(100, 7)
    assert budget.spare(800) == Spare(), "a set size may leave nothing"


def test_the_masks_of_prompts_are_counted_with_a_step(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _: 1 << 30)
    config = load(original).path._model.config
    num_shared = config.num_attention_heads // config.num_key_value_heads
    num_bytes = memory.masks_bytes([(None, None)], 4 * num_shared, 100, 256)
    assert num_bytes == 100 * 256 * (4 * num_shared + 1)
    assert memory.masks_bytes([(None, None), (16, None)], 2, 100, 256) == 100 * 256 * 3 + 100 * 116 * 2
    settings: dict[str, Any] = {"attention_path": "paged", "max_prefill_tokens": 100}
    counted = load(original, **settings).spare.num_bytes
    monkeypatch.setattr(memory, "masks_bytes", lambda *_: 0)
    assert load(original, **settings).spare.num_bytes - counted == num_bytes


@pytest.mark.parametrize("path", ["fused", "paged", "dense"])
def test_a_cache_on_a_cpu_takes_memory_as_it_is_used(original: str, path: str) -> None:
    if path == "fused":
        skip_without_library()
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:  # this one may have memory to use again
        grown, asked = pool.submit(cache_growth, original, path).result(60)
    assert grown < 0.1 * asked and asked > 50e6


def cache_growth(folder: str, path: str) -> tuple[int, int]:
    """-> bytes by which this process has grown with a cache, and the cache's."""
    load(folder, attention_path=path)  # what a first load brings along is not the cache's
    before = resident_bytes()
    runner = load(folder, attention_path=path, kv_cache_tokens=1 << 18)
    return resident_bytes() - before, (1 << 18) * runner.kv_bytes_per_token


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_cache_larger_than_the_free_memory_is_refused(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = 16 * 2 * 2 * 2 * 8 * 4
    monkeypatch.setattr(memory, "free_memory_bytes", lambda _: 20 * block_bytes)
    assert load(original, kv_cache_tokens=320).pool.num_blocks == 20
    with pytest.raises(ConfigError, match=r"kv_cache_tokens is 321, .*; lower it to at most 320") as caught:
        load(original, kv_cache_tokens=321)
    assert caught.value.param == "kv_cache_tokens"


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_memory_that_is_gone_when_it_is_taken_is_an_error_at_start(
    original: str, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """As when another process on the GPU took it meanwhile; the self-test's small cache still fits."""
    new_storage = DenseLayer._new_storage

    def out_of_memory(self: DenseLayer, states: torch.Tensor) -> torch.Tensor:
        if self._shape[0] > NUM_BLOCKS + 1:
            raise kind("tried to allocate more than there is\nsecond line")
        return new_storage(self, states)

    monkeypatch.setattr(DenseLayer, "_new_storage", out_of_memory)
    message = r"no memory on cpu for a KV cache of 512 tokens, 131072 bytes: tried to .* is; set kv_cache_tokens lower$"
    with pytest.raises(ConfigError, match=message):
        load(original)


def test_weights_go_straight_to_a_gpu_and_one_that_is_too_small_is_refused_with_the_remedy(
    original: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def from_pretrained(model: str, **options: Any) -> None:
        asked.append(options)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB\nsecond line")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", from_pretrained)
    message = r"cuda:0 has too little memory for .* allocate 4.00 GiB; .* lower its gpu_memory_utilization or kv_cache"
    with pytest.raises(ConfigError, match=message):
        load(original, device="cuda")
    assert asked[0]["device_map"] == {"": torch.device("cuda", 0)}


def test_int8_on_a_gpu_is_refused_with_the_remedy(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"quantization is 'int8' and the device cuda:0: .* quantised for GPUs") as e:
        load(original, device="cuda", quantization="int8")
    assert e.value.param == "quantization"


def test_memory_that_runs_out_in_the_self_test_is_not_the_paths_fault(
    original: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(self: ModelRunner, rows: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "forward", out_of_memory)
    with pytest.raises(ConfigError, match="cpu has too little memory for"):
        load(original, attention_path="auto")


def test_every_end_of_sequence_id_is_known(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(str(folder)).facts.eos_token_ids == (7, 9, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "config.json").unlink(), r"has no config\.json"),
        (lambda path: (path / "tokenizer.json").unlink(), r"has no tokenizer\.json"),
        (lambda path: (path / "model.safetensors").unlink(), r"has no model\.safetensors"),
        (
            lambda path: (path / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model-2-of-2.safetensors"}}'
            ),
            r"has no model-2-of-2\.safetensors \(a part of the weights",
        ),
        (lambda path: (path / "model.safetensors.index.json").write_text("[]"), r"index\.json is no JSON"),
        (lambda path: (path / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda path: (path / "config.json").write_text('{"model_type": "unheard_of"}'), "unheard_of"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\0" * 50), r"cannot read .*model\.safetensors"),
        (lambda path: drop_a_tensor(path), r"lack 1 tensors of LlamaForCausalLM, first model\.norm\.weight"),
    ],
)
def test_a_damaged_folder_is_named_in_one_line(folder: Path, change: Callable[[Path], Any], message: str) -> None:
    change(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        load(str(folder))
    assert "\n" not in caught.value.message


def drop_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"'\./nowhere/at/all', and there is no such folder"):
        load("./nowhere/at/all")
    with pytest.raises(ConfigError, match="which is a file"):
        load(__file__)
    with pytest.raises(ConfigError, match="no such folder"):
        tokenizer_files("/nowhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "abacus"}, "device is 'abacus', must be cpu, cuda, cuda:N or auto"),
        ({"device": "cuda:77"}, r"device is 'cuda:77', this process sees \d+ CUDA devices"),
        ({"context_limit": 257}, "context_limit is 257, the model was made for 256"),
        ({"context_limit": 8}, "context_limit is 8, must be at least 16"),
        ({"kv_cache_tokens": 10**15}, f"kv_cache_tokens is {10**15}, which takes .* and cpu has .* free"),
    ],
)
def test_impossible_settings(original: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(original, **changes)


def test_the_self_test_refuses_wrong_logits(original: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV read one column off gives nonsense without any error."""
    right = DenseLayer.write_and_read
    monkeypatch.setattr(DenseLayer, "write_and_read", lambda *arguments: right(*arguments).roll(1, dims=2))
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM .*dense: computes other logits .* largest difference \d\.\d\de"
    ):
        load(original)


def test_tokenizer_files_and_their_fingerprint(original: str, folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    files = tokenizer_files(str(folder))
    assert files.chat_template == b"{{ messages }}" and b"eos_token" in files.tokenizer_config_json
    assert tokenizer_files(original).chat_template == b""
    assert tokenizer_fingerprint(files.tokenizer_json) == tokenizer_fingerprint(
        tokenizer_files(original).tokenizer_json
    )
    other = tokenizer_files(tiny_llama(tmp_path / "other", vocab_size=301))
    difference = first_difference(files.tokenizer_json, other.tokenizer_json)
    assert difference is not None and difference.startswith("id 300 is missing in the target and '")
