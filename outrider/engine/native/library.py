"""Bind the C++ library to Python: the forward, which `paths.fused` gives weights, storage and steps, and the random
numbers of a vocabulary, which `sampling.coupled` and `sampling.noise` draw with on the host.

Every call that takes time releases the GIL (ctypes does). A `NativeModel` belongs to one thread at a time.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from outrider.engine.native.build import BuildError, built_library, check_owner, compile_to, find_compiler
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

NO_LAYER = 0
"""Layer index for a matrix or a vector that belongs to no layer."""


class NativeSpec(ctypes.Structure):
    """Mirrors `NativeSpec` in model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_size", "intermediate")),
        *((name, c_int32) for name in ("vocab", "head_rows", "paired", "dtype", "weights")),
        *((name, c_int32) for name in ("num_threads", "activation")),
        *((name, c_float) for name in ("epsilon", "attention_scale", "embedding_scale")),
    )


class Kind(IntEnum):
    """How numbers are stored. Mirrors the C++ enumeration."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


class Activation(IntEnum):
    """What the gates go through. Mirrors the C++ enumeration."""

    SILU = 0
    GELU = 1
    """The approximation by tanh."""


class Which(IntEnum):
    """Names a packed matrix."""

    QKV = 0
    OUT = 1
    GATE_UP = 2
    DOWN = 3
    HEAD = 4


class RowPart(IntEnum):
    """Place of a weight's rows among a matrix's outputs: in order, or in the halves that gate and up share."""

    STRAIGHT = 0
    GATE = 1
    UP = 2


class Vector(IntEnum):
    """Names a norm's weight or a rotary table, which all layers of its number share."""

    ATTENTION_NORM = 0
    MLP_NORM = 1
    QUERY_NORM = 2
    KEY_NORM = 3
    LAST_NORM = 4
    COSINE = 5
    SINE = 6
    READ_NORM = 7
    ATTENTION_OUT_NORM = 8
    MLP_OUT_NORM = 9


SIGNATURES = {
    "outrider_new": (c_void_p, (POINTER(NativeSpec), c_void_p, c_void_p)),
    "outrider_free": (None, (c_void_p,)),
    "outrider_pack": (c_int64, (c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32)),
    "outrider_bias": (c_int64, (c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int64, c_int32)),
    "outrider_vector": (c_int64, (c_void_p, c_int32, c_int32, c_void_p, c_int64)),
    "outrider_weight_bytes": (c_int64, (c_void_p,)),
    "outrider_storage": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_int64)),
    "outrider_taps": (c_int64, (c_void_p, c_void_p, c_int64)),
    "outrider_residual": (None, (c_void_p, c_int32)),
    "outrider_forward": (c_int64, (c_void_p, c_void_p, c_int32, c_int32, *(c_void_p,) * 3)),
    "outrider_id_uniforms": (None, (c_uint64, c_uint32, c_uint32, c_void_p, c_int64, c_void_p)),
    "outrider_may_win": (c_int64, (c_uint64, c_uint32, c_uint32, c_void_p, c_int64, c_void_p, c_void_p)),
}


@functools.lru_cache
def library() -> ctypes.CDLL:
    """Return the library, built when it is missing or does not load. Raises BuildError."""
    path = built_library()
    try:
        return _open(path)
    except (OSError, AttributeError, BuildError) as error:
        _build_again(path, error)
    try:
        return _open(path)
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} does not load: {error}") from error


def load_at_start() -> None:
    """Load the library when a worker starts, on any device: a GPU worker draws on the host, too. Warn where it cannot
    be had: `loaded` is None then.
    """
    try:
        library()
    except BuildError as error:
        log.warning("the C++ library is not there; Llama-like models on a CPU and sampling are slower: %s", error)


def loaded() -> ctypes.CDLL | None:
    """Return the library if it is loaded already, else None."""
    return library() if library.cache_info().currsize else None


def _build_again(path: Path, error: Exception) -> None:
    try:
        compile_to(path, find_compiler())
    except BuildError as failure:
        raise BuildError(f"{path} is not loaded: {error}; it cannot be built again: {failure}") from None


