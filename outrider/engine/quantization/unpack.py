"""Unpack a quantised checkpoint as it is read, where the device has no kernels for it. Used by the loader.

Each layout is recognised by the names of its tensors, not by lists of modules in the configuration: the same code reads
a wrapper's text part, and layers that were left as they are. Nothing is read before transformers asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from outrider.engine.files.weight_headers import TensorHeader, read_headers
from outrider.engine.quantization import packed_layouts as layouts
from outrider.wire.errors import ConfigError
from outrider.wire.peer_text import bound_text

METHODS = ("fp8", "mxfp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "mxfp4", "gptq", "awq", "bitsandbytes")
"""Whose layouts are known here, as `quant_method` has them."""
NO_WEIGHTS = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".activation_scale_inv",
    ".input_scale_ub",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".weight_format",
)
"""Ends of names of what is for activations and keys, which stay in the model's dtype."""
FLOAT8 = ("F8_E4M3", "F8_E5M2")
BYTES = (*FLOAT8, "I8", "U8")
"""Numbers that are no weights by themselves."""
NV_GROUP, MX_GROUP = 16, 32
"""Columns of a scale in NVFP4 and MXFP4."""

Headers = Mapping[str, TensorHeader]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight that is made of several tensors of a checkpoint."""

    name: str
    """In the network."""
    shape: tuple[int, ...] | None
    """None where the checkpoint's headers do not tell it."""
    parts: dict[str, str]
    """Names of the tensors by their roles in the layout."""
    unpack: Callable[[Mapping[str, Tensor]], Tensor]
    """From the parts to the weight, float32."""


