"""The table of docs/reports/architectures.md is of every class of the pinned transformers, and true for one of each.

`make architectures` measures all of them; here one of each kind goes the same way, from its files through the loader.
"""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, PreTrainedConfig

from outrider.engine.loading.loader import load_runner
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from tests.architectures_table import DOCUMENT, names_in, tables
from tests.every_class import measure, measure_all, row_names
from tests.tiny_models import write_tokenizer

PINNED = next(
    line.partition("==")[2]
    for line in (Path(__file__).parents[5] / "constraints.txt").read_text().splitlines()
    if line.startswith("transformers==")
)
pinned_alone = pytest.mark.skipif(transformers.__version__ != PINNED, reason=f"the table is of transformers {PINNED}")
TOLERANCE = 1e-5
"""Largest logit difference as a share of the largest logit, float32."""


ONE_OF_EACH_KIND = ["llama", "t5", "bloom", "m2m_100", "deepseek_v3", "deepseek_v32", "gemma3", "llama4_text"]


@pinned_alone
@pytest.mark.parametrize("name", [*ONE_OF_EACH_KIND, "gemma4_text (shared KV)"])
def test_one_class_of_each_kind_equals_a_forward_without_cache(name: str) -> None:
    """Through files and the loader, on every path that accepts it."""
    row = measure(name)
    assert row.is_served and row.error < TOLERANCE, row


def test_the_table_is_of_every_class_of_the_pinned_transformers() -> None:
    text = DOCUMENT.read_text()
    assert f"transformers {PINNED}" in text, "stale: make architectures"
    if transformers.__version__ == PINNED:
        assert names_in(text) == row_names(), "stale: make architectures"


@pytest.mark.slow
@pinned_alone
def test_the_table_is_what_this_code_does() -> None:
    assert tables(list(measure_all(row_names()))) in DOCUMENT.read_text(), "stale: make architectures"


REFUSED = {
    "mamba": r"a running state that is not served yet \(linear_attention layers\)",
    "qwen3_next": r"a running state that is not served yet \(linear_attention layers\)",
    "falcon_h1": r"a running state that is not served yet \(hybrid layers\)",
    "rwkv": "a running state that is not served yet;",
    "deepseek_v4": r"compressed keys and .* not served yet \(heavily_compressed_attention layers\)",
}
"""What one of each kind keeps, of those that are refused by their configuration alone."""


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_state_that_is_not_served_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    config: PreTrainedConfig = CONFIG_MAPPING[model_type]()
    config.architectures = [f"{model_type}-causal"]
    config.save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")  # it is refused before its weights are read
    write_tokenizer(tmp_path, 64)
    options = {"device": "cpu", "dtype": "auto", "kv_cache_tokens": 64, "max_slots": 1, "context_limit": None}
    with pytest.raises(ConfigError, match=f"{model_type}-causal keeps {REFUSED[model_type]}.*use a model of attention"):
        load_runner(TargetConfig(model=str(tmp_path), **options))
