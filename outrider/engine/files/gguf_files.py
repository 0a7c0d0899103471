"""Read the configuration and the weights of a model from one GGUF file, through transformers. Used by the loader.

The weights are unpacked to the configured dtype while they are read, and are then used like any others. Transformers
ignores some of a file's values, without which the model would generate another text: `gguf_stated` adds them, or the
file is refused.
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
"""GGUF keys (after "tokenizer.ggml.") that name the tokens at which a text, a turn of a chat or a message ends. Each of
these tokens ends an output."""
_patch_lock = threading.RLock()
"""Lock that is held while functions of the package gguf, or stderr, are replaced. It makes concurrent loads in one
process wait for each other."""
PLAIN_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Dtypes of tensors that are not quantised, by their number in `gguf.GGMLQuantizationType`."""


def check_installed(path: Path) -> None:
    """Raise ConfigError if a package that is needed to read GGUF is missing. path: the file, for the message."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{path} is read with the package gguf, which is missing: pip install 'outrider[engine]'")
    if importlib.util.find_spec("transformers.integrations.gguf") is None:
        raise ConfigError(
            f"transformers {transformers.__version__} reads no GGUF as it is needed here: pip install -U transformers"
        )


def read_gguf_config(path: Path) -> PreTrainedConfig:
    """Return the transformers configuration of a GGUF file, with all end ids that the file names. It also has the
    values that the file states and transformers by itself does not read.

    Raises ConfigError for a file that is damaged, or that transformers or this machine cannot read.
    """
    header = read_header(path)
    check_installed(path)
    check_types(header)
    check_counts(header.values, str(path))
    config = copy.deepcopy(_read_config(path, path.stat().st_mtime_ns))
    try:
        complete(config, header)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:  # values of other types
        raise ConfigError(
            f"what {path} states is not of use: {first_line(error)}; get it again", param="model"
        ) from None
    ends = {header.values.get(f"tokenizer.ggml.{name}") for name in ENDS}
    config_ends = getattr(config, "eos_token_id", None)
    if isinstance(config_ends, list):
        ends.update(config_ends)
    else:
        ends.add(config_ends)
    ends.discard(None)
    config.eos_token_id = sorted(ends) or None
    return config


@lru_cache(maxsize=4)
def _read_config(path: Path, _changed_ns: int) -> PreTrainedConfig:
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
    """Raise ConfigError if the package gguf cannot unpack one of the file's tensors, or if the file ends too early."""
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
    """Return llama.cpp's name of a tensor type, such as "Q4_K"; "number 99" for a type that the package gguf does not
    have.
    """
    from gguf import GGMLQuantizationType

    if type_id not in list(GGMLQuantizationType):
        return f"number {type_id}"
    return GGMLQuantizationType(type_id).name


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
    """Return a clause that names the types of a GGUF file's tensors, such as "they are held as F32, Q4_K"."""
    names = sorted(map(type_name, _type_ids(path)))
    return f"they are held as {', '.join(names)}"


def _type_ids(path: Path) -> set[int]:
    return {tensor.type_id for tensor in read_header(path).tensors.values()}


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Context manager within which the header of a GGUF file, and transformers' table of its tensor names, are read
    once and kept.

    Without it transformers reads the table again for every module, and the header twice, which took 9 of the 14 s of
    loading a file of 272 tensors.
    """
    import gguf

    with _patch_lock:
        read_gguf = gguf.GGUFReader
        get_names = gguf.get_tensor_name_map
        gguf.GGUFReader = _reader_of
        gguf.get_tensor_name_map = _tensor_names
        try:
            yield
        finally:
            gguf.GGUFReader = read_gguf
            gguf.get_tensor_name_map = get_names


def _reader_of(path: str) -> Any:
    return _open_reader(path, Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _open_reader(path: str, _changed_ns: int) -> Any:
    return importlib.import_module("gguf.gguf_reader").GGUFReader(path)


@lru_cache(maxsize=1)
def _tensor_names(architecture: int, num_layers: int) -> Any:
    return importlib.import_module("gguf.tensor_mapping").get_tensor_name_map(architecture, num_layers)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Context manager in which transformers must read the weights of a GGUF file. It reads the file's header and table
    of tensor names only once, and writes no progress bar to stderr, where the log goes.
    """
    try:
        with read_once(), contextlib.redirect_stderr(io.StringIO()):  # in this order: the first holds the lock
            yield
    finally:
        _open_reader.cache_clear()  # the reader holds the file open


def weight_options(path: Path) -> dict[str, Any]:
    """Return the options of `from_pretrained` that read the weights of a GGUF file and unpack them."""
    from transformers import GgufConfig

    return {"gguf_file": str(path.absolute()), "quantization_config": GgufConfig(dequantize=True)}


def own_dtype(path: Path) -> torch.dtype:
    """Return the dtype in which a GGUF file stores the weights, bfloat16 if any weight is quantised. Norms, which are
    always stored in float32, do not count.
    """
    types = _type_ids(path)
    if not types <= PLAIN_TYPES.keys():
        return torch.bfloat16
    halves = types - {0}  # norms are float32 everywhere
    return PLAIN_TYPES[max(halves, default=0)]
