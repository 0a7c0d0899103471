"""Compare what config.json says with the headers of the safetensors files, before a network of that size is built.

Both come from whoever made the folder. Weights take room on a disk, and numbers in a configuration take none: so what a
build takes may not be much more than what the files hold. Called by the loader, by `outrider doctor` and by the heads'.
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
from outrider.wire.models.model_id import SAFE
from outrider.wire.peer_text import bound_text

T = TypeVar("T")

AGAIN = "get the file again (where it is a pointer of Git LFS: git lfs pull)"
COUNTS = ("layer", "layers", "expert", "experts", "head", "heads", "labels", "blocks", "stages", "attention_types")
GGUF_COUNTS = ("block_count", "expert_count", "head_count")
"""Ends of names in config.json, and in GGUF files, whose numbers say how often something is built."""
MAX_COUNT = 1 << 16
"""Of one of these: an order of magnitude above the labels of ImageNet-21k, the largest that is published."""
MODULES_PER_TENSOR = 32
"""Modules of a network to a tensor of its files. Llamas have 1.6; those whose experts are modules of their own and one
tensor in the file, the most."""
MIN_MODULES = 4096
"""Modules that may always be built, in a second at most."""
PARAMETERS_PER_ELEMENT = 2
"""Numbers of a network to a number in its files: 2 where embedding and head are one tensor there."""
MIN_PARAMETERS = 1 << 26
"""Numbers that may always be built: 256 MiB in float32."""
COMPLEX = ("C64", "C128")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor of a safetensors file as its header has it."""

    shape: tuple[int, ...]
    dtype: str
    path: Path

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def read_headers(model: str) -> dict[str, TensorHeader]:
    """Return the headers of all weights of a folder, GGUF file or hub id; empty where there are none.

    Raises ConfigError for a damaged file, a wrong index, and for complex numbers, of which torch would take the real
    part.
    """
    headers = {}
    gguf = gguf_path(model)
    if gguf is not None:
        return {
            name: TensorHeader(each.shape, str(each.type_id), gguf) for name, each in read_header(gguf).tensors.items()
        }
    for path in weight_paths(model):
        headers.update(read_safe(path, partial(_headers_of, path)))
    for name, header in headers.items():
        if header.dtype in COMPLEX:
            raise ConfigError(
                f"{bound_text(name)} in {header.path} is complex ({header.dtype}), and weights are real numbers; save "
                "the model again in float32 or bfloat16",
                param="model",
            )
    return headers


def weight_paths(model: str) -> list[Path]:
    """Return the safetensors files with the weights, in order. Raises ConfigError for a wrong index."""
    mapped = weight_map(model)
    if mapped is not None:
        return sorted(set(mapped.values()))
    for name in SAFE:
        path = model_file(model, name)
        if path is not None:
            return [path]
    return []


def _headers_of(path: Path, file: Any) -> dict[str, TensorHeader]:
    headers = {}
    for name in file.keys():  # noqa: SIM118 (the file is no mapping)
        view = file.get_slice(name)
        headers[name] = TensorHeader(tuple(view.get_shape()), view.get_dtype(), path)
    return headers


def read_safe(path: Path, read: Callable[[Any], T]) -> T:
    """Return what `read` takes from an open safetensors file. Raises ConfigError for a damaged one."""
    try:
        with safe_open(path, framework="pt") as file:
            return read(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {first_line(error)}; {AGAIN}", param="model") from error


def check_counts(config: Mapping[str, Any], shown: str) -> None:
    """Raise ConfigError for a count that nothing has, in config.json or in a GGUF file. shown: the file.

    Called before transformers reads the file, which makes as many labels and types of layers as it says.
    """
    pending: list[tuple[str, Any]] = [("", config)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(name, each) for each in value]
        elif isinstance(value, int) and value > MAX_COUNT and name.endswith((*COUNTS, *GGUF_COUNTS)):
            raise ConfigError(
                f"{bound_text(name)} in {shown} is {value}, and more than {MAX_COUNT} are never built; correct it",
                param="model",
            )


@contextmanager
def bounded_build(shown: str, num_tensors: int) -> Iterator[None]:
    """Build networks on the meta device, and raise ConfigError for one of far more modules than files have tensors.

    shown: whose configuration it is. num_tensors: in its files.
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
    """Raise ConfigError unless the files hold a network of these sizes, by its names and by its numbers.

    network: on the meta device. is_quantised: whether the files hold other tensors than the network, of at least a bit
    for a number.
    """
    for name, tensor in () if is_quantised else network.state_dict(keep_vars=True).items():
        header = headers.get(name)
        if header is not None and header.shape != tuple(tensor.shape):
            raise ConfigError(
                f"{name} is {list(header.shape)} in {header.path}, and by {config_name(model)} must be "
                f"{list(tensor.shape)}; correct it or get the file again",
                param="model",
            )
    num_built = sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers()))
    per_element = 64 if is_quantised else PARAMETERS_PER_ELEMENT  # an I64 holds 64 of a bit
    num_stored = sum(header.num_elements for header in headers.values())
    if num_built > max(MIN_PARAMETERS, per_element * num_stored):
        raise ConfigError(
            f"{config_name(model)} describes a network of {num_built} numbers, and its weights are {num_stored}; "
            "correct it or get the files again",
            param="model",
        )