class PackedCheckpoint:
    """A quantised checkpoint whose weights are unpacked as they are read."""

    def __init__(self, model: str, headers: Headers, weights: dict[str, PackedWeight | None]) -> None:
        self._model, self._headers = model, headers
        self._weights = weights

    @classmethod
    def read(cls, model: str, quantization: Any) -> PackedCheckpoint:
        """Find the weights of a folder or hub id by the headers of its files.

        quantization: as config.json has it, or as transformers reads it. Raises ConfigError for a layout that is not
        known here.
        """
        stated = quantization if isinstance(quantization, dict) else quantization.to_dict()
        headers = read_headers(model)
        return cls(model, headers, _find_packed(model, headers, stated))

    @property
    def names(self) -> frozenset[str]:
        """Names of the weights when they are unpacked."""
        return frozenset(self._weights)

    def check_shapes(self, network: nn.Module) -> None:
        """Raise ConfigError for a weight that would be of another shape than the network's. network: on the meta
        device.
        """
        tensors = network.state_dict(keep_vars=True)
        for name, weight in self._weights.items():
            shape = self._headers[name].shape if weight is None else weight.shape
            if name in tensors and shape is not None and shape != tuple(tensors[name].shape):
                raise ConfigError(
                    f"{bound_text(name)} of {self._model} is {list(shape)} when unpacked, and by its config.json must "
                    f"be {list(tensors[name].shape)}; correct it or get the files again",
                    param="model",
                )

    def state(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return what `from_pretrained` takes as a state: every tensor by its name, none of them read yet."""
        files = OpenFiles(self._headers)
        return {
            name: files.slice(name) if weight is None else UnpackedTensor(weight, files, dtype)
            for name, weight in self._weights.items()
        }


def _find_packed(model: str, headers: Headers, quantization: Mapping[str, Any]) -> dict[str, PackedWeight | None]:
    """Return the weights of a checkpoint by their names in the network; None for one that is stored as it is."""
    if quantization.get("transform_config"):
        raise ConfigError(
            f"the weights of {model} are rotated (transform_config), which is not undone here; use a checkpoint that "
            "is not quantised",
            param="model",
        )
    method = quantization["quant_method"]
    found: dict[str, PackedWeight | None] = {}
    used: set[str] = set()
    for name in headers:
        try:
            weight = _packed_weight(str(method), name, headers, quantization)
        except _Unknown as error:
            raise _not_unpacked(model, name, error) from None
        if weight is not None:
            found[weight.name] = weight
            used.update(weight.parts.values())
    others = [name for name in headers if name not in used and not name.endswith(NO_WEIGHTS)]
    for name in others:
        if headers[name].dtype in BYTES:  # it would be read as if its numbers were weights
            raise _not_unpacked(model, name, f"stored as {headers[name].dtype} without a scale beside it")
    return found | dict.fromkeys(others)


def _not_unpacked(model: str, name: str, what: object) -> ConfigError:
    return ConfigError(
        f"{bound_text(name)} of {model} is {what}, which cannot be unpacked here; use a checkpoint that is not "
        "quantised",
        param="model",
    )


class _Unknown(Exception):
    """A layout without a reader; the message names it."""


def _packed_weight(method: str, name: str, headers: Headers, quantization: Mapping[str, Any]) -> PackedWeight | None:
    """Return the weight whose numbers are in a tensor, None for any other tensor."""
    match method:
        case "gptq" | "awq":
            return _in_columns(method, name, headers, quantization) if name.endswith(".qweight") else None
        case "mxfp4":
            return _gpt_oss_experts(name, headers) if name.endswith("_blocks") else None
        case "bitsandbytes":
            return _bits_and_bytes(name, headers)
        case _:
            return _by_rows(name, headers, quantization)


def _present(headers: Headers, **roles: str) -> dict[str, str]:
    return {role: name for role, name in roles.items() if name in headers}


def _by_rows(name: str, headers: Headers, quantization: Mapping[str, Any]) -> PackedWeight | None:
    """Read FP8 of all kinds, compressed-tensors and modelopt: numbers [.., N, K] with scales beside them."""
    header = headers[name]
    if name.endswith("_packed"):
        return _compressed(name, name.removesuffix("_packed"), headers)
    parts = _present(headers, weight=name, scale=f"{name}_scale_inv", zero_point=f"{name}_zero_point")
    parts |= _present(headers, scale=f"{name}_scale", factor=f"{name}_scale_2")
    if "scale" not in parts:
        return None
    if header.dtype == "U8":  # modelopt's NVFP4
        if "factor" not in parts:
            raise _Unknown("NVFP4 without a scale for all of it")
        parts["packed"] = parts.pop("weight")
        return PackedWeight(name, _doubled(header), parts, partial(layouts.fp4, group=NV_GROUP))
    if header.dtype not in (*FLOAT8, "I8"):
        raise _Unknown(f"stored as {header.dtype} with a scale")
    return PackedWeight(name, header.shape, parts, partial(layouts.scaled, block=_block_of(quantization)))


def _block_of(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of a block of one scale, None where scales are for rows or for all."""
    blocks = [quantization.get("weight_block_size")]
    for group in (quantization.get("config_groups") or {}).values():
        blocks.append((group.get("weights") or {}).get("block_structure"))
    for block in blocks:
        if isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block):
            return block[0], block[1]
    return None


def _compressed(name: str, weight: str, headers: Headers) -> PackedWeight:
    header = headers[name]
    parts = _present(headers, packed=name, scale=f"{weight}_scale", zero_point=f"{weight}_zero_point")
    if "scale" not in parts:
        raise _Unknown("packed without a scale beside it")
    if header.dtype == "U8":
        groups = headers[parts["scale"]].shape[-1]
        group = 2 * header.shape[-1] // max(groups, 1)
        if group not in (NV_GROUP, MX_GROUP) or "zero_point" in parts:
            raise _Unknown(f"FP4 with a scale for {group} columns")
        parts |= _present(headers, divisor=f"{weight}_global_scale")
        if group == NV_GROUP and "divisor" not in parts:
            raise _Unknown("NVFP4 without a scale for all of it")
        return PackedWeight(weight, _doubled(header), parts, partial(layouts.fp4, group=group))
    parts |= _present(headers, shape=f"{weight}_shape", g_idx=f"{weight}_g_idx")
    if header.dtype != "I32" or "shape" not in parts:
        raise _Unknown(f"packed as {header.dtype}")
    return PackedWeight(weight, None, parts, layouts.packed_integers)


