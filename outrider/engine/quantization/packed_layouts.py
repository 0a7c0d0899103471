"""Compute weights from the tensors of quantised checkpoints: one function for each layout. Chosen by `packed_weights`.

Each function takes a weight's tensors by their roles in the layout and returns the weight as float32, [N, K]: N output
and K input features. Experts that are stored together have one more dimension in front. A tensor of another shape than
that of the layout raises ValueError or an error of torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 16 values that a number of 4 bits may have: sign, two bits of exponent, one of mantissa (E2M1, OCP microscaling
formats)."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of the eight columns that AWQ stores in a word of 32 bits, the index of its 4 bits in the word (0 = the
lowest bits). AWQ stores the even columns first."""
Parts = Mapping[str, Tensor]
"""Tensors from which one weight is computed, by their roles in the layout, such as "scale" or "zero_point"."""


def scaled(parts: Parts, block: tuple[int, int] | None = None) -> Tensor:
    """Return the weight [..., rows, columns] float32 of FP8 or INT8 numbers: (number - zero point) * scale.

    A scale applies to all numbers, a row, a group of columns or a block. block: number of rows and columns of a block;
    the last blocks may be smaller. None = both follow from the scale's shape.
    """
    # numbers [4, 6], scale [2, 3]: blocks of 2 x 2
    numbers = parts["weight"].float()
    zero_point = parts.get("zero_point")
    if zero_point is not None:
        numbers = numbers - _spread(zero_point.float(), numbers.shape, block)
    return numbers * _spread(exponents(parts["scale"]), numbers.shape, block)


