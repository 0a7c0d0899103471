"""Bind the C++ library to Python: the forward, for `attention.fused`, and random numbers for a vocabulary, with which
`sampling.coupled` and `sampling.noise` draw on the host.

ctypes releases the GIL in every call. A `NativeModel` belongs to one thread at a time.
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
"""Layer index to pass for a matrix or vector that belongs to the whole model, such as the lm_head."""


class NativeSpec(ctypes.Structure):
    """Sizes and options of a model that the C++ forward runs. Mirrors `Spec` in model.h, field by field."""

    _fields_ = (
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("intermediate", c_int32),
        ("vocab", c_int32),
        ("lm_head_rows", c_int32),
        ("paired", c_int32),
        ("dtype", c_int32),
        ("weights", c_int32),
        ("num_threads", c_int32),
        ("activation", c_int32),
        ("epsilon", c_float),
        ("attention_scale", c_float),
        ("embedding_scale", c_float),
    )


class NumberKind(IntEnum):
    """Storage format of numbers. Mirrors the C++ enumeration."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


class Activation(IntEnum):
    """Activation function that the MLP applies to its gate. Mirrors the C++ enumeration."""

    SILU = 0
    GELU = 1
    """GELU in its approximation by tanh."""


class MatrixName(IntEnum):
    """Name of a packed matrix of the C++ forward. QKV: query, key and value projections. OUT: attention's output
    projection. GATE_UP and DOWN: the MLP's gate and up, and its down projection. LM_HEAD: the lm_head.
    """

    QKV = 0
    OUT = 1
    GATE_UP = 2
    DOWN = 3
    LM_HEAD = 4


class RowPart(IntEnum):
    """Where the rows of a weight are put in a packed matrix. STRAIGHT: one after the other. GATE and UP: into the
    matrix GATE_UP, where 32 rows of the gate alternate with 32 rows of the up projection.
    """

    STRAIGHT = 0
    GATE = 1
    UP = 2


class VectorName(IntEnum):
    """Name of a vector of the C++ forward: a norm's weight, or a table of rotary cosines or sines. For COSINE and SINE,
    the layer index to pass is the number of the rotary table, which several layers may share.
    """

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


"""Result type and argument types of each C function of the library, as fused.cpp declares it."""


@functools.lru_cache
def library() -> ctypes.CDLL:
    """Return the shared library of the C++ kernels, which is loaded once in a process. It is compiled if its file is
    missing, and compiled again if the file does not load.

    Raises BuildError.
    """
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
    """Load the shared library of the C++ kernels when a worker starts. A worker on a GPU needs it, too, for sampling on
    the CPU.

    If it cannot be loaded, a warning is logged, and `loaded` returns None from then on.
    """
    try:
        library()
    except BuildError as error:
        log.warning("the C++ library is not there; Llama-like models on a CPU and sampling are slower: %s", error)


def loaded() -> ctypes.CDLL | None:
    """Return the shared library of the C++ kernels if this process has already loaded it; None otherwise."""
    if not library.cache_info().currsize:
        return None
    return library()


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
        function.restype = result
        function.argtypes = arguments
    return opened


