"""What cannot be served is refused at load, in one line that names it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from outrider.engine.files.tokenizer_files import tokenizer_files
from outrider.wire.errors import ConfigError
from tests.unit.outrider.engine.loading.tiny_models import load


@pytest.fixture
def folder(original: str, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "config.json").unlink(), r"has no config\.json"),
        (lambda path: (path / "tokenizer.json").unlink(), r"has no tokenizer\.json"),
        (lambda path: (path / "model.safetensors").unlink(), r"has no model\.safetensors"),
        (lambda path: (path / "config.json").write_text('{"model_type": "unheard_of"}'), "unheard_of"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\0" * 50), r"cannot read .*model\.safetensors"),
    ],
)
def test_a_damaged_folder_is_named_in_one_line(folder: Path, change: Callable[[Path], Any], message: str) -> None:
    change(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        load(str(folder))
    assert "\n" not in caught.value.message


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
        ({"context_limit": 8}, "context_limit is 8, must be at least 16"),
        ({"kv_cache_tokens": 10**15}, f"kv_cache_tokens is {10**15}, which takes .* and cpu has .* free"),
    ],
)
def test_impossible_settings(original: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(original, **changes)


def test_a_chat_template_of_its_own_file(original: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_files(str(folder)).chat_template == b"{{ messages }}"
    assert tokenizer_files(original).chat_template == b""


def test_facts_and_cache_size(original: str) -> None:
    runner = load(original)
    facts = runner.facts
    assert (facts.model_id, facts.vocab_size, facts.context_limit) == (original, 300, 256)
    assert (facts.dtype, facts.device, facts.eos_token_ids, runner.path.name) == ("float32", "cpu", (0,), "dense")
    assert facts.num_parameters == sum(t.numel() for t in load_file(Path(original) / "model.safetensors").values())
    assert (runner.pool.num_blocks, runner.pool.block_size, runner.pool.num_in_use) == (2 * 16, 16, 0)
