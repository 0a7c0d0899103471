"""Which models can be split."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

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
