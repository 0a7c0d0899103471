"""Find the weights of a quantised checkpoint by the names of its tensors. Called by `unpack`.

Layouts are recognised by tensor names, not by the configuration's lists of modules. So the same code reads the text
part of a multimodal model, and layers that are not quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from outrider.engine.files.weight_headers import TensorHeader
from outrider.engine.quantization import packed_layouts as layouts
from outrider.wire.errors import ConfigError
from outrider.wire.peer_text import bound_text

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
"""Endings of names of tensors for quantised activations, keys and values. They are not used: activations, keys and
values stay in the model's dtype."""
FLOAT8 = ("F8_E4M3", "F8_E5M2")
"""Dtypes of FP8, as safetensors names them."""
BYTES = (*FLOAT8, "I8", "U8")
"""Dtypes of one byte that hold quantised numbers, as safetensors names them. A tensor of such a dtype is refused if it
has no scale, without which its numbers are not the weights."""
NV_GROUP = 16
"""Number of consecutive columns of a weight that share a scale in NVFP4."""
MX_GROUP = 32
"""Number of consecutive columns of a weight that share a scale in MXFP4."""

Headers = Mapping[str, TensorHeader]
"""Header (shape, dtype and file) of each tensor of a checkpoint, by tensor name."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight of the network that is computed from several tensors of a checkpoint."""

    name: str
    """Name of the weight in the network."""
    shape: tuple[int, ...] | None
    """Shape of the unpacked weight; None if it does not follow from the headers."""
    parts: dict[str, str]
    """Names of the checkpoint's tensors from which the weight is computed, by role in the layout, such as "scale"."""
    unpack: Callable[[Mapping[str, Tensor]], Tensor]
    """Function that computes the weight, as float32, from the tensors that `parts` names, given by their roles."""


def find_packed(model: str, headers: Headers, quantization: Mapping[str, Any]) -> dict[str, PackedWeight | None]:
    """Return, for each weight by its name in the network, from which tensors of the checkpoint it is computed and how.
    None = the checkpoint has the weight as a plain tensor of this name.

    model: folder or hub id, for messages. headers: headers of the checkpoint's tensors. quantization: the
    `quantization_config`. Raises ConfigError for a layout that cannot be unpacked here.
    """
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
        except _UnknownLayout as error:
            raise _layout_error(model, name, error) from None
        if weight is not None:
            found[weight.name] = weight
            used.update(weight.parts.values())
    for name in headers:
        if name in used or name.endswith(NO_WEIGHTS):
            continue
        if headers[name].dtype in BYTES:  # its numbers would be taken for weights
            raise _layout_error(model, name, f"stored as {headers[name].dtype} without a scale beside it")
        found[name] = None
    return found


def _layout_error(model: str, name: str, layout: object) -> ConfigError:
    return ConfigError(
        f"{bound_text(name)} of {model} is {layout}, which cannot be unpacked here; use a checkpoint that is not "
        "quantised",
        param="model",
    )


class _UnknownLayout(Exception):
    """A layout that is not read here; the message names it."""


def _packed_weight(method: str, name: str, headers: Headers, quantization: Mapping[str, Any]) -> PackedWeight | None:
    # The weight whose numbers are in the tensor `name`; None for tensors of scales and the like.
    match method:
        case "gptq" | "awq":
            return _gptq_or_awq(method, name, headers, quantization)
        case "mxfp4":
            return _gpt_oss_experts(name, headers)
        case "bitsandbytes":
            return _bits_and_bytes(name, headers)
        case _:
            return _scaled(name, headers, quantization)


def _present(headers: Headers, **roles: str) -> dict[str, str]:
    return {role: name for role, name in roles.items() if name in headers}


def _scaled(name: str, headers: Headers, quantization: Mapping[str, Any]) -> PackedWeight | None:
    # FP8 of all kinds, compressed-tensors and modelopt: numbers [.., N, K] with scales in other tensors.
    header = headers[name]
    if name.endswith("_packed"):
        return _compressed(name, name.removesuffix("_packed"), headers)
    parts = _present(headers, weight=name, scale=f"{name}_scale_inv", zero_point=f"{name}_zero_point")
    parts |= _present(headers, scale=f"{name}_scale", factor=f"{name}_scale_2")
    if "scale" not in parts:
        return None
    if header.dtype == "U8":  # modelopt's NVFP4
        if "factor" not in parts:
            raise _UnknownLayout("NVFP4 without a scale for all of it")
        parts["packed"] = parts.pop("weight")
        return PackedWeight(name, _fp4_shape(header), parts, partial(layouts.fp4, group=NV_GROUP))
    if header.dtype not in (*FLOAT8, "I8"):
        raise _UnknownLayout(f"stored as {header.dtype} with a scale")
    return PackedWeight(name, header.shape, parts, partial(layouts.scaled, block=_block_of(quantization)))