def _open(path: Path) -> ctypes.CDLL:
    check_owner(path)
    opened = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(opened, name)
        function.restype, function.argtypes = result, arguments
    return opened


class NativeModel:
    """Holds a model's packed weights and the threads that run it. Ends the threads when it is dropped."""

    def __init__(self, spec: NativeSpec, windows: Sequence[int], rotaries: Sequence[int]) -> None:
        """Allocate an empty model. Raises BuildError, MemoryError.

        windows: keys that each layer's queries see, 0 for all. rotaries: the number of each layer's rotary tables.
        """
        self._library = library()
        seen, turned = array("i", windows), array("i", rotaries)  # named, so that they outlive the call
        addresses = (seen.buffer_info()[0], turned.buffer_info()[0])
        self._handle = self._library.outrider_new(ctypes.byref(spec), *addresses)
        if not self._handle:
            raise MemoryError(f"no memory or threads for the packed weights of {spec.num_layers} layers")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.outrider_free(self._handle)

    def pack(
        self,
        layer: int,
        which: Which,
        weight: Tensor,
        first: int = 0,
        part: RowPart = RowPart.STRAIGHT,
        scale: Tensor | None = None,
    ) -> None:
        """Pack weight [rows, columns], of the matrix's kind, into the outputs from `first` on.

        scale: [rows], for int8.
        """
        weight = weight.detach().contiguous()
        scale = torch.ones(len(weight)) if scale is None else scale.detach().float().contiguous()
        rows, columns = weight.shape
        addresses = (weight.data_ptr(), scale.data_ptr())
        self._ran(self._library.outrider_pack(self._handle, layer, which, *addresses, rows, columns, first, part))

    def bias(self, layer: int, which: Which, bias: Tensor, first: int = 0, part: RowPart = RowPart.STRAIGHT) -> None:
        """Set the bias [rows], of any dtype, of the outputs from `first` on."""
        bias = bias.detach().float().contiguous()
        self._ran(self._library.outrider_bias(self._handle, layer, which, bias.data_ptr(), len(bias), first, part))

    def vector(self, layer: int, which: Vector, values: Tensor) -> None:
        """Set a norm's weight or a rotary table, of any shape and dtype."""
        values = values.detach().float().contiguous()
        self._ran(self._library.outrider_vector(self._handle, layer, which, values.data_ptr(), values.numel()))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices."""
        return int(self._library.outrider_weight_bytes(self._handle))

    def storage(self, embedding: Tensor | None, keys: Tensor, values: Tensor, num_blocks: int) -> None:
        """Use these tensors, all contiguous and kept alive by the caller, for the embedding, keys and values.

        embedding: None where it is the packed head.
        """
        table = None if embedding is None else embedding.data_ptr()
        self._library.outrider_storage(self._handle, table, keys.data_ptr(), values.data_ptr(), num_blocks)

    def taps(self, taps: Sequence[int]) -> None:
        """Give these hidden states in the forwards that follow, as `GivesFeatures.set_taps` says."""
        given = array("i", taps)
        self._ran(self._library.outrider_taps(self._handle, given.buffer_info()[0], len(given)))

    def residual(self, *, normed: bool) -> None:
        """Let the rows that a paired model reads go on after their norm, or as they are."""
        self._library.outrider_residual(self._handle, normed)

    def forward(
        self,
        plan: array[int],
        num_tokens: int,
        num_rows: int,
        logits: Tensor,
        features: Tensor | None = None,
        read: Tensor | None = None,
    ) -> int | None:
        """Run the step that `plan` (int32, see model.h) describes; write logits [N, head_rows] and features, float32.

        features: [num_tokens, taps, hidden padded to a multiple of 16]; None where nothing is tapped.
        read: [num_tokens, hidden] float32, contiguous, for a paired model.
        Returns None, or the index of a token id outside the vocabulary: nothing was computed then.
        """
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in (logits, features, read))
        bad = self._library.outrider_forward(self._handle, plan.buffer_info()[0], num_tokens, num_rows, *addresses)
        self._ran(bad)
        return bad - 1 if bad else None

    def _ran(self, status: int) -> None:
        if status < 0:
            raise MemoryError("no memory for weights or a step's activations; lower max_prefill_tokens or max_slots")
