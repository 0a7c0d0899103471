"""Host values to a device without waiting for it: what a step decides on the host and needs beside its logits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array on `device`. A copy from pageable memory would make the host wait: it leaves from pinned."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
