"""Read a model from one GGUF file, through transformers: configuration, tokenizer and weights. Used by the loader.

The weights are unpacked as they are read: in memory they take the dtype of the setting, and run as any others do. What
a file states and transformers leaves out would change the text, so it is carried over here or the file is refused.
"""

from __future__ import annotations

import copy
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from transformers import AutoConfig, GgufConfig, PreTrainedConfig

from outrider.engine.loading import memory
from outrider.engine.loading.memory import readable_bytes
from outrider.engine.loading.model_files import first_line
from outrider.wire.errors import ConfigError
from outrider.wire.gguf_header import GgufHeader, read_header
from outrider.wire.log import get_logger
from outrider.wire.peer_text import bound_text

log = get_logger(__name__)

ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Of text, of a turn and of a message: each ends an answer."""
PLAIN_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of tensors that are not quantised, as `gguf.GGMLQuantizationType` counts."""


def check_installed(path: Path) -> None:
    """Raise ConfigError where a package that reads GGUF is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{path} is read with the package gguf, which is missing: pip install 'outrider[engine]'")
    if importlib.util.find_spec("transformers.integrations.gguf") is None:
        raise ConfigError(
            f"transformers {transformers.__version__} reads no GGUF as it is needed here: pip install -U transformers"
        )


def read_gguf_config(path: Path) -> PreTrainedConfig:
    """Return transformers' configuration of a file, with what it leaves out. Raises ConfigError."""
    header = read_header(path)
    check_installed(path)
    check_types(header)
    config = copy.deepcopy(_config_of(path, path.stat().st_mtime_ns))
    ends = [header.values.get(f"tokenizer.ggml.{name}") for name in ENDS]
    own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    config.eos_token_id = sorted({token_id for token_id in (*own, *ends) if token_id is not None}) or None
    return config


@lru_cache(maxsize=4)
def _config_of(path: Path, _changed_ns: int) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # transformers computes with what the file states, and raises whatever comes of that
        architecture = read_header(path).architecture
        raise ConfigError(
            f"{path} is of the architecture {bound_text(architecture)}, which transformers {transformers.__version__} "
            f"cannot read from GGUF: {first_line(error)}; use the model's folder of safetensors",
            param="model",
        ) from None


def check_types(header: GgufHeader) -> None:
    """Raise ConfigError for tensors of a type that is not read, and for a file that ends before its last tensor."""
    from gguf import GGML_QUANT_SIZES

    types = {tensor.type_id: name for name, tensor in header.tensors.items()}
    for type_id, name in types.items():
        if not _is_readable(type_id):
            raise ConfigError(
                f"{bound_text(name)} in {header.path} is quantised as {type_name(type_id)}, which the package gguf "
                "cannot unpack; use a file of another quantisation, such as Q4_K_M or Q8_0",
                param="model",
            )
    for name, tensor in header.tensors.items():
        block, block_bytes = GGML_QUANT_SIZES[tensor.type_id]
        if tensor.offset + tensor.num_elements // block * block_bytes > header.num_data_bytes:
            raise ConfigError(
                f"{header.path} ends before {bound_text(name)} does: it was not copied whole; get the file again",
                param="model",
            )


def type_name(type_id: int) -> str:
    """Return what llama.cpp calls a type of tensors, such as Q4_K."""
    from gguf import GGMLQuantizationType

    known = type_id in list(GGMLQuantizationType)
    return GGMLQuantizationType(type_id).name if known else f"number {type_id}"


def _is_readable(type_id: int) -> bool:
    from gguf import GGML_QUANT_SIZES, dequantize

    if type_id not in GGML_QUANT_SIZES:
        return False
    _, block_bytes = GGML_QUANT_SIZES[type_id]
    try:
        dequantize(numpy.zeros((1, block_bytes), numpy.uint8), type_id)
    except NotImplementedError:
        return False
    return True


def check_unpacked(path: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Say how much memory a file's weights take when they are unpacked. Raises ConfigError where there is less."""
    tensors = read_header(path).tensors.values()
    num_bytes = sum(tensor.num_elements for tensor in tensors) * dtype.itemsize
    free = memory.free_memory_bytes(device)
    names = sorted({type_name(tensor.type_id) for tensor in tensors})
    if num_bytes > free:
        raise ConfigError(
            f"the weights of {path} take {readable_bytes(num_bytes)} when unpacked to {_name(dtype)}, and "
            f"{readable_bytes(free)} are free on {device}; set dtype bfloat16, use a smaller model, or free some",
            param="dtype",
        )
    log.info(
        "%s holds weights as %s: unpacked to %s, %s of memory for %s of file",
        *(path, ", ".join(names), _name(dtype), readable_bytes(num_bytes), readable_bytes(path.stat().st_size)),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def weight_options(path: Path) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` reads a file's weights and unpacks them."""
    return {"gguf_file": str(path.absolute()), "quantization_config": GgufConfig(dequantize=True)}


def own_dtype(path: Path) -> torch.dtype:
    """Return the dtype of weights that are not quantised; bfloat16 for quantised ones."""
    types = {tensor.type_id for tensor in read_header(path).tensors.values()}
    if not types <= PLAIN_TYPES.keys():
        return torch.bfloat16
    halves = types - {0}  # norms are float32 everywhere
    return PLAIN_TYPES[max(halves, default=0)]
