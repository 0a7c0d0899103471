"""What a GGUF file states of its model, and what transformers would leave out of it."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy
import pytest

from outrider.engine.loading.loader import check_weights, read_config
from tests.gguf_models import write_gguf
from tests.unit.outrider.engine.files.gguf_refusals import refusal

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers.integrations.gguf") is None, reason="this transformers reads no GGUF"
)


def test_the_scaling_of_llama_3_is_read_from_its_divisors(plain: str, tmp_path: Path) -> None:
    exponents = numpy.arange(4) / 4
    turns = 8192 / (2 * numpy.pi) * 10000.0**-exponents
    kept = ((turns - 1) / 3).clip(0, 1)
    divisors = (1 / ((1 - kept) / 8 + kept)).astype(numpy.float32)
    model = write_gguf(plain, tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": divisors})
    rope = read_config(model).rope_parameters
    check_weights(model, read_config(model))
    assert rope["rope_type"] == "llama3" and rope["factor"] == 8
    divisors[0] = 2
    other = write_gguf(plain, tmp_path / "other.gguf", tensors={"rope_freqs.weight": divisors})
    assert "scales rotary frequencies (rope_freqs.weight) in another way than Llama 3" in refusal(other)


def test_a_stated_scaling_of_positions_is_carried_over(plain: str, tmp_path: Path) -> None:
    values = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    rope = read_config(write_gguf(plain, tmp_path / "tiny.gguf", values=values)).rope_parameters
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    assert {name: rope[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": {"expert_count": 8}}, "states llama.expert_count = 8, which transformers"),
        ({"values": {"rope.scaling.type": "longrope"}}, "states llama.rope.scaling.type = longrope"),
        ({"tensors": {"blk.0.router.weight": numpy.zeros((2, 2), numpy.float32)}}, "a tensor blk.0.router.weight"),
        ({"architecture": "hal9000"}, "of the architecture hal9000, which transformers .* cannot read from GGUF"),
    ],
)
def test_what_transformers_would_leave_out_is_refused_by_name(
    options: dict[str, Any], message: str, plain: str, tmp_path: Path
) -> None:
    model = write_gguf(plain, tmp_path / "tiny.gguf", **options)
    assert re.search(message, refusal(model))
