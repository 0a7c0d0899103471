"""Check that a model can be split over a number of ranks, before any process is started. Called by the loader."""

from __future__ import annotations

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
    """Raise ConfigError unless the model can be split over `num_ranks`; the message names the class or the numbers that
    prevent it.

    quantization, batch_invariant: the settings of these names. A model that is quantised at load or must be
    batch-invariant is not split.
    """
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
    query_heads, kv_heads = _split_heads(text, plan)
    for name, counts in (("attention heads", query_heads), ("key-value heads", kv_heads)):
        for count in counts:
            if count % num_ranks:
                raise _refuse(
                    f"tensor_parallel is {num_ranks} and the model has {count} {name}, which do not divide",
                    math.gcd(*query_heads, *kv_heads),
                )


def _split_heads(text: Any, plan: dict[str, str]) -> tuple[list[int], list[int]]:
    # The numbers of query heads and of key-value heads, of all layers, that the plan splits over the ranks.
    split: set[str] = set()
    for key, style in plan.items():
        if style == "colwise":  # its output is not gathered again, so that each rank has some of the heads
            split.add(key.rsplit(".", 1)[-1])
    num_heads = _distinct_numbers(text, "num_attention_heads")
    query_heads: list[int] = []
    kv_heads: list[int] = []
    if split & {*_QUERY_PROJECTIONS, *_KEY_PROJECTIONS}:
        query_heads = num_heads
    if split & {*_KEY_PROJECTIONS}:
        kv_heads = _distinct_numbers(text, "num_key_value_heads") or num_heads
    return query_heads, kv_heads


def check_devices(device: torch.device, num_ranks: int) -> None:
    """Raise ConfigError unless this process can use a GPU for each rank. On a CPU all ranks share the machine."""
    if device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"tensor_parallel is {num_ranks} and this process sees {torch.cuda.device_count()} GPUs; "
            "lower it, or say device cpu",
            param="tensor_parallel",
        )


def _refuse(why: str, divisible: int = 1) -> ConfigError:
    # `divisible`: a number that the ranks have to divide, for the remedy. 6: "use tensor_parallel 1, 2, 3, 6"
    possible = ", ".join(str(ranks) for ranks in range(1, divisible + 1) if divisible % ranks == 0)
    return ConfigError(f"{why}; use tensor_parallel {possible} or another model", param="tensor_parallel")


def _distinct_numbers(text: Any, name: str) -> list[int]:
    # The values of an option in all layers, each once. An option may have a list for the layers.
    numbers: list[int] = []
    for index in range(text.num_hidden_layers):
        value = getattr(layer_config(text, index), name, None)
        if isinstance(value, int):
            numbers.append(value)
        elif value is not None:
            numbers += value
    return list(dict.fromkeys(numbers))
