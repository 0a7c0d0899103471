"""Linear layers with weights that oneDNN has laid out beforehand. Called by `attention_choice` for models on a CPU.

The operators are torch's own but private (the inductor uses them), so this module alone calls them, including the one
that `quantize` uses for int8. For each shape the packed layer is compared with the plain one before it is used; if an
operator is missing or its results differ, the plain layer stays.

Measured as a fraction of the plain layer's time (AVX-512, one thread, 1024 x 1024): float32 0.9 for one row, 0.54 for
two, 0.37 for six; bfloat16 0.5, 0.7, 0.6. A float32 weight of 384 x 384 takes twice the plain time for one row.
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
"""Number of elements of the smallest weight that is packed, by dtype of the weight. With a smaller one, the operator's
fixed cost of a call outweighs the gain."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest accepted difference between the outputs of a packed and the plain linear layer, as a fraction of the largest
output, by the dtype of the weight."""
ROWS = (1, 2, 6, 17)
"""Numbers of tokens of the inputs on which a packed layer is compared with the plain one: as in a decode of one or two
sequences, in a verify, and in a piece of a prompt."""


@dataclass(frozen=True, slots=True)
class Operators:
    """Torch's operators that pack the weight of a linear layer for the CPU, and multiply with a packed weight."""

    pack: Callable[..., Tensor]
    """Function (weight [outputs, inputs], number of rows of x or None for any) -> packed weight, an opaque tensor."""
    apply: Callable[..., Tensor]
    """Function (x [..., inputs], packed weight, bias [outputs] or None, "none", [], "") -> product [..., outputs]. The
    last three arguments say that no other operation follows."""


def operators() -> Operators | None:
    """Return torch's operators for packed weights on a CPU; None if torch was built without them."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        return Operators(torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise)
    except AttributeError:
        return None


class PackedLinear(nn.Module):
    """Linear layer that replaces an nn.Linear or a Conv1D of transformers. It holds only the packed weight."""

    def __init__(self, plain: nn.Module, packed: Operators) -> None:
        """Pack the weight of `plain`, which can then be released. Raises torch's errors if it cannot be packed."""
        super().__init__()
        weight = _weight(plain)  # [N, K]
        self.out_features, self.in_features = weight.shape
        self.nf = self.out_features  # Conv1D's name for it
        self.bias = plain.bias
        self._is_conv1d = isinstance(plain, Conv1D)
        self._packed = packed.pack(weight, None)
        self._apply_packed = packed.apply

    def forward(self, x: Tensor) -> Tensor:
        """Return the product [..., outputs] of x [..., inputs] with the weight, plus the bias."""
        return self._apply_packed(x, self._packed, self.bias, "none", [], "")

    @property
    def weight(self) -> Tensor:
        """Copy of the weight in the plain layer's layout: [outputs, inputs], or [inputs, outputs] for a Conv1D."""
        weight = self._packed.to_dense()
        if self._is_conv1d:
            weight = weight.t()
        return weight

    def unpacked(self) -> nn.Module:
        """Return a plain layer with the same weight and bias as the one that this layer replaced."""
        plain: nn.Module
        if self._is_conv1d:
            plain = Conv1D(self.out_features, self.in_features)
        else:
            plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        plain.weight = nn.Parameter(self.weight.contiguous(), requires_grad=False)
        plain.bias = self.bias
        return plain


def int8_operator() -> Callable[..., Tensor]:
    """Return torch's operator (x [tokens, inputs] bfloat16, weight [outputs, inputs] int8, scale [outputs] bfloat16) ->
    [tokens, outputs], for a CPU.

    Raises AttributeError if torch does not have it.
    """
    operator: Callable[..., Tensor] = torch.ops.aten._weight_int8pack_mm
    return operator


