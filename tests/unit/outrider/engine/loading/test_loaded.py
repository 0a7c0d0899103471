"""The state of a worker with a model: what it reports, and which devices ranks may be given."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.loading.cache_size import PREFILL_TOKENS_CPU
from outrider.engine.loading.loaded import load
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import DraftConfig, TargetConfig
from tests.tiny_models import tiny_llama

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_tokens": 512, "max_slots": 2}


def test_a_target_reports_its_checkpoints_defaults_without_those_out_of_range(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_llama(tmp_path / "model", num_layers=1)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_p": 7.0}))
    with caplog.at_level("WARNING"):
        target = load(TargetConfig(model=folder, **SETTINGS), epoch=3)
    assert "generation_config.json" in caplog.text and "top_p is 7.0" in caplog.text and "left out" in caplog.text
    info = target.info()
    assert info.sampling_defaults.temperature == 0.5 and not info.sampling_defaults.HasField("top_p")
    assert info.num_kv_blocks * info.kv_block_size == 512 and info.num_kv_blocks_in_use == 0
    assert (info.model_id, info.vocab_size, info.num_layers, info.tensor_parallel) == (folder, 320, 1, 1)
    draft = load(DraftConfig(model=folder, **SETTINGS, max_prefill_tokens=7), epoch=3)
    assert draft.sampling_defaults == {}, "a request is sampled as its target states"
    assert (target.max_prefill_tokens, draft.max_prefill_tokens) == (PREFILL_TOKENS_CPU, 7)


def test_ranks_take_no_device_by_its_number() -> None:
    with pytest.raises(
        ConfigError, match=r"device is 'cuda:1' and tensor_parallel 2: .* CUDA_VISIBLE_DEVICES"
    ) as error:
        load(TargetConfig(model="m", device="cuda:1", tensor_parallel=2), epoch=1)
    assert error.value.param == "device"
