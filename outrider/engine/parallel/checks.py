"""Check that a model can be split over the ranks asked for, before any process is started. Used by the loader."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from transformers import PreTrainedConfig

from outrider.engine.architectures.layer_memory import layer_config
from outrider.engine.architectures.text_part import served_class
from outrider.wire.errors import ConfigError

_QUERY_PROJECTIONS = ("q_proj", "q_b_proj")
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


def check_can_split(config: PreTrainedConfig, num_ranks: int, quantization: str, batch_invariant: bool) -> None:
    """Raise ConfigError, naming the class or the numbers that do not divide, unless the model can be split."""
    if config.is_encoder_decoder:
        raise _refuse(f"a {config.model_type} is an encoder-decoder model, which is not split")
    model_class = served_class(config).model_class
    text = config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise _refuse(f"{model_class.__name__} has no tensor-parallel plan in transformers")
    if quantization != "none":
        raise _refuse(f"tensor_parallel is {num_ranks} and quantization is {quantization!r}, which do not go together")
    if batch_invariant:
        raise _refuse(f"tensor_parallel is {num_ranks}, and ranks' sums promise no batch_invariant")
    split = {key.rsplit(".", 1)[-1] for key, style in plan.items() if style == "colwise"}  # not gathered again
    heads = _numbers(text, "num_attention_heads")
    numbers = {
        "attention heads": heads if split & {*_QUERY_PROJECTIONS, *_KEY_PROJECTIONS} else [],
        "key-value heads": (_numbers(text, "num_key_value_heads") or heads) if split & {*_KEY_PROJECTIONS} else [],
    }
    for what, found in numbers.items():
        for number in found:
            if number % num_ranks:
                raise _refuse(
                    f"tensor_parallel is {num_ranks} and the model has {number} {what}, which do not divide",
                    math.gcd(*itertools.chain(*numbers.values())),
                )


def check_devices(device: torch.device, num_ranks: int) -> None:
    """Raise ConfigError unless each rank that rank 0 starts on this machine can have a GPU of its own."""
    if device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"tensor_parallel is {num_ranks} and this process sees {torch.cuda.device_count()} GPUs; "
            "lower it, or say device cpu",
            param="tensor_parallel",
        )


def _refuse(why: str, divisible: int = 1) -> ConfigError:
    """Return the error, which names the rank counts that divide `divisible`."""
    possible = ", ".join(str(ranks) for ranks in range(1, divisible + 1) if divisible % ranks == 0)
    return ConfigError(f"{why}; use tensor_parallel {possible} or another model", param="tensor_parallel")


def _numbers(text: Any, name: str) -> list[int]:
    """Return the numbers that the configuration has for its layers, each once."""
    numbers: list[int] = []
    for index in range(text.num_hidden_layers):
        found = getattr(layer_config(text, index), name, None)
        if found is not None:
            numbers += [found] if isinstance(found, int) else found
    return list(dict.fromkeys(numbers))
