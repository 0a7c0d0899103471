"""Counts what would make the host wait for a GPU, on a machine that has none.

What a forward returns is *on the device*, and so is everything computed from it: a dispatch mode follows that through
every operation, by storage. A wait is whatever brings such a value, or a shape that depends on one, to the host:
`item`, `bool`, `tolist`, `cpu`, `numpy`, `nonzero`, indexing by a mask; `to_host`, whatever it copies. Inside a forward
every value counts as on the device.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from outrider.engine.model_runner import ModelRunner
from tests.engine.cuda_waits import name_of, waits

_TO_HOST = {"tolist", "cpu", "numpy", "__array__"}


class SyncCounter:
    """`with counter.step():` around a step. `waits` lists where the host would have waited, in order."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.forward_waits: list[str] = []
        self._in_forward = self._in_step = False
        self._storages: dict[int, Any] = {}  # held, so that an address names one storage as long as it is known

    @contextmanager
    def step(self) -> Iterator[None]:
        self._in_step = True
        try:
            with _Functions(self), _Operations(self):
                yield
        finally:
            self._in_step = False
            self._storages.clear()

    @contextmanager
    def forward(self) -> Iterator[None]:
        self._in_forward = True
        try:
            yield
        finally:
            self._in_forward = False

    def move(self, tensors: Any) -> None:
        """These are on the device."""
        for tensor in tree_iter(tensors):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage

    def on_device(self, values: Any) -> bool:
        return any(isinstance(v, Tensor) and v.untyped_storage()._cdata in self._storages for v in tree_iter(values))

    def count(self, what: str) -> None:
        frames = [
            f for f in traceback.extract_stack() if "/site-packages/" not in f.filename and __file__ != f.filename
        ]
        where = f"{what} at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno} in {frames[-1].name}"
        (self.forward_waits if self._in_forward else self.waits).append(where)

    def is_wait(self, values: Any) -> bool:
        return self._in_forward or self.on_device(values)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        if self._in_step:
            with torch.utils._python_dispatch._disable_current_modes():
                yield
        else:
            yield


class _Operations(TorchDispatchMode):
    def __init__(self, counter: SyncCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = (args, kwargs or {})
        if self._counter.is_wait(inputs) and waits(func, args):
            self._counter.count(name_of(func))
        result = func(*args, **(kwargs or {}))
        if self._counter.on_device(inputs):
            self._counter.move(result)
        return result


class _Functions(TorchFunctionMode):
    """Methods that leave torch without an operation of their own."""

    def __init__(self, counter: SyncCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _TO_HOST and self._counter.is_wait(args[:1]):
            self._counter.count(name)
            if name == "cpu":
                with self._counter.uncounted():
                    return args[0].clone()
            with self._counter.uncounted():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def install(monkeypatch: pytest.MonkeyPatch, counter: SyncCounter) -> None:
    """Forwards and copies to the host report to the counter."""
    forward: Callable[..., Tensor] = ModelRunner.forward

    def counted_forward(self: ModelRunner, *args: Any, **kwargs: Any) -> Tensor:
        with counter.forward():
            logits = forward(self, *args, **kwargs)
        counter.move(logits)
        return logits

    monkeypatch.setattr(ModelRunner, "forward", counted_forward)
