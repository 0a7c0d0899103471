"""Read a model from one GGUF file, through transformers: configuration, tokenizer and weights. Used by the loader.

The weights are unpacked as they are read: in memory they take the dtype of the setting, and run as any others do. What
a file states and transformers leaves out would change the text, so it is carried over here or the file is refused.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import io
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from outrider.engine.files.gguf_stated import complete
from outrider.engine.files.model_files import first_line
from outrider.engine.files.weight_headers import check_counts
from outrider.wire.errors import ConfigError
from outrider.wire.models.gguf_header import GgufHeader, read_header
from outrider.wire.peer_text import bound_text

ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Of text, of a turn and of a message: each ends an answer."""
_replaced = threading.RLock()
"""Held while parts of the package gguf, or stderr, are replaced: of two loads in a process one waits."""
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
    check_counts(header.values, str(path))
    config = copy.deepcopy(_config_of(path, path.stat().st_mtime_ns))
    try:
        complete(config, header)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:  # values of other types
        raise ConfigError(
            f"what {path} states is not of use: {first_line(error)}; get it again", param="model"
        ) from None
    ends = [header.values.get(f"tokenizer.ggml.{name}") for name in ENDS]
    stated = getattr(config, "eos_token_id", None)
    own = stated if isinstance(stated, list) else [stated]
    config.eos_token_id = sorted({token_id for token_id in (*own, *ends) if token_id is not None}) or None
    return config


@lru_cache(maxsize=4)
def _config_of(path: Path, _changed_ns: int) -> PreTrainedConfig:
    try:
        with read_once():
            return AutoConfig.from_pretrained(path.absolute().parent, gguf_file=path.name)
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
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    if type_id not in GGML_QUANT_SIZES:
        return False
    kind = GGMLQuantizationType(type_id)
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize(numpy.zeros((1, block_bytes), numpy.uint8), kind)
    except NotImplementedError:
        return False
    return True


def stored_types(path: Path) -> str:
    """Return in words how a file holds its weights."""
    types = {tensor.type_id for tensor in read_header(path).tensors.values()}
    return f"they are held as {', '.join(sorted(type_name(each) for each in types))}"


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Have transformers reuse what the gguf package makes of a file: it asks for the names of tensors anew for every
    module, and for the whole header twice. Of 14 s for 272 tensors that takes 9.
    """
    import gguf

    with _replaced:
        reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader, gguf.get_tensor_name_map = _header_of, _names_of
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def _header_of(path: str) -> Any:
    return _reader(path, Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _reader(path: str, _changed_ns: int) -> Any:
    return importlib.import_module("gguf.gguf_reader").GGUFReader(path)


@lru_cache(maxsize=1)
def _names_of(architecture: int, num_layers: int) -> Any:
    return importlib.import_module("gguf.tensor_mapping").get_tensor_name_map(architecture, num_layers)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Read weights in this context: transformers draws its progress on stderr, which is a log."""
    try:
        with read_once(), contextlib.redirect_stderr(io.StringIO()):  # in this order: the first holds the lock
            yield
    finally:
        _reader.cache_clear()  # which holds the file open


def weight_options(path: Path) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` reads a file's weights and unpacks them."""
    from transformers import GgufConfig

    return {"gguf_file": str(path.absolute()), "quantization_config": GgufConfig(dequantize=True)}


def own_dtype(path: Path) -> torch.dtype:
    """Return the dtype of weights that are not quantised; bfloat16 for quantised ones."""
    types = {tensor.type_id for tensor in read_header(path).tensors.values()}
    if not types <= PLAIN_TYPES.keys():
        return torch.bfloat16
    halves = types - {0}  # norms are float32 everywhere
    return PLAIN_TYPES[max(halves, default=0)]
