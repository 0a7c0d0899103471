"""What each layer keeps in blocks."""

import pytest
from transformers import CONFIG_MAPPING

from outrider.engine.attention.block_cache import layer_limits
from tests.zoo import SHAPE


@pytest.mark.parametrize(
    ("model_type", "changes", "limits"),
    [
        ("llama", {}, [(None, None), (None, None)]),
        ("mistral", {"sliding_window": 16}, [(16, None), (16, None)]),
        ("mistral", {"sliding_window": 16, "layer_types": ["full_attention"] * 2}, [(16, None), (16, None)]),
        ("llama", {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2}, [(None, None), (None, None)]),
        ("llama4_text", {"attention_chunk_size": 16, "no_rope_layers": [1, 0]}, [(None, 16), (None, None)]),
        (
            "qwen2",
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
            [(None, None), (16, None)],
        ),
    ],
)
def test_what_a_layer_sees_is_read_from_the_configuration(
    model_type: str, changes: dict[str, object], limits: list[tuple[int | None, int | None]]
) -> None:
    config = CONFIG_MAPPING[model_type](**{**SHAPE, **changes})
    assert [layer_limits(config, i) for i in range(2)] == limits
