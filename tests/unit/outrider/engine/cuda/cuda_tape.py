"""CUDA graphs without CUDA: operations are recorded once and run again on the very same tensors.

As with the real thing, a replay runs no Python of the captured function, sees no host value that has changed since, and
writes its results where the capture put them. Waiting for the device, which a capture forbids, is an error.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit.outrider.engine.cuda import cuda_varlen
from tests.unit.outrider.engine.cuda.cuda_waits import name_of, waits


@torch.library.custom_op("outrider_tests::varlen_attn", mutates_args=())
def _varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
    right: int,
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    return cuda_varlen.varlen_attn(
        *(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k),
        scale=scale,
        window_size=(left, right),
        enable_gqa=enable_gqa,
        seqused_k=seqused_k,
        block_table=block_table,
        num_splits=num_splits,
    )


def varlen_attn(*args: Any, scale: float, window_size: tuple[int, int], **options: Any) -> Tensor:
    """cuda_varlen's, as one operation: what it reads on the host is the kernel's own business."""
    left, right = window_size
    ordered = [options[name] for name in ("enable_gqa", "seqused_k", "block_table", "num_splits")]
    return torch.ops.outrider_tests.varlen_attn(*args, scale, left, right, *ordered)


class Tape:
    """Implements `Graph`."""

    def __init__(self, maker: "TapeMaker | None" = None) -> None:
        self._maker = maker
        self.operations: list[tuple[Any, Any, Any, list[Any]]] = []

    def recording(self) -> TorchDispatchMode:
        """Operations within are put on the tape."""
        return _Recording(self)

    def replay(self) -> None:
        if self._maker is not None:
            self._maker.num_replays += 1
        with torch.inference_mode():
            for func, args, kwargs, outputs in self.operations:
                for old, new in zip(outputs, tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class TapeMaker:
    """Implements `GraphMaker`."""

    def __init__(self) -> None:
        self.num_replays = 0
        self.num_captures = 0

    def capture(self, compute: Callable[[], None]) -> Tape:
        self.num_captures += 1
        tape = Tape(self)
        with tape.recording():
            compute()
        return tape


class _Recording(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(func, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name_of(func)}")
        result = func(*args, **(kwargs or {}))
        self._tape.operations.append((func, args, kwargs or {}, tree_leaves(result)))
        return result