def _in_columns(method: str, name: str, headers: Headers, quantization: Mapping[str, Any]) -> PackedWeight:
    """Read GPTQ and AWQ: words [.., ..] of a weight [K, N]."""
    stem, bits = name.removesuffix(".qweight"), quantization.get("bits", quantization.get("w_bit", 4))
    roles = {role: f"{stem}.{role}" for role in ("qweight", "qzeros", "scales", "g_idx")}
    parts = _present(headers, **roles)
    if "qzeros" not in parts or "scales" not in parts:
        raise _Unknown(f"{method} without qzeros and scales beside it")
    words, scales = headers[name].shape, headers[parts["scales"]].shape
    if len(words) != 2 or len(scales) != 2:
        raise _Unknown(f"{method} of words {list(words)} with scales {list(scales)}")
    num_words, num_columns = words[0], scales[1]
    form = quantization.get("version" if method == "awq" else "checkpoint_format")
    if headers[name].dtype != "I32":
        raise _Unknown(f"{method} in words of {headers[name].dtype}")
    if method == "awq":
        if bits != 4 or str(form or "gemm").lower() != "gemm":
            raise _Unknown(f"AWQ of {bits} bits, version {form}")
        return PackedWeight(f"{stem}.weight", (num_columns, num_words), parts, layouts.awq)
    if bits not in (2, 3, 4, 8):
        raise _Unknown(f"GPTQ of {bits} bits")
    if form not in (None, "gptq", "gptq_v2"):
        raise _Unknown(f"GPTQ of the format {form}")
    first_zero = 0 if form == "gptq_v2" else 1
    unpack = partial(layouts.gptq, bits=bits, first_zero=first_zero)
    return PackedWeight(f"{stem}.weight", (num_columns, num_words * 32 // bits), parts, unpack)


def _gpt_oss_experts(name: str, headers: Headers) -> PackedWeight:
    stem, shape = name.removesuffix("_blocks"), headers[name].shape
    parts = _present(headers, packed=name, scale=f"{stem}_scales")
    if "scale" not in parts or len(shape) != 4:
        raise _Unknown("MXFP4 of another layout than gpt-oss's")
    num_experts, num_outputs, num_blocks, block_bytes = shape
    return PackedWeight(stem, (num_experts, 2 * num_blocks * block_bytes, num_outputs), parts, layouts.fp4_blocks)


def _bits_and_bytes(name: str, headers: Headers) -> PackedWeight | None:
    if not name.endswith(".weight"):
        return None
    for kind in ("nf4", "fp4"):
        state = f"{name}.quant_state.bitsandbytes__{kind}"
        if state in headers:
            nested = {"nested_absmax": f"{name}.nested_absmax", "nested_map": f"{name}.nested_quant_map"}
            parts = _present(
                headers, weight=name, state=state, absmax=f"{name}.absmax", map=f"{name}.quant_map", **nested
            )
            return PackedWeight(name, None, parts, layouts.bits_and_bytes4)
    parts = _present(headers, weight=name, scale=f"{name.removesuffix('weight')}SCB")
    if "scale" not in parts:
        return None
    return PackedWeight(name, headers[name].shape, parts, layouts.bits_and_bytes8)


def _doubled(header: TensorHeader) -> tuple[int, ...]:
    return (*header.shape[:-1], 2 * header.shape[-1])


class UnpackedTensor:
    """A weight that is unpacked when transformers takes it, by `[...]` as from a safetensors file."""

    def __init__(self, weight: PackedWeight, files: OpenFiles, dtype: torch.dtype) -> None:
        self._weight = weight
        self._files = files
        self._dtype = dtype

    def __getitem__(self, _: object) -> Tensor:
        weight = self._weight
        try:
            return weight.unpack({role: self._files.read(name) for role, name in weight.parts.items()}).to(self._dtype)
        except (ArithmeticError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            why = bound_text(" ".join(str(error).split()))
            raise ConfigError(
                f"{bound_text(weight.name)} cannot be unpacked from {', '.join(sorted(weight.parts))}: {why}; get the "
                "files again",
                param="model",
            ) from error


class OpenFiles:
    """The safetensors files of a checkpoint, each opened once."""

    def __init__(self, headers: Headers) -> None:
        self._headers = headers
        self._open: dict[Path, Any] = {}

    def _file(self, name: str) -> Any:
        path = self._headers[name].path
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def slice(self, name: str) -> Any:
        """Return a tensor that is read when it is indexed."""
        return self._file(name).get_slice(name)

    def read(self, name: str) -> Tensor:
        found: Tensor = self._file(name).get_tensor(name)
        return found
