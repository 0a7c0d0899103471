"""CUDA graphs: a recorded sequence of launches, replayed over buffers that stay where they are.

`GraphMaker` is the seam to the GPU. Tests put a double there that runs the function again on the same buffers, which
proves everything but the recording itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

NUM_WARM_UPS = 2
"""Runs before a capture: libraries choose and allocate at their first calls, which a capture forbids."""


class Graph(Protocol):
    def replay(self) -> None:
        """Run what was captured once more, on the current stream."""


class GraphMaker(Protocol):
    def capture(self, compute: Callable[[], None]) -> Graph:
        """compute: reads and writes buffers that outlive it, and must not wait for the device.

        It is run, too: what it writes must be harmless. Raises what torch raises when it cannot be captured.
        """


class CudaGraphMaker:
    """All graphs share one memory pool, so what each needs between its kernels is taken once, by the largest."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], None]) -> Graph:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using CUDA (copies being waited for) while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        return graph
