"""A draft as it is loaded: ready to run, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.drafters.loading import HeadState, load_draft
from outrider.engine.attention.forward_path import NORMED
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import DraftConfig
from tests.unit.outrider.engine.heads.folders import MODEL, files
from tests.unit.outrider.engine.heads.joined_layouts import CASES, as_qwen
from tests.unit.outrider.engine.heads.layouts import hidden_states
from tests.unit.outrider.engine.heads.test_eagle3 import PROMPT, difference


def settings(folder: str, **more: Any) -> DraftConfig:
    return DraftConfig(model=folder, device="cpu", max_slots=2, kv_cache_tokens=512, **more)


def test_a_head_of_a_target_that_cannot_be_rolled_back_is_refused(tmp_path: Path) -> None:
    _, folder, target = as_qwen(tmp_path)
    with pytest.raises(ConfigError, match=r"running state that is not served yet \(linear_attention layers\)"):
        load_draft(settings(folder, target_model=target), 1, lambda error: None)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 8e-2)])
@pytest.mark.parametrize("name", ["EAGLE-1", "MTP of DeepSeek", "MTP of GLM, two layers"])
def test_a_loaded_head_is_ready_to_run(name: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    """A target that drafts for itself is its MTP head."""
    head, folder, target = CASES[name](tmp_path)
    state = load_draft(settings(folder, target_model=target, dtype=dtype), 1, lambda error: None)
    assert isinstance(state, HeadState) and state.runner is not None
    loaded, runner = state.head, state.runner
    numbers = 24 + 8 if "DeepSeek" in name else 2 * 2 * 16
    assert loaded.path.name == "paged" and runner.supports_trees
    assert runner.kv_bytes_per_token == numbers * (4 if dtype == "float32" else 2)
    assert state.head.projection.spec.taps == (NORMED,) and state.head.projection.fc is None
    rows = head.rows(hidden_states(len(PROMPT))).to(torch.bfloat16)
    row = Row(runner.pool.new_table(), PROMPT, 0, 3, PROMPT, features=rows)
    logits = runner.forward([row])
    if dtype == "bfloat16":
        head.tensors = {n: t.to(torch.bfloat16) if "correction" not in n else t for n, t in head.tensors.items()}
    assert difference(logits, head.forward(rows.double(), PROMPT)[0][-3:]) < tolerance


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "num_hidden_layers": 1}
EAGLE3 = ("fc.weight", "lm_head.weight", "midlayer.hidden_norm.weight")


@pytest.mark.parametrize(("config", "names"), [({**LLAMA, "pard_token": 90}, MODEL), (LLAMA, EAGLE3)])
def test_what_reads_more_than_ids_is_not_drafted_for(
    config: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    files(tmp_path, config, names)
    with pytest.raises(ConfigError, match=r"drafted_by is 'lookup', and .* leave drafted_by out"):
        load_draft(DraftConfig(model=str(tmp_path), drafted_by="lookup"), 1, lambda error: None)
