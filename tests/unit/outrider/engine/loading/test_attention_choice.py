"""Which path serves a model."""

import pytest

from outrider.engine.attention.paged import PagedPath
from outrider.engine.errors import PathUnavailable
from outrider.engine.loading.attention_choice import choose_path
from outrider.engine.model_facts import ModelFacts
from outrider.wire.errors import ConfigError
from tests.shrunk import shrunk
from tests.tiny_models import random_model

VOCAB_SIZE = 97


def test_a_model_that_changes_its_keys_after_they_are_cached_is_refused() -> None:
    """As a latent model would whose configuration does not say so."""
    config = shrunk("deepseek_v3")
    model = random_model(config, seed=3)
    vars(config)["kv_lora_rank"] = None
    facts = ModelFacts("tiny", VOCAB_SIZE, 128, "float32", "cpu", (), 0)
    with pytest.raises(
        ConfigError, match=r"paged: does not run on this cache, .*: NotImplementedError: the keys are change"
    ):
        choose_path(model, facts, "paged", False)


def test_a_class_whose_attention_cannot_be_replaced_goes_to_the_next_path(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(shrunk("bloom"), seed=3)
    with pytest.raises(PathUnavailable, match="its attention cannot be replaced"):
        PagedPath(model, VOCAB_SIZE)
    facts = ModelFacts("tiny", VOCAB_SIZE, 128, "float32", "cpu", (), 0)
    with caplog.at_level("INFO"):
        assert choose_path(model, facts, "auto", False).path.name == "dense"
    line = next(message for message in caplog.messages if "takes the path" in message)
    assert line.startswith("BloomForCausalLM takes the path dense; not fused: ")
    assert "nor paged: its attention cannot be replaced" in line