def exponents(scale: Tensor) -> Tensor:
    """Return the scales as float32. A uint8 scale is stored as an exponent of two plus 127 (E8M0): 128 stands for 2."""
    if scale.dtype is torch.uint8:
        return torch.exp2(scale.float() - 127)
    return scale.float()


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    # Scales that broadcast over [..., N, K].
    rows, columns = shape[-2:]
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.shape == shape[:-2]:  # one for each expert
        return scale[..., None, None]
    if scale.shape == shape[:-1]:
        scale = scale[..., None]  # [..., N, 1]
    if scale.dim() != len(shape):
        raise ValueError(f"scales of {list(scale.shape)} for numbers of {list(shape)}")
    height, width = block or (-(-rows // scale.shape[-2]), -(-columns // scale.shape[-1]))
    if scale.shape[-1] == 1:
        width = columns
    if scale.shape[-2:] != (-(-rows // height), -(-columns // width)):
        raise ValueError(f"scales of {list(scale.shape)} for numbers of {list(shape)} in blocks of {height} x {width}")
    spread = scale.repeat_interleave(min(height, rows), -2)[..., :rows, :]
    return spread.repeat_interleave(min(width, columns), -1)[..., :columns]


def packed_integers(parts: Parts) -> Tensor:
    """Return the weight [rows, columns] float32 of compressed-tensors' `pack-quantized` layout: integers in words of 32
    bits along the columns.

    The integers are stored with half of their range added. A scale and a zero point apply to a group of columns; if
    groups are not consecutive columns, `g_idx` has the group of each column.
    """
    rows, columns = (int(size) for size in parts["shape"])
    bits = parts["packed"].shape[1] * 32 // columns
    middle = 1 << (bits - 1)
    numbers = unpack_words(parts["packed"], bits, columns).float() - middle  # [N, K]
    scale = parts["scale"].float()  # [N, groups]
    zero_point = parts.get("zero_point")  # [N, groups], or in words
    groups = _groups_of(parts.get("g_idx"), columns, scale.shape[1])
    if zero_point is not None:
        if zero_point.dtype is torch.int32:
            zero_point = unpack_words(zero_point.t(), bits, rows).t() - middle  # [N, groups]
        numbers = numbers - zero_point.float()[:, groups]
    return numbers * scale[:, groups]


def gptq(parts: Parts, bits: int, first_zero: int) -> Tensor:
    """Return the weight [outputs, inputs] float32 of GPTQ's layout. It is stored transposed, as integers in words of 32
    bits along the inputs, with a zero point and a scale for each group of inputs.

    bits: width of an integer. first_zero: number that is added to stored zero points: 1, or 0 in the second version of
    the format.
    """
    scale = parts["scales"].float()  # [groups, N]
    num_columns = scale.shape[1]
    num_inputs = parts["qweight"].shape[0] * 32 // bits
    numbers = unpack_words(parts["qweight"].t(), bits, num_inputs).float()  # [N, K]
    zero_point = unpack_words(parts["qzeros"], bits, num_columns) + first_zero  # [groups, N]
    if first_zero:
        zero_point = zero_point & ((1 << bits) - 1)  # 1 more than the largest is 0
    _check_groups(zero_point, scale)
    groups = _groups_of(parts.get("g_idx"), num_inputs, scale.shape[0])
    return (numbers - zero_point.float().t()[:, groups]) * scale.t()[:, groups]


def awq(parts: Parts) -> Tensor:
    """Return the weight [outputs, inputs] float32 of AWQ's layout. It is stored transposed, as integers of 4 bits in
    words of 32 bits along the outputs, in the order AWQ_ORDER.
    """
    scale = parts["scales"].float()  # [groups, N]
    numbers = _unpack_awq(parts["qweight"], scale.shape[1])  # [K, N]
    zero_point = _unpack_awq(parts["qzeros"], scale.shape[1])  # [groups, N]
    _check_groups(zero_point, scale)
    groups = _groups_of(None, numbers.shape[0], scale.shape[0])
    return ((numbers - zero_point[groups]) * scale[groups]).t().contiguous()


def _unpack_awq(words: Tensor, num_columns: int) -> Tensor:
    unpacked = unpack_words(words, 4, num_columns)  # [R, num_columns]
    return unpacked.unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1).float()


def _check_groups(zero_point: Tensor, scale: Tensor) -> None:
    if zero_point.shape != scale.shape:
        raise ValueError(f"zero points of {list(zero_point.shape)} and scales of {list(scale.shape)}")


def _groups_of(stated: Tensor | None, num_columns: int, num_groups: int) -> Tensor:
    # The group of each column. 6 columns in 2 groups: [0, 0, 0, 1, 1, 1]. A stated -1 means that it is not used.
    if stated is not None and bool((stated >= 0).all()):
        return stated.long()
    return torch.arange(num_columns) // -(-num_columns // num_groups)


def fp4(parts: Parts, group: int) -> Tensor:
    """Return the weight [..., rows, columns] float32 of FP4. Two numbers are in a byte, the first in the lower half,
    with a scale for each `group` columns.

    A global scale divides the scales (part `divisor`, of compressed-tensors) or multiplies them (part `factor`, of
    modelopt).
    """
    numbers = fp4_numbers(parts["packed"])  # [..., N, K]
    scale = exponents(parts["scale"])  # [..., N, K / group]
    if scale.shape[-1] * group != numbers.shape[-1]:
        raise ValueError(f"scales of {list(scale.shape)} for numbers of {list(numbers.shape)}, {group} to a scale")
    if "divisor" in parts:
        scale = scale / parts["divisor"].float()
    if "factor" in parts:
        scale = scale * parts["factor"].float()
    return numbers * scale.repeat_interleave(group, -1)


def fp4_numbers(packed: Tensor) -> Tensor:
    """Return FP4 numbers [..., columns] float32 from bytes [..., columns / 2], the lower half of a byte first."""
    values = torch.tensor(FP4)
    halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)  # [..., columns]
    return values[halves.long()]


def fp4_blocks(parts: Parts) -> Tensor:
    """Return the weights of gpt-oss's experts, [experts, inputs, outputs] float32, from bytes [experts, outputs,
    blocks, 16] of FP4 numbers and one exponent for each block of 32 numbers.
    """
    numbers = fp4_numbers(parts["packed"])  # [experts, outputs, blocks, 32]
    scale = exponents(parts["scale"])  # [experts, outputs, blocks]
    return (numbers * scale[..., None]).flatten(-2).transpose(-1, -2).contiguous()


def bits_and_bytes4(parts: Parts) -> Tensor:
    """Return the weight of bitsandbytes' 4-bit layout, in its stored shape. The numbers are indices into a table of 16
    values, two in a byte, the first in the upper half.

    A scale applies to a block of numbers. The scales may be quantised themselves, to 8 bits, with an offset, and a
    scale for each block of scales.
    """
    stated = json.loads(bytes(parts["state"].tolist()))
    scale = parts["absmax"]  # [scales]
    if "nested_absmax" in parts:
        rounded = parts["nested_map"][scale.long()]  # [scales]
        blocks = torch.arange(len(rounded)) // stated["nested_blocksize"]
        scale = rounded * parts["nested_absmax"][blocks] + stated["nested_offset"]
    packed = parts["weight"].flatten()  # [N * K / 2] uint8
    halves = torch.stack((packed >> 4, packed & 15), -1).flatten()  # [N * K]
    numbers = parts["map"][halves.long()]
    shape = stated["shape"]
    numbers = numbers[: int(torch.Size(shape).numel())]
    blocks = torch.arange(len(numbers)) // stated["blocksize"]
    return (numbers * scale.float()[blocks]).reshape(shape)


def bits_and_bytes8(parts: Parts) -> Tensor:
    """Return the weight [rows, columns] float32 of bitsandbytes' 8-bit layout: int8 numbers times scale / 127, where a
    row's scale is its largest absolute value.
    """
    return parts["weight"].float() * (parts["scale"].float() / 127)[:, None]


def unpack_words(words: Tensor, bits: int, num_columns: int) -> Tensor:
    """Return the integers [rows, num_columns] int64 that are stored in words of 32 bits, [rows, words]. A row is a
    stream of bits, the lowest first; each integer has `bits` of them.
    """
    # 4 bits, the word 0x87654321: [1, 2, 3, 4, 5, 6, 7, 8]. Of 3 bits the 11th integer lies in two words.
    stream = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))  # the last number may end with the last word
    starts = torch.arange(num_columns, device=words.device) * bits
    first, shift = starts // 32, starts % 32
    low = stream[:, first] >> shift
    high = stream[:, first + 1] << (32 - shift)
    return (low | high) & ((1 << bits) - 1)
