"""Which modules of a network never run for text, and what stands in their place."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from outrider.engine.architectures.absent_parts import AbsentPart, leave_out
from outrider.engine.architectures.text_part import whole_class
from outrider.wire.errors import ConfigError
from tests.shrunk import shrunk

LLAMA = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)


def test_the_tower_and_the_projector_of_a_wrapper_are_left_out() -> None:
    config = shrunk("mistral3")
    with torch.device("meta"):
        network = whole_class(config)(config)
    assert sorted(leave_out(network)) == ["model.multi_modal_projector", "model.vision_tower"]
    tower = network.model.vision_tower
    assert isinstance(tower, AbsentPart) and not list(tower.parameters())
    assert not any("vision" in name or "projector" in name for name, _ in network.named_parameters())
    with pytest.raises(NotImplementedError, match="only the text part"):
        tower(torch.zeros(1))


def test_a_model_of_text_keeps_all_and_one_without_a_head_is_refused() -> None:
    with torch.device("meta"):
        assert leave_out(LlamaForCausalLM(LLAMA)) == []
        with pytest.raises(ConfigError, match="LlamaModel has no head that gives logits of text"):
            leave_out(LlamaModel(LLAMA))