def _block_of(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    # (rows, columns) of a block with one scale; None where scales are for rows or for all numbers.
    blocks = [quantization.get("weight_block_size")]
    for group in (quantization.get("config_groups") or {}).values():
        blocks.append((group.get("weights") or {}).get("block_structure"))
    for block in blocks:
        if isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block):
            return block[0], block[1]
    return None


def _compressed(name: str, weight: str, headers: Headers) -> PackedWeight:
    # compressed-tensors: FP4 in bytes, or integers in words.
    header = headers[name]
    parts = _present(headers, packed=name, scale=f"{weight}_scale", zero_point=f"{weight}_zero_point")
    if "scale" not in parts:
        raise _UnknownLayout("packed without a scale beside it")
    if header.dtype == "U8":
        num_groups = headers[parts["scale"]].shape[-1]
        group = 2 * header.shape[-1] // max(num_groups, 1)
        if group not in (NV_GROUP, MX_GROUP) or "zero_point" in parts:
            raise _UnknownLayout(f"FP4 with a scale for {group} columns")
        parts |= _present(headers, divisor=f"{weight}_global_scale")
        if group == NV_GROUP and "divisor" not in parts:
            raise _UnknownLayout("NVFP4 without a scale for all of it")
        return PackedWeight(weight, _fp4_shape(header), parts, partial(layouts.fp4, group=group))
    parts |= _present(headers, shape=f"{weight}_shape", g_idx=f"{weight}_g_idx")
    if header.dtype != "I32" or "shape" not in parts:
        raise _UnknownLayout(f"packed as {header.dtype}")
    return PackedWeight(weight, None, parts, layouts.packed_integers)


def _gptq_or_awq(method: str, name: str, headers: Headers, quantization: Mapping[str, Any]) -> PackedWeight | None:
    if not name.endswith(".qweight"):
        return None
    stem = name.removesuffix(".qweight")
    roles = {role: f"{stem}.{role}" for role in ("qweight", "qzeros", "scales", "g_idx")}
    parts = _present(headers, **roles)
    if "qzeros" not in parts or "scales" not in parts:
        raise _UnknownLayout(f"{method} without qzeros and scales beside it")
    words = headers[name].shape
    scales = headers[parts["scales"]].shape
    if len(words) != 2 or len(scales) != 2:
        raise _UnknownLayout(f"{method} of words {list(words)} with scales {list(scales)}")
    if headers[name].dtype != "I32":
        raise _UnknownLayout(f"{method} in words of {headers[name].dtype}")
    num_words = words[0]
    num_columns = scales[1]
    bits = quantization.get("bits", quantization.get("w_bit", 4))
    if method == "awq":
        version = quantization.get("version")
        if bits != 4 or str(version or "gemm").lower() != "gemm":
            raise _UnknownLayout(f"AWQ of {bits} bits, version {version}")
        return PackedWeight(f"{stem}.weight", (num_columns, num_words), parts, layouts.awq)
    if bits not in (2, 3, 4, 8):
        raise _UnknownLayout(f"GPTQ of {bits} bits")
    first_zero = _first_zero_of_gptq(quantization.get("checkpoint_format"))
    unpack = partial(layouts.gptq, bits=bits, first_zero=first_zero)
    return PackedWeight(f"{stem}.weight", (num_columns, num_words * 32 // bits), parts, unpack)


def _first_zero_of_gptq(version: Any) -> int:
    if version in (None, "gptq"):
        return 1
    if version == "gptq_v2":
        return 0
    raise _UnknownLayout(f"GPTQ of the format {version}")


def _gpt_oss_experts(name: str, headers: Headers) -> PackedWeight | None:
    if not name.endswith("_blocks"):
        return None
    stem = name.removesuffix("_blocks")
    shape = headers[name].shape
    parts = _present(headers, packed=name, scale=f"{stem}_scales")
    if "scale" not in parts or len(shape) != 4:
        raise _UnknownLayout("MXFP4 of another layout than gpt-oss's")
    num_experts, num_outputs, num_blocks, block_bytes = shape
    return PackedWeight(stem, (num_experts, 2 * num_blocks * block_bytes, num_outputs), parts, layouts.fp4_blocks)


def _bits_and_bytes(name: str, headers: Headers) -> PackedWeight | None:
    if not name.endswith(".weight"):
        return None
    for kind in ("nf4", "fp4"):
        state = f"{name}.quant_state.bitsandbytes__{kind}"
        if state in headers:
            parts = _present(
                headers,
                weight=name,
                state=state,
                absmax=f"{name}.absmax",
                map=f"{name}.quant_map",
                nested_absmax=f"{name}.nested_absmax",
                nested_map=f"{name}.nested_quant_map",
            )
            return PackedWeight(name, None, parts, layouts.bits_and_bytes4)
    parts = _present(headers, weight=name, scale=f"{name.removesuffix('weight')}SCB")
    if "scale" not in parts:
        return None
    return PackedWeight(name, headers[name].shape, parts, layouts.bits_and_bytes8)


def _fp4_shape(header: TensorHeader) -> tuple[int, ...]:
    # A byte has two numbers.
    return (*header.shape[:-1], 2 * header.shape[-1])
