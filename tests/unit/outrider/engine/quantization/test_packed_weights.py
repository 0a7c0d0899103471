"""Packed weights are found by the names and shapes of their tensors, without their numbers."""

from pathlib import Path
from typing import Any

import pytest

from outrider.engine.files.weight_headers import TensorHeader
from outrider.engine.quantization.packed_weights import find_packed
from outrider.wire.errors import ConfigError

Shapes = dict[str, tuple[str, tuple[int, ...]]]
GPTQ: Shapes = {"a.qweight": ("I32", (12, 24)), "a.qzeros": ("I32", (1, 3)), "a.scales": ("F16", (1, 24))}


def found(method: str, shapes: Shapes, **quantization: Any) -> Any:
    headers = {name: TensorHeader(shape, dtype, Path("x")) for name, (dtype, shape) in shapes.items()}
    return find_packed("m", headers, {"quant_method": method, **quantization})


@pytest.mark.parametrize(
    ("method", "shapes", "stated", "name", "shape"),
    [
        ("gptq", GPTQ, {"bits": 4}, "a.weight", (24, 12 * 8)),
        ("gptq", GPTQ, {"bits": 3}, "a.weight", (24, 128)),  # 12 words of 32 bits
        (
            "awq",
            {"a.qweight": ("I32", (64, 4)), "a.qzeros": ("I32", (1, 4)), "a.scales": ("F16", (1, 32))},
            {},
            "a.weight",
            (32, 64),
        ),
        ("mxfp4", {"e_blocks": ("U8", (2, 8, 3, 16)), "e_scales": ("U8", (2, 8, 3))}, {}, "e", (2, 96, 8)),
        (
            "modelopt",
            {"w": ("U8", (8, 16)), "w_scale": ("F8_E4M3", (8, 2)), "w_scale_2": ("F32", ())},
            {},
            "w",
            (8, 32),  # two numbers in a byte
        ),
        ("fp8", {"w": ("F8_E4M3", (8, 16)), "w_scale": ("F32", ())}, {}, "w", (8, 16)),
    ],
)
def test_the_shape_of_a_weight_follows_from_its_words(
    method: str, shapes: Shapes, stated: dict[str, Any], name: str, shape: tuple[int, ...]
) -> None:
    weights = found(method, shapes, **stated)
    assert list(weights) == [name] and weights[name].shape == shape
    assert set(weights[name].parts.values()) == set(shapes)


def test_plain_tensors_stay_as_they_are_and_scales_of_activations_are_left_out() -> None:
    shapes: Shapes = {"norm.weight": ("F32", (8,)), "w.input_scale": ("F32", ()), "w.k_scale": ("F32", ())}
    assert found("fp8", shapes) == {"norm.weight": None}


@pytest.mark.parametrize(
    ("method", "shapes", "stated", "message"),
    [
        ("fp8", {}, {"transform_config": {"a": 1}}, "the weights of m are rotated"),
        ("gptq", {"a.qweight": GPTQ["a.qweight"]}, {}, "a.qweight of m is gptq without qzeros and scales beside it"),
        ("gptq", GPTQ | {"a.qweight": ("I16", (12, 24))}, {}, "gptq in words of I16"),
        ("gptq", GPTQ, {"checkpoint_format": "marlin"}, "GPTQ of the format marlin"),
        ("fp8", {"w": ("I32", (8, 8)), "w_scale": ("F32", ())}, {}, "w of m is stored as I32 with a scale"),
        (
            "compressed-tensors",
            {"w_packed": ("U8", (8, 8)), "w_scale": ("F16", (8, 2))},
            {},
            "w_packed of m is FP4 with a scale for 8 columns",
        ),
        ("compressed-tensors", {"w_packed": ("I32", (8, 8))}, {}, "w_packed of m is packed without a scale beside it"),
    ],
)
def test_a_layout_that_is_not_read_is_named(method: str, shapes: Shapes, stated: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        found(method, shapes, **stated)
