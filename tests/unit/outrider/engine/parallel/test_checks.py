"""Which models can be split."""

import pytest
from transformers import BloomConfig, LlamaConfig

from outrider.engine.parallel.checks import check_can_split
from outrider.wire.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "num_ranks", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "tensor_parallel is 4 and the model has 6 attention"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 3, "tensor_parallel is 3 and the model has 2 key-value"),
    ],
)
def test_heads_that_do_not_divide_are_named(changes: dict[str, int], num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*; use tensor_parallel 1, 2 or another model"):
        check_can_split(LlamaConfig(hidden_size=384, **changes), num_ranks, "none", False)
    check_can_split(LlamaConfig(hidden_size=384, **changes), 2, "none", False)


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="BloomForCausalLM has no tensor-parallel plan"):
        check_can_split(BloomConfig(), 2, "none", False)
    with pytest.raises(ConfigError, match="tensor_parallel is 2 and quantization is 'int8'"):
        check_can_split(LlamaConfig(), 2, "int8", False)
    with pytest.raises(ConfigError, match="batch_invariant"):
        check_can_split(LlamaConfig(), 2, "none", True)
