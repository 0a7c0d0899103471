"""Tensors on their way between device and host without the host waiting for the device's other work.

A blocking copy from the GPU waits for everything that was launched before it, and one to the GPU too unless its source
is pinned. `to_host` copies on a stream of its own, after what made the tensor and beside what comes later; `to_device`
copies from pinned memory. On CPU both hand the tensor on.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostCopy:
    """A tensor's copy on the host. Made by `to_host`; may be waited for on any thread."""

    def __init__(self, tensor: Tensor, copied: torch.cuda.Event | None) -> None:
        self._tensor = tensor
        self._copied = copied

    def wait(self) -> Tensor:
        """The copy, in CPU memory, of the shape and dtype of what was copied."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor


def to_host(tensor: Tensor) -> HostCopy:
    """Begin to copy; call it where the tensor was made, on the stream that made it.

    On CPU there is nothing to copy: the result is the tensor itself, so it must not be written to afterwards.
    """
    if tensor.device.type != "cuda":
        return HostCopy(tensor, None)
    stream = _copy_stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not handed out again before the copy has been made
        copied = torch.cuda.Event()
        copied.record(stream)
    return HostCopy(copy, copied)


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on the device. The host goes on at once; later work on the current stream sees the values."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
