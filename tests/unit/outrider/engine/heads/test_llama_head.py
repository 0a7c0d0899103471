"""The layers of a head are shaped as another model's, whatever the head's own width."""

import pytest
from transformers import GPT2Config, LlamaConfig

from outrider.engine.heads.llama_head import llama_layers

ROPE = {"rope_type": "default", "rope_theta": 5.0}


@pytest.mark.parametrize(("stated", "head_dim"), [(None, 48 // 4), (16, 16)])
def test_heads_keep_their_width_in_a_narrower_head(stated: int | None, head_dim: int) -> None:
    like = LlamaConfig(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=stated)
    layers = llama_layers(like, 32, 97, 1, ROPE)
    assert (layers.hidden_size, layers.vocab_size, layers.num_hidden_layers) == (32, 97, 1)
    assert layers.head_dim == head_dim and layers.num_key_value_heads == 2
    assert layers.rope_parameters["rope_theta"] == 5.0 and like.rope_parameters["rope_theta"] != 5.0


def test_a_model_of_other_layers_lacks_the_fields() -> None:
    with pytest.raises(AttributeError, match="intermediate_size"):
        llama_layers(GPT2Config(), 32, 97, 1, ROPE)
