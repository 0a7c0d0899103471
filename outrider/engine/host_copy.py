"""Tensors on their way between device and host, and the time that a device's work takes.

A blocking copy from the GPU waits for everything that was launched before it, so a step makes one of all that it reads;
one to the GPU would wait too unless its source is pinned. Called on the engine thread, never on the event loop.
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
    """Copy tensors of one device into CPU memory, of the same shapes and dtypes, in one wait for that device."""
    on_gpu = tensors[0].device.type == "cuda"
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=on_gpu).copy_(t, non_blocking=True) for t in tensors]
    if on_gpu:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def to_device(values: NDArray[np.generic] | Tensor, device: torch.device) -> Tensor:
    """Return an array, or a tensor of the host or of the device, on the device. The host goes on at once; later work on
    the current stream sees the values.
    """
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class DeferredCopies(Generic[Key]):
    """Tensors of a device by key, of which the host is given one when it asks. The first that is asked for brings all
    that were added since, in one wait for the device.
    """

    def __init__(self) -> None:
        self._pending: dict[Key, Tensor] = {}
        self._copied: dict[Key, Tensor] = {}

    def add(self, key: Key, tensor: Tensor) -> None:
        """Add a tensor, in place of an earlier one of the key."""
        self.drop(key)
        self._pending[key] = tensor

    def get(self, key: Key) -> Tensor | None:
        """Return the tensor in CPU memory; None where none was added."""
        if key in self._pending:
            tensors = list(self._pending.values())
            copies = tensors if tensors[0].device.type == "cpu" else to_host(*tensors)
            self._copied.update(zip(self._pending, copies, strict=True))
            self._pending.clear()
        return self._copied.get(key)

    def drop(self, key: Key) -> None:
        self._pending.pop(key, None)
        self._copied.pop(key, None)


class Moment:
    """The moment at which a device is through with all that was launched before it was made."""

    def __init__(self, device: torch.device) -> None:
        self._at_s = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: Moment) -> float:
        """Return the seconds from an earlier moment of the same device to this one; wait until this one has come."""
        if self._event is None or earlier._event is None:
            return self._at_s - earlier._at_s
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3