@functools.lru_cache
def int8_product(num_outputs: int, num_inputs: int) -> Callable[..., Tensor] | None:
    """Return `int8_operator` if it exists and, for a weight of this shape on a CPU, gives the same product as an
    unpacked weight; None otherwise.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8, generator=generator)  # [N, K]
    scale = torch.rand(num_outputs, generator=generator).bfloat16()  # [N]
    try:
        operator = int8_operator()
        for rows in ROWS[:2]:
            x = torch.randn(rows, num_inputs, generator=generator).bfloat16()  # [M, K]
            expected = (x.float() @ weight.float().t()) * scale  # [M, N]
            found = operator(x, weight, scale).float()  # [M, N]
            if not (expected - found).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max():  # NaN differs
                log.warning("the int8 product of %d x %d differs, weights are unpacked", num_outputs, num_inputs)
                return None
    except (AttributeError, RuntimeError, TypeError, NotImplementedError) as error:
        log.warning("no int8 product of %d x %d, weights are unpacked: %s", num_outputs, num_inputs, error)
        return None
    return operator


def pack_linears(model: nn.Module) -> int:
    """Replace, in place, the linear layers that run faster with packed weights by `PackedLinear`. Return their number.
    Weights are packed one by one, so that the plain form of each is freed before the next is packed.

    A weight that another module uses, too (a tied lm_head), stays plain: it would be in memory twice.
    """
    packed_operators = operators()
    if packed_operators is None:
        log.info("linear layers stay as they are: this build of torch has no operators for packed weights")
        return 0
    num_packed = 0
    is_equal: dict[tuple[Any, ...], bool] = {}  # by shape, class, dtype, and whether there is a bias
    shared = _shared_weights(model)
    for parent, name in list(_candidates(model, shared)):
        plain = getattr(parent, name)
        key = (*plain.weight.shape, type(plain), plain.weight.dtype, plain.bias is not None)
        if key not in is_equal:
            is_equal[key] = _computes_the_same(plain, packed_operators)
        if is_equal[key]:
            setattr(parent, name, PackedLinear(plain, packed_operators))
            num_packed += 1
    return num_packed


def unpack_linears(model: nn.Module) -> None:
    """Replace the layers that `pack_linears` packed by plain ones, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                setattr(parent, name, child.unpacked())


def _shared_weights(model: nn.Module) -> set[int]:
    # The addresses of the weights that more than one module holds.
    counts = Counter(weight.data_ptr() for _, weight in model.named_parameters(remove_duplicate=False))
    return {address for address, count in counts.items() if count > 1}


def _candidates(model: nn.Module, shared: set[int]) -> Iterator[tuple[nn.Module, str]]:
    # (parent, name) of the plain layers that are large enough. Quantised and split weights are not plain.
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) not in (nn.Linear, Conv1D) or child._forward_hooks or child._forward_pre_hooks:
                continue
            weight = child.weight
            is_plain = type(weight.data) is Tensor and weight.device.type == "cpu" and weight.data_ptr() not in shared
            if is_plain and weight.dtype in SMALLEST and weight.numel() >= SMALLEST[weight.dtype]:
                yield parent, name


def _weight(plain: nn.Module) -> Tensor:
    # [N, K]
    weight: Tensor = plain.weight.data
    if isinstance(plain, Conv1D):
        weight = weight.t()
    return weight.contiguous()


def _computes_the_same(plain: nn.Module, packed_operators: Operators) -> bool:
    weight = _weight(plain)  # [N, K]
    generator = torch.Generator().manual_seed(0)
    try:
        packed = PackedLinear(plain, packed_operators)
        for rows in ROWS:
            x = torch.randn(1, rows, weight.shape[1], generator=generator).to(weight.dtype)  # [1, T, K]
            expected = linear(x, weight, plain.bias).float()  # [1, T, N]
            found = packed(x).float()  # [1, T, N]
            error = float((expected - found).abs().max() / expected.abs().max().clamp_min(1e-30))
            if not error <= TOLERANCE[weight.dtype]:  # NaN differs, too
                log.warning("a packed weight of %s differs by %.1e, it stays plain", tuple(weight.shape), error)
                return False
    except (RuntimeError, TypeError, NotImplementedError) as error:
        log.warning("a weight of %s cannot be packed and stays plain: %s", tuple(weight.shape), error)
        return False
    return True
