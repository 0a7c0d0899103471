"""A class that numbers its tokens by their ids, RoBERTa: every token of a text has a position, up to its last row."""

from pathlib import Path

import pytest

from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig
from tests.every_class import save_configuration
from tests.shrunk import shrunk
from tests.tiny_models import random_model, save


def load(folder: Path, context_limit: int | None = None) -> ModelRunner:
    return load_runner(TargetConfig(model=str(folder), device="cpu", kv_cache_tokens=512, context_limit=context_limit))


def test_padding_in_a_text_is_a_token_and_the_context_ends_with_the_table(tmp_path: Path) -> None:
    config = shrunk("roberta")
    num_places = config.max_position_embeddings - config.pad_token_id - 1
    save(random_model(config, seed=0), tmp_path)
    runner = load(tmp_path)
    assert runner.facts.context_limit == num_places
    with pytest.raises(ConfigError, match=f"the model was made for {num_places}: its 128 positions begin behind"):
        load(tmp_path, num_places + 1)
    padding = config.pad_token_id
    ids = [5, padding, 6, 7, padding, padding, 8] * (num_places // 7)
    whole, cut = runner.pool.new_table(), runner.pool.new_table()
    logits = runner.forward([Row.of(whole, ids, 0, 3)])
    runner.forward([Row.of(cut, ids[:9], 0, 0)])
    assert (runner.forward([Row.of(cut, ids, 9, 3)]) - logits).abs().max() < 1e-4 * logits.abs().max()


def test_a_class_that_reads_in_both_directions_is_refused_for_that(tmp_path: Path) -> None:
    config = shrunk("roberta")
    config.is_decoder = False
    save(random_model(config, seed=0), tmp_path)
    with pytest.raises(ConfigError, match=r"both directions \(is_decoder is false in config.json\); use another model"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("openai-gpt", r"keeps no cache of transformers' \(past_key_values\): each token would compute the whole text"),
        ("gemma4_assistant", r"drafts for another model, whose keys and values it reads \(shared_kv_states\)"),
        ("pi0", "writes nothing without state"),
        ("shieldgemma2", r"classifies images \(ShieldGemma2ForImageClassification\)"),
        ("blt", r"has no one decoder whose layers config.json counts \(num_hidden_layers\)"),
    ],
)
def test_what_writes_nothing_by_itself_is_refused_from_its_configuration(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    save_configuration(shrunk(model_type), f"{model_type}-class", str(tmp_path))
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path)
