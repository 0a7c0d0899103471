"""A CUDA device for a torch without CUDA: tensors say cuda:0 and are computed on the host.

`with fake_cuda() as device:` and the product loads and runs as on a GPU. What a GPU refuses is refused: tensors of two
devices in one operation, `numpy()` of a device tensor, a wait inside a captured graph. What a GPU lets pass is counted:
each wait of the host for the device with its place, launches, and bytes in both directions. A copy to the host that
nobody waited for holds garbage. Values are real, so whatever depends on them runs too.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.engine.native.build import BuildError, find_compiler
from outrider.wire.processes.folders import cache_folder
from tests.unit.outrider.engine.cuda import cuda_tape, cuda_varlen
from tests.unit.outrider.engine.cuda.cuda_waits import name_of, waits

GUARD = Path(__file__).with_name("fake_guard.cpp")
DEVICE = torch.device("cuda", 0)
PRODUCT = ("outrider", "draft_service", "target_service")
"""Packages whose frames name the place of a wait."""
COPIERS = ("host_copy", "host_sampling")
"""Modules that copy for their callers, which are named."""
MEMORY_BYTES = 80 << 30
"""Of the device, as an H100 has; all of it is free."""
_VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "_unsafe_view", "expand", "permute", "transpose", "t", "slice", "select", "unsqueeze", "squeeze"),
        *("as_strided", "detach", "alias", "unbind", "split", "split_with_sizes", "_reshape_alias", "unfold"),
        *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh", "diagonal"),
    )
)
"""Operations that launch nothing."""
_INDEXED = frozenset(
    ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")
)
"""Operations whose indices, and a value without dimensions, may lie on the host, from where they are copied."""
_SCALAR_TAKERS = frozenset(
    f"aten::{name}"
    for name in ("masked_fill", "masked_fill_", "fill", "fill_", "index_fill", "index_fill_", "full_like", "where")
)
"""Operations beside the pointwise ones that take a host tensor without dimensions."""


class FakeCudaTensor(Tensor):
    """A tensor of cuda:0 whose values lie in `host`, a tensor of the host."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> "FakeCudaTensor":
        if torch.is_inference_mode_enabled() and not host.is_inference():  # a view of what was made outside
            with torch.inference_mode(False):
                return cls(host)
        strides, offset = host.stride(), host.storage_offset()
        options: dict[str, Any] = {"dtype": host.dtype, "device": DEVICE}
        made = torch.Tensor._make_wrapper_subclass(cls, host.shape, strides, offset, **options)
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeCuda.current().run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"FakeCudaTensor({self.host!r})"


@dataclass(frozen=True)
class Wait:
    what: str
    """The operation that made the host wait."""
    where: str
    """file:function of the product's innermost frame."""
    line: int


@dataclass
class Traffic:
    """What went between host and device since `FakeCuda.take`."""

    waits: list[Wait] = field(default_factory=list)
    num_launches: int = 0
    num_bytes_up: int = 0
    num_bytes_down: int = 0


