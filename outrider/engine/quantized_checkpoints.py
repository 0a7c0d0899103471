"""Checkpoints whose weights are quantised already: can they be read here? Asked by the loader before it reads them.

transformers reads them, through a quantizer for each method that says itself which package and which device it needs.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from outrider.engine.model_files import first_line
from outrider.wire.errors import ConfigError


def method_of(config: PreTrainedConfig) -> str | None:
    """gptq, awq, torchao and so on, as the checkpoint says; None for whole weights."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    name = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(name, "value", name))


def check_readable(model: str, config: PreTrainedConfig, device: torch.device, wanted: str) -> None:
    """wanted: the setting `quantization`. Raises ConfigError naming the method, what is missing and the remedy."""
    method = method_of(config)
    if method is None:
        return
    if wanted != "none":
        raise ConfigError(
            f"quantization is {wanted!r} and the weights of {model} are quantised by {method} already; "
            "use quantization none",
            param="quantization",
        )
    try:
        quantizer = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
        quantizer.validate_environment(device_map={"": device})
    except Exception as error:  # each method has errors of its own
        raise ConfigError(
            f"the weights of {model} are quantised by {method}, which cannot be read on {device}: {first_line(error)}; "
            "install what is missing, or use a checkpoint that is not quantised",
            param="model",
        ) from error
