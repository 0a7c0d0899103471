"""Layouts of packed numbers."""

import json

import torch

from outrider.engine.quantization import packed_layouts as layouts


def test_a_block_that_is_wider_than_the_weight_takes_no_memory() -> None:
    numbers, huge = torch.arange(8.0).reshape(2, 4), 1 << 50
    parts = {"weight": numbers, "scale": torch.tensor([[2.0, 4.0]])}
    expected = numbers * torch.tensor([2.0, 2.0, 4.0, 4.0])
    assert torch.equal(layouts.scaled(parts, block=(huge, 2)), expected)
    state = {"blocksize": huge, "nested_blocksize": huge, "nested_offset": 0.0, "shape": [2, 4]}
    parts = {
        "state": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        "weight": torch.tensor([[0x01], [0x23], [0x45], [0x67]], dtype=torch.uint8),
        "map": torch.arange(16.0),
        "absmax": torch.zeros(1, dtype=torch.uint8),
        "nested_absmax": torch.tensor([2.0]),
        "nested_map": torch.ones(256),
    }
    assert torch.equal(layouts.bits_and_bytes4(parts), 2 * numbers)