class FakeCuda(TorchDispatchMode):
    """The device, while it is there."""

    _current: "FakeCuda | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()
        self.is_capturing = False
        self.num_launched = self._num_finished = 0
        """Operations in the device's life, and those of them that the host has waited for."""
        self._pending: list[tuple[Tensor, Tensor]] = []
        """Copies to the host that are on their way: (to, from)."""

    @classmethod
    def current(cls) -> "FakeCuda":
        assert cls._current is not None, "a tensor of a fake device outlived it"
        return cls._current

    def take(self) -> Traffic:
        """Return what was counted, and count from 0. Nothing may be on its way to the host then."""
        assert not self._pending, "a copy to the host was not waited for"
        taken, self.traffic = self.traffic, Traffic()
        return taken

    def wait(self, what: str) -> None:
        """The host waits until everything that was launched is done."""
        if self.is_capturing:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.traffic.waits.append(Wait(what, *_place()))
        self._finish()

    def wait_until(self, num_launched: int, what: str) -> None:
        """The host waits for so many operations of the device's life, unless it did."""
        if num_launched > self._num_finished:
            self.wait(what)

    def _finish(self) -> None:
        self._num_finished = self.num_launched
        pending, self._pending = self._pending, []
        for to, source in pending:
            to.copy_(source)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        operation = _operation(func)
        if operation.special is not None:
            return operation.special(self, func, args, kwargs)
        if operation.is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        on_device, strangers = _sorted_out(args, kwargs)
        if on_device:
            if operation.is_indexing and _fills_by_mask(args):
                return self.compute(func, args, kwargs)
            if strangers:
                self._check(operation, args, strangers)
            if operation.may_wait and waits(func, args):
                self.wait(operation.name)
        device = kwargs.get("device")
        if device is not None:
            on_device = torch.device(device).type == "cuda"
            kwargs = {**kwargs, "device": "cpu" if on_device else device}
        is_pinned = bool(kwargs.get("pin_memory"))
        if is_pinned:
            kwargs = {**kwargs, "pin_memory": False}
        if not on_device:
            result = func(*args, **kwargs)
            if is_pinned:
                result.is_fake_pinned = True
            return result
        if not operation.is_view:
            self.launch()
        return self.compute(func, args, kwargs)

    def launch(self) -> None:
        self.traffic.num_launches += 1
        self.num_launched += 1

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call with the tensors of the host in place of the device's, and return results of the device."""
        known: dict[int, FakeCudaTensor] = {}

        def on_host(value: Any) -> Any:
            if isinstance(value, FakeCudaTensor):
                known[id(value.host)] = value
                return value.host
            return type(value)(map(on_host, value)) if isinstance(value, list | tuple) else value

        def on_device(value: Any) -> Any:
            if isinstance(value, Tensor):
                return known[id(value)] if id(value) in known else FakeCudaTensor(value)
            return type(value)(map(on_device, value)) if isinstance(value, list | tuple) else value

        result = func(*map(on_host, args), **{name: on_host(value) for name, value in kwargs.items()})
        if isinstance(result, Tensor) and id(result) in known:
            assert result.shape == known[id(result)].shape, f"{func} changes a shape in place"
        return on_device(result)

    def _check(self, operation: "_Operation", args: Any, strangers: list[Tensor]) -> None:
        """Refuse host tensors where a GPU refuses them; copy those that it would copy."""
        for each in strangers:
            if operation.is_indexing and (not each.dim() or any(each is index for index in args[1])):
                self._up(each, each, non_blocking=False)
            elif each.dim() or not operation.takes_scalars:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                    f"{each.device}! ({operation.name}, a tensor {list(each.shape)})"
                )

    def _up(self, source: Tensor, copy: Tensor, *, non_blocking: bool) -> None:
        self.traffic.num_bytes_up += copy.numel() * copy.element_size()
        self.launch()
        if not (non_blocking and _is_pinned(source)):
            self.wait("a copy to the device")

    def _down(self, source: Tensor, to: Tensor, *, non_blocking: bool) -> None:
        """Copy a real tensor into one of the host."""
        self.traffic.num_bytes_down += to.numel() * to.element_size()
        self.launch()
        if non_blocking and _is_pinned(to):
            to.view(torch.uint8).fill_(0x7F) if to.dim() and to.is_contiguous() else to.zero_()
            self._pending.append((to, source.clone()))
            return
        to.copy_(source)
        self.wait("a copy to the host")

    def copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """copy_(to, source, non_blocking)."""
        to, source, non_blocking = args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if not isinstance(to, FakeCudaTensor) and not isinstance(source, FakeCudaTensor):
            return func(*args, **kwargs)
        if not isinstance(to, FakeCudaTensor):
            self._down(source.host, to, non_blocking=non_blocking)
            return to
        if isinstance(source, FakeCudaTensor):
            self.launch()
            to.host.copy_(source.host)
        else:
            to.host.copy_(source)
            self._up(source, source, non_blocking=non_blocking)
        return to

    def varlen(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """torch's flash attention, in plain maths; (output, log-sum-exp, state of the dropout)."""
        self.launch()
        output = self.compute(_varlen, args, kwargs)
        return output, output.new_empty(0), output.new_empty(0)

    def histogram(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """histc(source, bins, min, max), of whole numbers, too, which a CPU does not take."""
        source = args[0]
        if not isinstance(source, FakeCudaTensor):
            return func(*args, **kwargs)
        self.launch()
        return FakeCudaTensor(func(source.host.double(), *args[1:], **kwargs).to(source.dtype))

    def to_copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """_to_copy(source, dtype, device, non_blocking, ...)."""
        source = args[0]
        device = torch.device(kwargs.get("device") or source.device)
        non_blocking, is_pinned = bool(kwargs.get("non_blocking")), bool(kwargs.get("pin_memory"))
        rest = {**kwargs, "device": device if device.type == "meta" else "cpu", "non_blocking": False}
        rest["pin_memory"] = False
        if isinstance(source, FakeCudaTensor):
            made = func(source.host, **rest)
            if device.type == "cuda":
                self.launch()
                return FakeCudaTensor(made)
            if device.type == "cpu":
                made.is_fake_pinned = is_pinned or non_blocking  # torch takes pinned memory by itself
                self._down(made.clone(), made, non_blocking=non_blocking)
            return made
        if source.device.type == "meta" or device.type != "cuda":
            return func(source, **({**kwargs, "pin_memory": False} if is_pinned else kwargs))
        made = func(source, **rest)
        self._up(source, made, non_blocking=non_blocking)
        return FakeCudaTensor(made)

    def scalar(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not isinstance(args[0], FakeCudaTensor):
            return func(*args, **kwargs)
        self.traffic.num_bytes_down += args[0].element_size()
        self.wait("a number")
        return func(args[0].host)

    def pin(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        assert not isinstance(args[0], FakeCudaTensor), "cannot pin a tensor of the device"
        pinned = args[0].clone()
        pinned.is_fake_pinned = True
        return pinned

    def is_pinned(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        return _is_pinned(args[0])


def _is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor, "is_fake_pinned", False)


_SPECIAL: dict[str, Any] = {
    "aten::copy_": FakeCuda.copy,
    "aten::_to_copy": FakeCuda.to_copy,
    "aten::_local_scalar_dense": FakeCuda.scalar,
    "aten::pin_memory": FakeCuda.pin,
    "aten::_pin_memory": FakeCuda.pin,
    "aten::is_pinned": FakeCuda.is_pinned,
    "aten::histc": FakeCuda.histogram,
    "torch_attn::_varlen_attn": FakeCuda.varlen,
}
_WHOLE = frozenset(f"aten::{name}" for name in ("scaled_dot_product_attention", "matmul", "linear"))
"""Compositions that are seen as one operation: the first asks for a kernel of the device, the others are many."""


@dataclass(frozen=True, slots=True)
class _Operation:
    """What an operation is, whatever it is called with."""

    name: str
    special: Any
    is_composite: bool
    """It is made of others, of which each is seen by itself."""
    is_view: bool
    """It launches nothing."""
    is_indexing: bool
    takes_scalars: bool
    """Host tensors without dimensions may be among its arguments."""
    may_wait: bool


@functools.cache
def _operation(func: Any) -> _Operation:
    name = name_of(func)
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return _Operation(
        name,
        _SPECIAL.get(name),
        is_composite and name not in _WHOLE,
        name in _VIEWS,
        name in _INDEXED,
        name in _SCALAR_TAKERS or torch.Tag.pointwise in func.tags,
        name in _INDEXED or waits(func, ((), ())),
    )


def _fills_by_mask(args: Any) -> bool:
    """Return whether this is `x[mask] = number`, which torch computes as masked_fill_, without a wait."""
    if len(args) < 3:
        return False
    (mask, *more), value = args[1], args[2]
    return not more and mask is not None and mask.dtype == torch.bool and not value.dim() and not value.is_cuda


def _sorted_out(args: Any, kwargs: dict[str, Any]) -> tuple[bool, list[Tensor]]:
    """Return whether there are tensors of the device, and those of the host."""
    on_device, strangers = False, list[Tensor]()
    for value in (*args, *kwargs.values()):
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, FakeCudaTensor):
                on_device = True
            elif isinstance(each, Tensor):
                strangers.append(each)
    return on_device, strangers


def _varlen(*args: Any) -> Tensor:
    """As torch's private operation, whose arguments it is passed in order."""
    query, keys, values, cu_seq_q, cu_seq_k, max_q, max_k, _, scale, window, *rest = args
    enable_gqa, seqused_k, block_table, num_splits = rest
    return cuda_varlen.varlen_attn(
        *(query, keys, values, cu_seq_q, cu_seq_k, max_q, max_k),
        scale=scale,
        window_size=tuple(window),
        enable_gqa=enable_gqa,
        seqused_k=seqused_k,
        block_table=block_table,
        num_splits=num_splits,
    )


def _place() -> tuple[str, int]:
    """Return file:function and line of the product's innermost frame, or of whoever called."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] in PRODUCT and name.rpartition(".")[2] not in COPIERS:
            return f"{name.rpartition('.')[2]}:{frame.f_code.co_name}", frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "no product's", 0


class _Event:
    def __init__(self, **options: Any) -> None:
        self._num_launched = 0

    def record(self, stream: Any = None) -> None:
        self._num_launched = FakeCuda.current().num_launched

    def synchronize(self) -> None:
        FakeCuda.current().wait_until(self._num_launched, "an event")

    def elapsed_time(self, other: "_Event") -> float:
        return 1.0


class _Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        FakeCuda.current().wait("a stream")

    def wait_stream(self, other: "_Stream") -> None:
        pass


@contextlib.contextmanager
def _captured(graph: cuda_tape.Tape, **options: Any) -> Iterator[None]:
    device = FakeCuda.current()
    device.is_capturing = True
    try:
        with graph.recording():
            yield
    finally:
        device.is_capturing = False


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Let there be one CUDA device. Skips the test where its guard cannot be built."""
    try:
        _load_guard()
    except BuildError as error:
        pytest.skip(f"the guard of the fake device cannot be built on this machine: {error}")
    device = FakeCuda()
    with pytest.MonkeyPatch.context() as patch:
        _stand_in(patch, device)
        patch.setattr(FakeCuda, "_current", device)
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with device:
                yield device
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts)
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


def _stand_in(patch: pytest.MonkeyPatch, device: FakeCuda) -> None:
    """Replace what asks a driver."""
    cuda: Any = torch.cuda
    replacements: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "Fake H100",
        "current_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda of=None: device.wait("the device"),
        "graph_pool_handle": lambda: None,
        "Event": _Event,
        "Stream": _Stream,
        "CUDAGraph": cuda_tape.Tape,
        "graph": _captured,
    }
    for name, replacement in replacements.items():
        patch.setattr(cuda, name, replacement)
    # Threads of transformers, in which this device is not active, would read the weights.
    patch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")


@functools.cache
def _load_guard() -> None:
    """Build the guard unless it was, and let torch know it. Raises BuildError."""
    compiler = find_compiler()
    includes = Path(torch.__file__).parent / "include"
    libraries = Path(torch.__file__).parent / "lib"
    command = [
        compiler,
        "-std=c++20",
        "-O0",
        "-shared",
        "-fPIC",
        f"-I{includes}",
        str(GUARD),
        f"-L{libraries}",
        "-lc10",
    ]
    digest = hashlib.sha256(" ".join((torch.__version__, *command, GUARD.read_text())).encode()).hexdigest()
    library = cache_folder() / f"fake-guard-{digest[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=library.parent, suffix=".so.part")
        os.close(handle)
        done = subprocess.run([*command, "-o", made], capture_output=True, text=True)
        if done.returncode:
            os.unlink(made)
            raise BuildError(f"{compiler} failed: {done.stderr[:500]}")
        os.replace(made, library)
    ctypes.CDLL(str(library))
