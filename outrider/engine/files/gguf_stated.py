"""Complete the configuration that transformers reads from a GGUF file. Used by `gguf_files` and the loader.

Transformers reads a list of values for each architecture. It ignores all other values, and tensors for which it has no
parameter. Some of these change every output. They are added here; a file with one that cannot be added is refused, and
the error names it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy
import transformers
from torch import nn
from transformers import PreTrainedConfig

from outrider.wire.errors import ConfigError
from outrider.wire.models.gguf_header import GgufHeader
from outrider.wire.peer_text import bound_text

ATTRIBUTES = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "vocab_size": "vocab_size",
}
"""For each GGUF key that transformers does not read for some architectures, the field of transformers' configuration
that gets its value."""
WITHOUT_EFFECT = ("attention.causal", "tensor_data_layout", "use_parallel_residual", "rope.scaling.finetuned")
"""GGUF keys (after the architecture's name) that change nothing in the model's outputs, and so need no configuration
field."""
YARN = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""For each GGUF key of a rope scaling of type YaRN, the name of the value in transformers' `rope_parameters`."""
LINEAR = {"rope.scaling.factor": "factor"}
"""For the GGUF key of a linear rope scaling (positions divided by a factor), the name of the value in transformers'
`rope_parameters`."""
FREQUENCIES = "rope_freqs.weight"
"""Name of the tensor [head_dim / 2] float32 by which the rotary frequencies are divided. In a GGUF file it stands for
Llama 3's rope scaling."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Fields of Llama 3's rope scaling that have the same value in Llama 3.1 to 3.3. Its `factor` is not among them, since
it differs."""
SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}
"""Pairs (architecture, number of layers) of the 27B Gemmas. Their `query_pre_attn_scalar` is the hidden size divided by
the number of heads; GGUF files do not state it."""


def complete(config: PreTrainedConfig, header: GgufHeader) -> None:
    """Set the fields of `config`, in place, whose values the GGUF file states and transformers does not read.

    Raises ConfigError if the file states a value for which `config` has no field.
    """
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_CONFIG_MAPPING

    if header.architecture in GGUF_CONFIG_ARCHS:  # transformers has a function that reads all of it
        return
    fields = GGUF_CONFIG_MAPPING.get(config_key(config), {})
    for name in _architecture_keys(header):
        if name in WITHOUT_EFFECT or fields.get(name) is not None:
            continue
        value = header.stated(name)
        if name in ATTRIBUTES and hasattr(config, ATTRIBUTES[name]):
            setattr(config, ATTRIBUTES[name], value)
        elif not (name.startswith("rope.") or _is_default(config, name, value)):
            raise _unread(header, name)
    _scale_rope(config, header)
    if (header.architecture, config.num_hidden_layers) in SCALED_BY_WIDTH:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads


def _architecture_keys(header: GgufHeader) -> list[str]:
    # llama.attention.key_length -> attention.key_length; keys of the tokenizer and of the file are left out
    prefix = f"{header.architecture}."
    return [name.removeprefix(prefix) for name in header.values if name.startswith(prefix)]


def config_key(config: PreTrainedConfig) -> str:
    """Return the architecture's name in transformers' table of GGUF keys (GGUF_CONFIG_MAPPING)."""
    return config.model_type.removesuffix("_text")


def _is_default(config: PreTrainedConfig, name: str, value: Any) -> bool:
    if name == "attention.value_length":
        return bool(value == head_dim(config))
    return name == "expert_count" and value == 0


def head_dim(config: PreTrainedConfig) -> int:
    """Return the width of an attention head of a model with this configuration."""
    own: int | None = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


def _scale_rope(config: PreTrainedConfig, header: GgufHeader) -> None:
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        return
    full_rope = rope.get("full_attention", rope)  # layers with a window keep their own
    dimensions = header.stated("rope.dimension_count")
    if dimensions is not None and dimensions != int(head_dim(config) * full_rope.get("partial_rotary_factor", 1.0)):
        raise _unread(header, "rope.dimension_count")
    kind = header.stated("rope.scaling.type")
    if kind == "linear":
        full_rope.update(_read_scaling(header, LINEAR), rope_type=kind)
    elif kind == "yarn":
        full_rope.update(_read_scaling(header, YARN), rope_type=kind)
    elif kind is None or kind == "none":
        _check_all_read(header, {"rope.scaling.type"})
    else:
        _check_all_read(header, set())
    if FREQUENCIES in header.tensors:
        full_rope.update(_read_llama3_scaling(header, full_rope["rope_theta"]), rope_type="llama3")


def _read_scaling(header: GgufHeader, fields: dict[str, str]) -> dict[str, Any]:
    _check_all_read(header, {"rope.scaling.type", *fields})
    scaling = {}
    for name, field in fields.items():
        value = header.stated(name)
        if value is not None:
            scaling[field] = value
    return scaling


def _check_all_read(header: GgufHeader, names: set[str]) -> None:
    allowed = {"rope.freq_base", "rope.dimension_count", *WITHOUT_EFFECT, *names}
    for name in _architecture_keys(header):
        if name.startswith("rope.") and name not in allowed:
            raise _unread(header, name)


def _read_llama3_scaling(header: GgufHeader, theta: float) -> dict[str, Any]:
    tensor = header.tensors[FREQUENCIES]
    start = header.path.stat().st_size - header.num_data_bytes + tensor.offset
    divisors = numpy.fromfile(header.path, numpy.float32, tensor.num_elements, offset=start)  # [head_dim / 2] float32
    exponents = numpy.arange(len(divisors)) / len(divisors)  # [head_dim / 2] float64
    turns = LLAMA3["original_max_position_embeddings"] / (2 * math.pi) * theta**-exponents  # [head_dim / 2], in 8192
    low = LLAMA3["low_freq_factor"]
    high = LLAMA3["high_freq_factor"]
    unscaled = ((turns - low) / (high - low)).clip(0, 1)  # [head_dim / 2]: 1 where a frequency is left as it is
    factor = 1.0
    if unscaled[-1] < 1:
        factor = round(float((1 - unscaled[-1]) / (1 / divisors[-1] - unscaled[-1])), 4)
    if tensor.type_id != 0 or not numpy.allclose(divisors, 1 / ((1 - unscaled) / factor + unscaled), rtol=1e-3):
        raise ConfigError(
            f"{header.path} scales rotary frequencies ({FREQUENCIES}) in another way than Llama 3, which is not "
            "known here; use the model's folder of safetensors",
            param="model",
        )
    return {**LLAMA3, "factor": factor}


def check_tensors(network: nn.Module, header: GgufHeader) -> None:
    """Raise ConfigError if the file has a tensor for which the network has no parameter. The message names the first.

    network: on the meta device.
    """
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    if header.architecture in GGUF_CONFIG_ARCHS:  # its load lists them
        return
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=network.config.to_dict())
    places = get_gguf_hf_weights_map(network, processor)
    for name in header.tensors:
        if name not in places and name != FREQUENCIES:
            raise ConfigError(
                f"{header.path} has a tensor {bound_text(name)}, for which {type(network).__name__} of transformers "
                f"{transformers.__version__} has no place; use the model's folder of safetensors",
                param="model",
            )


def _unread(header: GgufHeader, name: str) -> ConfigError:
    value = bound_text(str(header.stated(name)))
    return ConfigError(
        f"{header.path} states {header.architecture}.{bound_text(name)} = {value}, which transformers "
        f"{transformers.__version__} does not read from GGUF, and without it the text would be another; "
        "use the model's folder of safetensors",
        param="model",
    )
