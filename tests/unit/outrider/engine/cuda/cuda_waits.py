"""Which operations bring a value, or a shape that depends on one, to the host: on a GPU the host would wait for it."""

from typing import Any

import torch
from torch import Tensor

_BY_NAME = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"),
        *("_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"),
    )
)
_MASKABLE = frozenset(("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"))


def waits(func: Any, args: Any) -> bool:
    """Of an operation as a dispatch mode sees it, were its tensors on a device."""
    name = name_of(func)
    return name in _BY_NAME or (name in _MASKABLE and _has_mask(args[1]))


def name_of(func: Any) -> str:
    name: str = func.name().partition(".")[0]
    return name


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