class NativeModel:
    """A model in the C++ forward: packed weights, and threads that run it, which end when the object is dropped."""

    def __init__(self, spec: NativeSpec, windows: Sequence[int], rotaries: Sequence[int]) -> None:
        """Allocate a model without weights. Raises BuildError and MemoryError.

        windows: for each layer, the number of keys that a query attends to; 0 = all. rotaries: for each layer, the
        number of its rotary table, from 0.
        """
        self._library = library()
        window_array = array("i", windows)  # in variables, so that they exist until the call has returned
        rotary_array = array("i", rotaries)
        self._handle = self._library.outrider_new(
            ctypes.byref(spec), window_array.buffer_info()[0], rotary_array.buffer_info()[0]
        )
        if not self._handle:
            raise MemoryError(f"no memory or threads for the packed weights of {spec.num_layers} layers")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.outrider_free(self._handle)

    def pack(
        self,
        layer: int,
        which: MatrixName,
        weight: Tensor,
        first: int = 0,
        part: RowPart = RowPart.STRAIGHT,
        scale: Tensor | None = None,
    ) -> None:
        """Pack a weight [rows, columns] into the matrix `which` of a layer (`NO_LAYER` for the lm_head), where its rows
        become outputs from the index `first` on. Raises MemoryError.

        part: whether the rows are consecutive outputs, or the gate's or the up projection's outputs in GATE_UP. scale:
        factor on each row, [rows], for an int8 weight; None otherwise.
        """
        weight = weight.detach().contiguous()
        if scale is None:
            scale = torch.ones(len(weight))
        scale = scale.detach().float().contiguous()
        rows, columns = weight.shape
        addresses = (weight.data_ptr(), scale.data_ptr())
        self._check(self._library.outrider_pack(self._handle, layer, which, *addresses, rows, columns, first, part))

    def bias(
        self, layer: int, which: MatrixName, bias: Tensor, first: int = 0, part: RowPart = RowPart.STRAIGHT
    ) -> None:
        """Set the bias [rows], of any dtype, for outputs of the matrix `which` of a layer (`NO_LAYER` for the lm_head),
        from the index `first` on. part: whether these are consecutive outputs, or the gate's or the up projection's
        outputs in GATE_UP. Raises MemoryError.
        """
        bias = bias.detach().float().contiguous()
        self._check(self._library.outrider_bias(self._handle, layer, which, bias.data_ptr(), len(bias), first, part))

    def set_vector(self, layer: int, which: VectorName, values: Tensor) -> None:
        """Set a norm's weight or a rotary table; `values` may have any shape and dtype. layer: index of the norm's
        layer, `NO_LAYER` if it is in none, or number of the rotary table. Raises MemoryError.
        """
        values = values.detach().float().contiguous()
        self._check(self._library.outrider_vector(self._handle, layer, which, values.data_ptr(), values.numel()))

    @property
    def weight_bytes(self) -> int:
        """Size of the packed matrices of all layers and the lm_head, in bytes."""
        return int(self._library.outrider_weight_bytes(self._handle))

    def storage(self, embedding: Tensor | None, keys: Tensor, values: Tensor, num_blocks: int) -> None:
        """Use these contiguous tensors, which must stay alive, as the model's embedding and as its storage of keys and
        values.

        embedding: [V, d] in the model's dtype; None if it has the same values as the packed lm_head. num_blocks: number
        of blocks of the storage, including the trash block.
        """
        embedding_address = None
        if embedding is not None:
            embedding_address = embedding.data_ptr()
        self._library.outrider_storage(self._handle, embedding_address, keys.data_ptr(), values.data_ptr(), num_blocks)

    def taps(self, taps: Sequence[int]) -> None:
        """Set which hidden states later forwards write to `features`. `taps`: their indices, from 0 (the embeddings) to
        the number of layers, or -1 for the state after the final norm; empty = none. Raises MemoryError.
        """
        numbers = array("i", taps)
        self._check(self._library.outrider_taps(self._handle, numbers.buffer_info()[0], len(numbers)))

    def set_residual(self, *, normed: bool) -> None:
        """Set what the residual of layer 0 is in a model whose layer 0 reads features (an EAGLE-3 head): the features
        after their norm (True) or before it (False).
        """
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
        """Run the step that `plan` (int32, see model.h) describes. Write the results into `logits` and `features`.

        logits: [N, rows of the lm_head] float32, for N requested positions. features: [num_tokens, taps, d padded to a
        multiple of 16] float32; None if there are no taps. read: [num_tokens, d] float32, contiguous, the features that
        an EAGLE-3 head reads; None for models. Returns None if the step ran. If a token id is outside the vocabulary,
        computes nothing and returns the index of that id among the fed ids. Raises MemoryError.
        """
        addresses = (_address(logits), _address(features), _address(read))
        status = self._library.outrider_forward(self._handle, plan.buffer_info()[0], num_tokens, num_rows, *addresses)
        self._check(status)
        if status:
            return int(status) - 1
        return None

    def _check(self, status: int) -> None:
        if status < 0:
            raise MemoryError("no memory for weights or a step's activations; lower max_prefill_tokens or max_slots")


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    return tensor.data_ptr()
