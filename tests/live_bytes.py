"""How many bytes tensors hold at once while something runs: what a device of that memory would need."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`with LiveBytes(tensors) as live:` counts those tensors and all that are made; `live.peak` is the most."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._known: set[int] = set()
        self._add(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._add(tree_leaves(result))
        return result

    def _add(self, values: Any) -> None:
        for value in values:
            if not isinstance(value, torch.Tensor):
                continue
            storage = value.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self._now += size
                self.peak = max(self.peak, self._now)
                weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size
