"""Every architecture on every path that accepts it: ragged rounds with rollbacks equal a forward without any cache.

So do the hidden states, by the loader's own test.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, PreTrainedConfig

from outrider.engine.loading.loader import load_runner
from outrider.engine.paths.choice import FACTORIES
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from tests.architectures_table import BEGIN, DOCUMENT, END, Measured, measure, table
from tests.native import skip_without_library
from tests.tiny_models import write_tokenizer
from tests.zoo import ARCHITECTURES

TOLERANCE = 1e-4
"""Largest logit difference, float32."""

measured = cache(measure)
IS_OLD = Version(transformers.__version__) < Version("5.21")
"""Older ones have a fault in UMT5: where a sequence has no cache, a token sees no later part of the source."""


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - ({"umt5"} if IS_OLD else set())))
def test_every_path_that_accepts_it_equals_a_forward_without_cache(name: str) -> None:
    result: Measured = measured(name)
    assert "dense" in result.errors and result.chosen == next(path for path in FACTORIES if path in result.errors)
    assert all(error < TOLERANCE for error in result.errors.values()), result
    assert not result.untapped


@pytest.mark.skipif(IS_OLD, reason="the table is of the newest versions")
def test_the_table_in_the_documentation_is_what_this_code_does() -> None:
    skip_without_library()  # the table is written where there is one
    text = DOCUMENT.read_text()
    written = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()
    expected = table([measured(name) for name in sorted(ARCHITECTURES)])
    assert written == expected, "stale: python -m tests.architectures_table"


REFUSED = {
    **dict.fromkeys(
        (
            *("mamba", "mamba2", "falcon_mamba", "zamba2", "recurrent_gemma", "jamba", "bamba", "granitemoehybrid"),
            *("nemotron_h", "qwen3_next", "kimi_linear", "minimax", "qwen3_5_text", "qwen4_exp_text", "olmo_hybrid"),
        ),
        r"a running state that is not served yet \(linear_attention layers\)",
    ),
    **dict.fromkeys(("falcon_h1", "zaya"), r"a running state that is not served yet \(hybrid layers\)"),
    **dict.fromkeys(("rwkv", "xlstm"), "a running state that is not served yet;"),
    "deepseek_v4": r"compressed keys and .* not served yet \(heavily_compressed_attention layers\)",
}
"""What each keeps, of those that are refused by their configuration alone."""


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
