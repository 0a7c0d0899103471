"""Linear layers over weights that oneDNN has laid out beforehand. Called by `attention_choice` for models on a CPU.

The operators are torch's own but private (the inductor uses them), so they live behind this module alone, with the one
that `quantize` takes for int8: each shape is compared with the plain layer before it is relied on, and whatever is
missing or differs leaves the plain one in place.

Measured as a share of the plain layer's time (AVX-512, one thread, 1024 x 1024): float32 0.9 for one row, 0.54 for two,
0.37 for six; bfloat16 0.5, 0.7, 0.6. A float32 weight of 384 x 384 takes twice the plain time for one row.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

SMALLEST = {torch.float32: 1 << 18, torch.bfloat16: 1 << 16}
"""Elements of the smallest weight that is packed; below, a call's fixed cost outweighs the gain."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest difference from the plain layer, as a share of its largest output."""
ROWS = (1, 2, 6, 17)
"""Rows at which layers are compared: a token, two, a verify, a piece of a prompt."""


@dataclass(frozen=True, slots=True)
class Operators:
    """torch's operators, if this build has them."""

    pack: Callable[..., Tensor]
    """(weight [N, K], number of rows or None) -> an opaque tensor"""
    apply: Callable[..., Tensor]
    """(x [..., K], packed, bias [N] or None, "none", [], "") -> [..., N]"""


def operators() -> Operators | None:
    """Return the operators, or None when torch was built without them."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        return Operators(torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise)
    except AttributeError:
        return None


class PackedLinear(nn.Module):
    """Replaces an nn.Linear or a Conv1D of transformers. Holds the packed weight alone."""

    def __init__(self, plain: nn.Module, found: Operators) -> None:
        """Pack the weight of `plain`, which the caller releases. Raises what torch raises."""
        super().__init__()
        weight = _weight(plain)
        self.out_features, self.in_features = weight.shape
        self.nf = self.out_features  # Conv1D's word
        self.bias = plain.bias
        self._is_conv1d = isinstance(plain, Conv1D)
        self._packed = found.pack(weight, None)
        self._apply_packed = found.apply

    def forward(self, x: Tensor) -> Tensor:
        """Return the product [..., N] of x [..., K]."""
        return self._apply_packed(x, self._packed, self.bias, "none", [], "")

    @property
    def weight(self) -> Tensor:
        """A copy of the weight as the plain layer has it."""
        weight = self._packed.to_dense()
        return weight.t() if self._is_conv1d else weight

    def unpacked(self) -> nn.Module:
        """Return the layer that this one replaced."""
        plain: nn.Module
        if self._is_conv1d:
            plain = Conv1D(self.out_features, self.in_features)
        else:
            plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        plain.weight = nn.Parameter(self.weight.contiguous(), requires_grad=False)
        plain.bias = self.bias
        return plain


def int8_operator() -> Callable[..., Tensor]:
    """Return torch's function of (x [M, K] bfloat16, weight [N, K] int8, scale [N] bfloat16) to [M, N], for a CPU.

    Raises AttributeError when torch does not have it.
    """
    operator: Callable[..., Tensor] = torch.ops.aten._weight_int8pack_mm
    return operator


@functools.lru_cache
def int8_product(num_outputs: int, num_inputs: int) -> Callable[..., Tensor] | None:
    """Return `int8_operator` when it computes what the plain product does at this shape, else None. For a CPU."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8, generator=generator)  # [N, K]
    scale = torch.rand(num_outputs, generator=generator).bfloat16()  # [N]
    try:
        operator = int8_operator()
        for rows in ROWS[:2]:
            x = torch.randn(rows, num_inputs, generator=generator).bfloat16()  # [M, K]
            truth, got = (x.float() @ weight.float().t()) * scale, operator(x, weight, scale).float()  # [M, N]
            if not (truth - got).abs().max() <= TOLERANCE[torch.bfloat16] * truth.abs().max():  # NaN is a no
                log.warning("the int8 product of %d x %d differs, weights are unpacked", num_outputs, num_inputs)
                return None
    except (AttributeError, RuntimeError, TypeError, NotImplementedError) as error:
        log.warning("no int8 product of %d x %d, weights are unpacked: %s", num_outputs, num_inputs, error)
        return None
    return operator


def pack_linears(model: nn.Module) -> int:
    """Replace the layers that gain by it; return how many. Each plain weight is freed before the next one is packed.

    A weight that another module also holds (a tied head) stays plain: it would be in memory twice.
    """
    found, num_packed = operators(), 0
    if found is None:
        log.info("linear layers stay as they are: this build of torch has no operators for packed weights")
        return 0
    trusted: dict[tuple[Any, ...], bool] = {}
    shared = _shared_weights(model)
    for parent, name in list(_candidates(model, shared)):
        plain = getattr(parent, name)
        key = (*plain.weight.shape, type(plain), plain.weight.dtype, plain.bias is not None)
        if key not in trusted:
            trusted[key] = _agrees(plain, found)
        if trusted[key]:
            setattr(parent, name, PackedLinear(plain, found))
            num_packed += 1
    return num_packed


def unpack_linears(model: nn.Module) -> None:
    """Undo `pack_linears`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                setattr(parent, name, child.unpacked())


def _shared_weights(model: nn.Module) -> set[int]:
    """Return the addresses of the weights that more than one module holds."""
    counts = Counter(p.data_ptr() for _, p in model.named_parameters(remove_duplicate=False))
    return {address for address, count in counts.items() if count > 1}


def _candidates(model: nn.Module, shared: set[int]) -> Iterator[tuple[nn.Module, str]]:
    """Yield (parent, name) of the plain layers that are large enough. Quantised and split weights are not plain."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) not in (nn.Linear, Conv1D) or child._forward_hooks or child._forward_pre_hooks:
                continue
            weight = child.weight
            plain = type(weight.data) is Tensor and weight.device.type == "cpu" and weight.data_ptr() not in shared
            if plain and weight.dtype in SMALLEST and weight.numel() >= SMALLEST[weight.dtype]:
                yield parent, name


def _weight(plain: nn.Module) -> Tensor:
    """Return the weight [N, K]."""
    weight: Tensor = plain.weight.data
    return weight.t().contiguous() if isinstance(plain, Conv1D) else weight.contiguous()


def _agrees(plain: nn.Module, found: Operators) -> bool:
    """Return whether the packed layer computes what the plain one does. Any error is a no."""
    weight, generator = _weight(plain), torch.Generator().manual_seed(0)
    try:
        packed = PackedLinear(plain, found)
        for rows in ROWS:
            x = torch.randn(1, rows, weight.shape[1], generator=generator).to(weight.dtype)  # [1, T, K]
            truth, got = linear(x, weight, plain.bias).float(), packed(x).float()  # [1, T, N]
            error = float((truth - got).abs().max() / truth.abs().max().clamp_min(1e-30))
            if not error <= TOLERANCE[weight.dtype]:  # NaN is a no
                log.warning("a packed weight of %s differs by %.1e, it stays plain", tuple(weight.shape), error)
                return False
    except (RuntimeError, TypeError, NotImplementedError) as error:
        log.warning("a weight of %s cannot be packed and stays plain: %s", tuple(weight.shape), error)
        return False
    return True
