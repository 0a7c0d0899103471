"""Turn the numbers of quantised checkpoints into weights: one function for each layout. Called by `unpack`.

Each takes a weight's tensors by their roles and returns it as float32, [N, K]: N output and K input features. Experts
that are stored together have a dimension more in front.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of 4 bits: sign, two of exponent, one of mantissa (E2M1 of the OCP microscaling formats)."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of eight columns: AWQ's kernels take even ones first."""
Parts = Mapping[str, Tensor]


def scaled(parts: Parts, block: tuple[int, int] | None = None) -> Tensor:
    """Return FP8 or INT8 numbers [..., N, K] times a scale: one for all, for each row, group of columns or block.

    block: rows and columns of one, of which the last may be cut; None = by the scale's shape. Zero points, where there
    are some, are subtracted before.
    """
    numbers = parts["weight"].float()
    zero_point = parts.get("zero_point")
    if zero_point is not None:
        numbers = numbers - _spread(zero_point.float(), numbers.shape, block)
    return numbers * _spread(exponents(parts["scale"]), numbers.shape, block)


def exponents(scale: Tensor) -> Tensor:
    """Return scales as float32. Bytes are exponents of two (E8M0)."""
    if scale.dtype is torch.uint8:
        return torch.exp2(scale.float() - 127)
    return scale.float()


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """Return scales that broadcast over [..., N, K]."""
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
    """Return the weight of compressed-tensors' `pack-quantized`: integers in words of 32 bits along the columns.

    They are stored with half of their range added. A scale and a zero point hold for a group of columns; `g_idx` gives
    each column's group where they are not in order.
    """
    rows, columns = (int(size) for size in parts["shape"])
    bits = parts["packed"].shape[1] * 32 // columns
    middle = 1 << (bits - 1)
    numbers = unpack_words(parts["packed"], bits, columns).float() - middle  # [N, K]
    scale, zero_point = parts["scale"].float(), parts.get("zero_point")  # [N, groups]
    groups = _groups_of(parts.get("g_idx"), columns, scale.shape[1])
    if zero_point is not None:
        if zero_point.dtype is torch.int32:
            zero_point = unpack_words(zero_point.t(), bits, rows).t() - middle  # [N, groups]
        numbers = numbers - zero_point.float()[:, groups]
    return numbers * scale[:, groups]


def gptq(parts: Parts, bits: int, first_zero: int) -> Tensor:
    """Return the weight of GPTQ: integers in words along the rows of [K, N], a zero point and scale for each group.

    first_zero: added to stored zero points: 1, or 0 in the second version of the format.
    """
    scale = parts["scales"].float()  # [groups, N]
    num_columns = scale.shape[1]
    num_inputs = parts["qweight"].shape[0] * 32 // bits
    numbers = unpack_words(parts["qweight"].t(), bits, num_inputs).float()  # [N, K]
    zero_point = unpack_words(parts["qzeros"], bits, num_columns) + first_zero  # [groups, N]
    zero_point = zero_point & ((1 << bits) - 1) if first_zero else zero_point
    _check_groups(zero_point, scale)
    groups = _groups_of(parts.get("g_idx"), num_inputs, scale.shape[0])
    return (numbers - zero_point.float().t()[:, groups]) * scale.t()[:, groups]


def awq(parts: Parts) -> Tensor:
    """Return the weight of AWQ: integers of 4 bits in words along the columns of [K, N], in an order of their own."""
    scale = parts["scales"].float()  # [groups, N]
    numbers = _in_order(parts["qweight"], scale.shape[1])  # [K, N]
    zero_point = _in_order(parts["qzeros"], scale.shape[1])  # [groups, N]
    _check_groups(zero_point, scale)
    groups = _groups_of(None, numbers.shape[0], scale.shape[0])
    return ((numbers - zero_point[groups]) * scale[groups]).t().contiguous()


def _in_order(words: Tensor, num_columns: int) -> Tensor:
    unpacked = unpack_words(words, 4, num_columns)
    return unpacked.unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1).float()


def _check_groups(zero_point: Tensor, scale: Tensor) -> None:
    if zero_point.shape != scale.shape:
        raise ValueError(f"zero points of {list(zero_point.shape)} and scales of {list(scale.shape)}")


def _groups_of(stated: Tensor | None, num_columns: int, num_groups: int) -> Tensor:
    """Return the group of each column."""
    if stated is not None and bool((stated >= 0).all()):  # -1: not used
        return stated.long()
    return torch.arange(num_columns) // -(-num_columns // num_groups)


def fp4(parts: Parts, group: int) -> Tensor:
    """Return numbers of FP4, two in a byte [N, K / 2], the lower half first, times a scale for each group of columns.

    The global scale divides (`divisor`, compressed-tensors) or multiplies (`factor`, modelopt).
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
    values = torch.tensor(FP4)
    halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)  # [..., K]
    return values[halves.long()]


def fp4_blocks(parts: Parts) -> Tensor:
    """Return experts of gpt-oss [E, K, N], stored as [E, N, blocks, 16] bytes with an exponent for each block of 32."""
    numbers = fp4_numbers(parts["packed"])  # [E, N, blocks, 32]
    scale = exponents(parts["scale"])  # [E, N, blocks]
    return (numbers * scale[..., None]).flatten(-2).transpose(-1, -2).contiguous()


def bits_and_bytes4(parts: Parts) -> Tensor:
    """Return the weight of bitsandbytes' 4 bits: places in a table of 16, the upper half first, a scale for each block
    of them, which may be rounded to 8 bits itself.
    """
    stated = json.loads(bytes(parts["state"].tolist()))
    scale = parts["absmax"]
    if "nested_absmax" in parts:
        rough = parts["nested_map"][scale.long()]
        blocks = torch.arange(len(rough)) // stated["nested_blocksize"]
        scale = rough * parts["nested_absmax"][blocks] + stated["nested_offset"]
    packed = parts["weight"].flatten()
    halves = torch.stack((packed >> 4, packed & 15), -1).flatten()
    numbers = parts["map"][halves.long()]
    shape = stated["shape"]
    numbers = numbers[: int(torch.Size(shape).numel())]
    blocks = torch.arange(len(numbers)) // stated["blocksize"]
    return (numbers * scale.float()[blocks]).reshape(shape)


def bits_and_bytes8(parts: Parts) -> Tensor:
    """Return the weight of bitsandbytes' 8 bits: integers times the largest number of their row, of 127."""
    return parts["weight"].float() * (parts["scale"].float() / 127)[:, None]


def unpack_words(words: Tensor, bits: int, num_columns: int) -> Tensor:
    """Return integers [R, num_columns] of words of 32 bits [R, W]: each row is a stream of bits, the lowest first."""
    stream = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))  # the last number may end with the last word
    starts = torch.arange(num_columns, device=words.device) * bits
    first, shift = starts // 32, starts % 32
    low = stream[:, first] >> shift
    high = stream[:, first + 1] << (32 - shift)
    return (low | high) & ((1 << bits) - 1)
