"""Copy tensors between device and host, and measure the time for which a device works.

A copy from a GPU waits for everything that was launched before it, so a step makes a single copy of all that the host
reads. A copy to a GPU waits, too, unless its source is in pinned memory. Called on the engine thread, never on the
event loop.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Return copies in CPU memory of tensors that are all on one device, with one wait for the device."""
    on_gpu = tensors[0].device.type == "cuda"
    copies: list[Tensor] = []
    for tensor in tensors:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        copies.append(copy.copy_(tensor, non_blocking=True))
    if on_gpu:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def to_device(values: NDArray[np.generic] | Tensor, device: torch.device) -> Tensor:
    """Return a copy of the array or tensor on the device, made without waiting; a tensor that is on the device already
    is returned itself.

    Work that is launched later on the current stream reads the copied values.
    """
    if isinstance(values, Tensor):
        tensor = values
    else:
        tensor = torch.from_numpy(values)
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class DeferredCopies(Generic[Key]):
    """Tensors on a device by key, to be copied to the host as late as possible. When one of them is needed, all pending
    ones are copied with one wait.
    """

    def __init__(self) -> None:
        self._pending: dict[Key, Tensor] = {}
        self._copied: dict[Key, Tensor] = {}

    def add(self, key: Key, tensor: Tensor) -> None:
        """Add a tensor under `key`. It replaces an earlier tensor of the same key."""
        self.drop(key)
        self._pending[key] = tensor

    def get(self, key: Key) -> Tensor | None:
        """Return the tensor of `key` in CPU memory, copied now if it was not yet; None if none was added."""
        if key in self._pending:
            tensors = list(self._pending.values())
            if tensors[0].device.type != "cpu":
                tensors = to_host(*tensors)
            self._copied.update(zip(self._pending, tensors, strict=True))
            self._pending.clear()
        return self._copied.get(key)

    def drop(self, key: Key) -> None:
        """Remove the tensor of `key`, whether it was copied or not."""
        self._pending.pop(key, None)
        self._copied.pop(key, None)


class DeviceMoment:
    """Moment at which a device has finished everything that was launched before this object was created."""

    def __init__(self, device: torch.device) -> None:
        self._at_s = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: DeviceMoment) -> float:
        """Wait until the device reaches this moment. Return the seconds since an earlier moment of the same device."""
        if self._event is None or earlier._event is None:
            return self._at_s - earlier._at_s
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3
