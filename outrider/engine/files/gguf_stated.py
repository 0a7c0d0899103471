"""Complete the configuration that transformers makes of a GGUF file, by what else the file states. Used by gguf_files.

transformers reads a list of values for each architecture and passes over the others, and over tensors that it has no
place for. Some of them change every answer: those are carried over here, and the rest is refused by name.
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
"""Values and the names that transformers has for them, where an architecture's list lacks them."""
WITHOUT_EFFECT = ("attention.causal", "tensor_data_layout", "use_parallel_residual", "rope.scaling.finetuned")
YARN = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
LINEAR = {"rope.scaling.factor": "factor"}
FREQUENCIES = "rope_freqs.weight"
"""Tensor of the divisors of the rotary frequencies, float32: so a file states the scaling of Llama 3."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all of Llama 3.1 to 3.3, which differ in the factor alone."""
SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and layers of the models of 27B, whose attention is scaled by hidden size over heads; the files do not
say it."""


def complete(config: PreTrainedConfig, header: GgufHeader) -> None:
    """Carry over, in place, what the file states. Raises ConfigError for what has no place in the configuration."""
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_CONFIG_MAPPING

    if header.architecture in GGUF_CONFIG_ARCHS:  # read by a function of its own
        return
    known = {name for name, place in GGUF_CONFIG_MAPPING.get(config_key(config), {}).items() if place is not None}
    prefix = f"{header.architecture}."
    names = [name.removeprefix(prefix) for name in header.values if name.startswith(prefix)]
    remaining = [name for name in names if name not in known and name not in WITHOUT_EFFECT]
    for name in remaining:
        value = header.stated(name)
        if name in ATTRIBUTES and hasattr(config, ATTRIBUTES[name]):
            setattr(config, ATTRIBUTES[name], value)
        elif not (name.startswith("rope.") or _is_as_stated(config, name, value)):
            raise _unread(header, name)
    _scale_rope(config, header)
    if (header.architecture, config.num_hidden_layers) in SCALED_BY_WIDTH:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads


def config_key(config: PreTrainedConfig) -> str:
    """Return transformers' name of the architecture, by which it lists what it reads."""
    return config.model_type.removesuffix("_text")


def _is_as_stated(config: PreTrainedConfig, name: str, value: Any) -> bool:
    if name == "attention.value_length":
        return bool(value == head_dim(config))
    return name == "expert_count" and value == 0


def head_dim(config: PreTrainedConfig) -> int:
    own: int | None = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


def _scale_rope(config: PreTrainedConfig, header: GgufHeader) -> None:
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        return
    whole = rope.get("full_attention", rope)  # layers with a window keep their own
    dimensions = header.stated("rope.dimension_count")
    if dimensions is not None and dimensions != int(head_dim(config) * whole.get("partial_rotary_factor", 1.0)):
        raise _unread(header, "rope.dimension_count")
    kind = header.stated("rope.scaling.type")
    if kind in ("linear", "yarn"):
        places = LINEAR if kind == "linear" else YARN
        _check_all_read(header, {"rope.scaling.type", *places})
        scaling = {place: header.stated(name) for name, place in places.items() if header.stated(name) is not None}
        whole.update(scaling, rope_type=kind)
    else:
        _check_all_read(header, {"rope.scaling.type"} if kind in (None, "none") else set())
    if FREQUENCIES in header.tensors:
        whole.update(_llama3(header, whole["rope_theta"]), rope_type="llama3")


def _check_all_read(header: GgufHeader, names: set[str]) -> None:
    prefix = f"{header.architecture}."
    others = {"rope.freq_base", "rope.dimension_count", *WITHOUT_EFFECT}
    for name in header.values:
        own = name.removeprefix(prefix)
        if name.startswith(f"{prefix}rope.") and own not in names | others:
            raise _unread(header, own)


def _llama3(header: GgufHeader, theta: float) -> dict[str, Any]:
    """Return the scaling that gives the file's divisors. Raises ConfigError where none of Llama 3's does."""
    tensor = header.tensors[FREQUENCIES]
    start = header.path.stat().st_size - header.num_data_bytes + tensor.offset
    divisors = numpy.fromfile(header.path, numpy.float32, tensor.num_elements, offset=start)  # [head_dim / 2]
    exponents = numpy.arange(len(divisors)) / len(divisors)
    turns = LLAMA3["original_max_position_embeddings"] / (2 * math.pi) * theta**-exponents  # within that context
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clip(0, 1)  # share of a frequency that is not scaled
    factor = round(float((1 - kept[-1]) / (1 / divisors[-1] - kept[-1])), 4) if kept[-1] < 1 else 1.0
    if tensor.type_id != 0 or not numpy.allclose(divisors, 1 / ((1 - kept) / factor + kept), rtol=1e-3):
        raise ConfigError(
            f"{header.path} scales rotary frequencies ({FREQUENCIES}) in another way than Llama 3, which is not "
            "known here; use the model's folder of safetensors",
            param="model",
        )
    return {**LLAMA3, "factor": factor}


def check_tensors(network: nn.Module, header: GgufHeader) -> None:
    """Raise ConfigError for the first tensor of a file without a place in the network, which is on the meta device."""
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
