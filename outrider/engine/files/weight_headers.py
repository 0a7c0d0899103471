"""Compare the sizes in a configuration with the headers of the weight files, before a network of that size is built.

A folder may come from anyone. Large weights need a large file, but a large number in config.json does not: so a network
is built only if its size is in proportion to its files. Called by the loaders of models and heads and by
`outrider doctor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from outrider.engine.files.model_files import config_name, first_line, gguf_path, model_file, weight_map
from outrider.wire.errors import ConfigError
from outrider.wire.models.gguf_header import read_header
from outrider.wire.models.model_id import SAFETENSORS_FILES
from outrider.wire.peer_text import bound_text

T = TypeVar("T")

AGAIN = "get the file again (where it is a pointer of Git LFS: git lfs pull)"
"""Remedy at the end of error messages about a damaged file: to get the file again."""
COUNTS = ("layer", "layers", "expert", "experts", "head", "heads", "labels", "blocks", "stages", "attention_types")
"""Endings of names in config.json whose value is a number of modules to build."""
GGUF_COUNTS = ("block_count", "expert_count", "head_count")
"""Endings of keys in GGUF files whose value is a number of modules to build."""
MAX_COUNT = 1 << 16
"""Maximum number of modules that a field of a configuration may state (COUNTS, GGUF_COUNTS). The largest known value is
the 21,841 labels of ImageNet-21k."""
MODULES_PER_TENSOR = 32
"""Number of modules of a network per tensor in its files above which it is refused. Llamas have 1.6. The highest ratios
are of networks in which each expert is a module and all experts are in one tensor."""
MIN_MODULES = 4096
"""Number of modules up to which MODULES_PER_TENSOR does not apply. Building this many takes less than a second."""
PARAMETERS_PER_ELEMENT = 2
"""Number of a network's parameters per number in its files above which it is refused. The ratio reaches 2 when the
files store embedding and output projection as one tensor and the network has both."""
MIN_PARAMETERS = 1 << 26
"""Number of a network's parameters up to which PARAMETERS_PER_ELEMENT does not apply: 256 MiB in float32."""
COMPLEX = ("C64", "C128")
"""Names, in safetensors, of the dtypes of complex numbers. Files with these are refused."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Header of one tensor in a file of weights."""

    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype as in safetensors; for GGUF the number of llama.cpp's tensor type, as text."""
    path: Path
    """Path of the file of weights that contains the tensor."""

    @property
    def num_elements(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)


def read_headers(model: str) -> dict[str, TensorHeader]:
    """Return the headers of all weights of a folder, GGUF file or hub id by tensor name; empty if there are no weights.

    Raises ConfigError for a damaged file, for an index that does not agree with the files, and for complex weights, of
    which torch would keep only the real part.
    """
    headers = {}
    gguf = gguf_path(model)
    if gguf is not None:
        for name, tensor in read_header(gguf).tensors.items():
            headers[name] = TensorHeader(tensor.shape, str(tensor.type_id), gguf)
        return headers
    for path in weight_paths(model):
        headers.update(read_safe(path, partial(_parse_headers, path)))
    for name, header in headers.items():
        if header.dtype in COMPLEX:
            raise ConfigError(
                f"{bound_text(name)} in {header.path} is complex ({header.dtype}), and weights are real numbers; save "
                "the model again in float32 or bfloat16",
                param="model",
            )
    return headers


def weight_paths(model: str) -> list[Path]:
    """Return the paths of the safetensors files with the weights, sorted by name; empty if there are none.

    Raises ConfigError for an index that does not agree with the files.
    """
    mapped = weight_map(model)
    if mapped is not None:
        return sorted(set(mapped.values()))
    for name in SAFETENSORS_FILES:
        path = model_file(model, name)
        if path is not None:
            return [path]
    return []


def _parse_headers(path: Path, file: Any) -> dict[str, TensorHeader]:
    headers = {}
    for name in file.keys():  # noqa: SIM118 (the file is no mapping)
        view = file.get_slice(name)
        headers[name] = TensorHeader(tuple(view.get_shape()), view.get_dtype(), path)
    return headers


def read_safe(path: Path, read: Callable[[Any], T]) -> T:
    """Open a safetensors file, call `read` with the open file and return the result. Raises ConfigError for a damaged
    file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return read(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {first_line(error)}; {AGAIN}", param="model") from error


def check_counts(config: Mapping[str, Any], shown: str) -> None:
    """Raise ConfigError if a number of modules anywhere in a configuration is above MAX_COUNT.

    Call it before transformers reads the file: its classes build as many labels and layer types as the file states.
    config: content of config.json, or the values of a GGUF file. shown: the file's name in the message.
    """
    pending: list[tuple[str, Any]] = [("", config)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(name, element) for element in value]
        elif isinstance(value, int) and value > MAX_COUNT and name.endswith((*COUNTS, *GGUF_COUNTS)):
            raise ConfigError(
                f"{bound_text(name)} in {shown} is {value}, and more than {MAX_COUNT} are never built; correct it",
                param="model",
            )


@contextmanager
def bounded_build(shown: str, num_tensors: int) -> Iterator[None]:
    """Context manager in which networks are built on the meta device, with a limit on the number of their modules.

    shown: the configuration's name in the message. num_tensors: number of tensors in the files. Raises ConfigError when
    the number of modules exceeds both MIN_MODULES and MODULES_PER_TENSOR times `num_tensors`.
    """
    limit = max(MIN_MODULES, MODULES_PER_TENSOR * num_tensors)
    num_built = 0

    def count(_parent: nn.Module, _name: str, _child: nn.Module | None) -> None:
        nonlocal num_built
        num_built += 1
        if num_built > limit:
            raise ConfigError(
                f"{shown} describes a network of more than {limit} modules, and its weights are {num_tensors} tensors; "
                "correct it or get the files again",
                param="model",
            )

    hook = register_module_module_registration_hook(count)
    try:
        with torch.device("meta"):
            yield
    finally:
        hook.remove()


def check_sizes(model: str, network: nn.Module, headers: Mapping[str, TensorHeader], *, is_quantised: bool) -> None:
    """Raise ConfigError if a tensor of the network has another shape than in the files, or if the network has more
    parameters than both MIN_PARAMETERS and PARAMETERS_PER_ELEMENT times the number of elements in the files.

    network: on the meta device. headers: headers of the tensors in the files, by name. is_quantised: whether the files
    have quantised tensors. Shapes are then not compared, and a larger network is allowed.
    """
    parameters_per_element = PARAMETERS_PER_ELEMENT
    if is_quantised:
        parameters_per_element = 64  # an element of dtype I64 may hold 64 weights of one bit
    else:
        _check_shapes(model, network, headers)
    num_built = sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers()))
    num_stored = sum(header.num_elements for header in headers.values())
    if num_built > max(MIN_PARAMETERS, parameters_per_element * num_stored):
        raise ConfigError(
            f"{config_name(model)} describes a network of {num_built} numbers, and its weights are {num_stored}; "
            "correct it or get the files again",
            param="model",
        )


def _check_shapes(model: str, network: nn.Module, headers: Mapping[str, TensorHeader]) -> None:
    for name, tensor in network.state_dict(keep_vars=True).items():
        header = headers.get(name)
        if header is not None and header.shape != tuple(tensor.shape):
            raise ConfigError(
                f"{name} is {list(header.shape)} in {header.path}, and by {config_name(model)} must be "
                f"{list(tensor.shape)}; correct it or get the file again",
                param="model",
            )
