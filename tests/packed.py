"""Write quantised checkpoints by their formats' documentation: numbers, scales, and what they stand for.

Written apart from the readers: each packs one number after another, by shifts.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.engine.quantization.packed_layouts import FP4

Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors by the ends of their names, and the weight that they stand for."""


def words_along_rows(numbers: Tensor, bits: int) -> Tensor:
    """Return unsigned numbers [R, C] in words of 32 bits [R, C * bits / 32], the first in the lowest bits."""
    per_word = 32 // bits
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // per_word, dtype=torch.int64)
    for index in range(numbers.shape[1]):
        words[:, index // per_word] |= numbers[:, index].long() << (bits * (index % per_word))
    return words.to(torch.int32)


def groups_of(weight: Tensor, size: int) -> Tensor:
    return weight.reshape(weight.shape[0], -1, size)  # [N, groups, size]


def fp8_blocks(weight: Tensor, block: int = 24) -> Packed:
    """Blocks that do not divide the weight, as DeepSeek's projections of 576 rows."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // block), -(-columns // block))
    numbers, exact = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            place = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
            scale[row, column] = weight[place].abs().max() / 448
            numbers[place] = (weight[place] / scale[row, column]).to(torch.float8_e4m3fn)
            exact[place] = numbers[place].float() * scale[row, column]
    return {"weight": numbers, "weight_scale_inv": scale}, exact


def fp8_channels(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale, "input_scale": torch.ones(1)}, numbers.float() * scale


def fp8_tensor(weight: Tensor) -> Packed:
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def int8_channels(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scale).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def int4_groups(weight: Tensor) -> Packed:
    """compressed-tensors, asymmetric, groups of 16."""
    grouped = groups_of(weight, 16)
    low, high = grouped.amin(-1), grouped.amax(-1)  # [N, groups]
    scale = (high - low) / 15
    zero_point = (-8 - low / scale).round().clamp(-8, 7)
    numbers = (grouped / scale[..., None] + zero_point[..., None]).round().clamp(-8, 7)
    exact = ((numbers - zero_point[..., None]) * scale[..., None]).flatten(1)
    tensors = {
        "weight_packed": words_along_rows(numbers.flatten(1) + 8, 4),
        "weight_scale": scale,
        "weight_zero_point": words_along_rows(zero_point.t() + 8, 4).t().contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, exact


def _fp4(scaled: Tensor) -> Tensor:
    """Return the index of the nearest number of FP4."""
    return (scaled[..., None] - torch.tensor(FP4)).abs().argmin(-1)


def nvfp4(weight: Tensor, divides: bool) -> Packed:
    grouped = groups_of(weight, 16)
    overall = weight.abs().max() / (6 * 448)
    scale = (grouped.abs().amax(-1) / 6 / overall).to(torch.float8_e4m3fn)  # [N, groups]
    whole = scale.float() * overall
    places = _fp4(grouped / whole[..., None])
    exact = (torch.tensor(FP4)[places] * whole[..., None]).flatten(1)
    places = places.flatten(1)
    packed = (places[:, 0::2] | places[:, 1::2] << 4).to(torch.uint8)
    if divides:
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": 1 / overall[None]}, exact
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": overall}, exact


def gptq(weight: Tensor, bits: int = 4) -> Packed:
    """Groups of 16 columns, dealt out in turn as with desc_act."""
    num_groups, top = weight.shape[1] // 16, (1 << bits) - 1
    group = torch.arange(weight.shape[1]) % num_groups
    scale, zero_point = torch.empty(num_groups, weight.shape[0]), torch.empty(num_groups, weight.shape[0])
    numbers, exact = torch.empty_like(weight), torch.empty_like(weight)
    for index in range(num_groups):
        part = weight[:, group == index]
        scale[index] = (part.amax(1) - part.amin(1)) / top
        zero_point[index] = (-part.amin(1) / scale[index]).round().clamp(1, top)
        levels = (part / scale[index][:, None] + zero_point[index][:, None]).round().clamp(0, top)
        numbers[:, group == index] = levels
        exact[:, group == index] = (levels - zero_point[index][:, None]) * scale[index][:, None]
    tensors = {
        "qweight": words_along_rows(numbers, bits).t().contiguous(),
        "qzeros": words_along_rows(zero_point - 1, bits),
        "scales": scale,
        "g_idx": group.to(torch.int32),
    }
    return tensors, exact


def awq(weight: Tensor) -> Packed:
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each place in a word
    grouped = groups_of(weight, 16)
    scale = (grouped.amax(-1) - grouped.amin(-1)) / 15
    zero_point = (-grouped.amin(-1) / scale).round().clamp(0, 15)
    numbers = (grouped / scale[..., None] + zero_point[..., None]).round().clamp(0, 15)
    exact = ((numbers - zero_point[..., None]) * scale[..., None]).flatten(1)

    def in_words(columns: Tensor) -> Tensor:
        return words_along_rows(columns.unflatten(1, (-1, 8))[:, :, list(order)].flatten(1), 4)

    tensors = {
        "qweight": in_words(numbers.flatten(1).t().contiguous()),
        "qzeros": in_words(zero_point.t().contiguous()),
        "scales": scale.t().contiguous(),
    }
    return tensors, exact


def nf4(weight: Tensor) -> Packed:
    """bitsandbytes, blocks of 64 with whole scales; the table is made up, as each file brings its own."""
    table = torch.linspace(-1, 1, 16)
    blocks = weight.reshape(-1, 64)
    scale = blocks.abs().amax(1)
    places = ((blocks / scale[:, None])[..., None] - table).abs().argmin(-1)
    exact = (table[places] * scale[:, None]).reshape(weight.shape)
    places = places.flatten()
    state = {"blocksize": 64, "shape": list(weight.shape), "dtype": "float32", "quant_type": "nf4"}
    tensors = {
        "weight": (places[0::2] << 4 | places[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": scale,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return tensors, exact


def bnb8(weight: Tensor) -> Packed:
    largest = weight.abs().amax(1)
    numbers = (weight / largest[:, None] * 127).round().to(torch.int8)
    return {"weight": numbers, "SCB": largest}, numbers.float() * largest[:, None] / 127


FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [24, 24]}, fp8_blocks),
    "fp8 channels": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, fp8_channels),
    "fp8 tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor),
    "int8": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, int8_channels),
    "int4": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, int4_groups),
    "nvfp4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        lambda weight: nvfp4(weight, divides=True),
    ),
    "nvfp4 modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda weight: nvfp4(weight, divides=False),
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq 8": ({"quant_method": "gptq", "bits": 8}, lambda weight: gptq(weight, 8)),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
    "bnb8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8),
}
"""What config.json says, and the writer of one weight."""


def pack_folder(folder: Path, name: str) -> dict[str, Tensor]:
    """Quantise the projections of a model's folder in place; return all weights as they are unpacked."""
    declared, pack = FORMATS[name]
    weights = load_file(folder / "model.safetensors")
    stored, whole = dict(weights), dict(weights)
    for each in [each for each in weights if each.endswith("_proj.weight")]:
        tensors, exact = pack(weights[each])
        del stored[each]
        stem = each.removesuffix("weight")
        stored |= {f"{stem}{end}": tensor for end, tensor in tensors.items()}
        whole[each] = exact
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    return whole
