"""The dtype that a head is loaded in."""

import pytest
import torch

from outrider.engine.heads.head_loader import dtype_of

TENSORS = {"fc.weight": torch.zeros(1), "lm_head.weight": torch.zeros(1, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("device", "setting", "dtype"),
    [
        ("cpu", "auto", torch.float32),
        ("cuda", "auto", torch.bfloat16),  # the lm_head's
        ("cpu", "bfloat16", torch.bfloat16),
        ("cuda", "float16", torch.float16),
    ],
)
def test_auto_is_float32_on_a_cpu_and_the_lm_heads_elsewhere(device: str, setting: str, dtype: torch.dtype) -> None:
    assert dtype_of(TENSORS, torch.device(device), setting) == dtype
