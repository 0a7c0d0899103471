"""Decode and verify steps as CUDA graphs: which shapes are captured, and which of them is used for a step.

A CUDA graph is a recorded sequence of launches, replayed over buffers with fixed addresses; `StaticPlan` is a plan in
such buffers. A step is padded to the smallest captured shape that is large enough; if there is none, the step runs
eagerly. When a graph is captured, it is compared with an eager forward of made-up rows, and dropped if it differs. Used
by `GraphedPath`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.engine.attention.paged_plan import PagedPlan
from outrider.engine.cuda.static_plan import StaticPlan
from outrider.engine.files.model_files import first_line
from outrider.engine.host_copy import to_device
from outrider.engine.step_plan import Row
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

WIDTHS = (6, 1, 2, 4, 9)
"""Numbers of tokens per row (one sequence) of the steps that are captured, the most frequent first. 6: the target
verifies 5 draft tokens. 1: a decode. 2: a draft worker feeds one token more than in a decode, since all of its draft
tokens were accepted. 4 and 9: the target verifies 3 and 8 draft tokens."""
FREE_TOKENS = 64
"""Number of tokens up to which a padded step is always replayed: up to it, a step takes as long as reading the weights,
whether its tokens are padding or not."""
LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest accepted difference of a logit between a replayed graph and an eager forward, as a fraction of the largest
logit, by the dtype of the weights."""


class Graph(Protocol):
    """Recorded sequence of launches on a GPU."""

    def replay(self) -> None:
        """Run the recorded launches again, on the current stream."""


class GraphMaker(Protocol):
    """Interface to the CUDA graphs of a GPU. Tests implement it by running the function again on the same buffers."""

    def capture(self, compute: Callable[[], None]) -> Graph:
        """Run `compute` and record its launches. Return the graph. The buffers that `compute` uses must live as long as
        the graph, and it must not wait for the device.

        Raises torch's errors for a function that cannot be captured.
        """


class CudaGraphMaker:
    """Captures CUDA graphs that share one memory pool, which is as large as the largest graph needs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], None]) -> Graph:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # libraries choose and allocate at their first calls, which a capture forbids
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using CUDA (copies being waited for) while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        return graph


@dataclass(frozen=True, slots=True)
class StepShape:
    """Shape of a captured step: how many rows it has, and how many tokens each row has. A row is one sequence here."""

    num_rows: int
    """Number of rows (sequences) of the step, made-up rows included."""
    width: int
    """Number of tokens of each row (one sequence), padding included; the same for all rows of the step."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the step: rows times width, padding included."""
        return self.num_rows * self.width

    def __str__(self) -> str:
        return f"{self.num_rows} rows of {self.width} tokens"


def batch_sizes(max_rows: int) -> list[int]:
    """Return the numbers of rows (sequences) of the steps to capture: `max_rows` and the powers of two below it. The
    largest comes first, so that the captures after it reuse its memory.
    """
    # 6: [6, 4, 2, 1]
    sizes = [max_rows]
    for n in reversed(range(max_rows.bit_length())):
        if 1 << n < max_rows:
            sizes.append(1 << n)
    return sizes


def best_shape(shapes: Iterable[StepShape], rows: Sequence[Row]) -> StepShape | None:
    """Return the smallest shape, by its number of tokens, into which the rows (sequences) fit; None if there is none,
    or if it has more than FREE_TOKENS tokens and more than twice as many as the rows have new ones.

    A row with fewer new tokens than the shape has per row also feeds its last cached tokens again. So a shape may not
    have more tokens per row than the shortest row has, cached and new together.
    """
    if not rows:
        return None
    num_new = width = 0
    shortest = rows[0].num_tokens
    for row in rows:
        num_new += row.num_new
        width = max(width, row.num_new)
        shortest = min(shortest, row.num_tokens)
    best: StepShape | None = None
    for shape in shapes:
        is_large_enough = shape.num_rows >= len(rows) and width <= shape.width <= shortest
        if is_large_enough and (best is None or shape.num_tokens < best.num_tokens):
            best = shape
    if best is None or best.num_tokens <= max(FREE_TOKENS, 2 * num_new):
        return best
    return None


@dataclass(slots=True)
class _CapturedStep:
    static: StaticPlan
    graph: Graph
    taps: Sequence[int]
    features: Tensor | None
    """Tapped hidden states, [num_tokens, taps, d], to which each replay writes. It is memory of the graph, which this
    reference keeps allocated."""


class StepGraphs:
    """Captured graphs of `run`, a function from a plan to logits [N, V] float32 and features [T, taps, d] or None.

    N is the length of the plan's `logits_at`, T the number of its tokens.
    """

    def __init__(
        self,
        run: Callable[[PagedPlan], tuple[Tensor, Tensor | None]],
        maker: GraphMaker,
        device: torch.device,
        dtype: torch.dtype,
        vocab_size: int,
        block_size: int,
    ) -> None:
        """vocab_size: number of logits at a position. dtype: dtype of the weights. block_size: number of tokens in a
        block.
        """
        self._run = run
        self._maker = maker
        self._device = device
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._largest_difference = LARGEST_DIFFERENCE[dtype]
        self._captured: dict[StepShape, _CapturedStep] = {}
        self.taps: Sequence[int] = ()
        """Taps whose hidden states `run` currently returns. A step that was captured without one of them is captured
        again before its next use. A tap that is no longer set stays in the graphs captured with it, where it costs
        memory and a copy per step."""
        self._logits = torch.empty(0, vocab_size, device=device)  # of the last replay, [tokens, V] float32

    @property
    def shapes(self) -> set[StepShape]:
        """Shapes of the steps that are captured."""
        return set(self._captured)

    def capture(self, max_rows: int, table_width: int, budget_s: float, widths: Sequence[int]) -> None:
        """Capture steps of all widths and numbers of rows, until `budget_s` seconds are over.

        max_rows: maximum number of rows of a step. table_width: maximum number of blocks of a row. widths: numbers of
        tokens per row, the most frequent first. Raises nothing: a shape that is not captured runs eagerly.
        """
        started_s = time.monotonic()
        sizes = batch_sizes(max_rows)
        for shape in (StepShape(size, width) for width in widths for size in sizes):
            if time.monotonic() - started_s > budget_s:
                log.info("CUDA graphs: %.0f s are over, wider steps run eagerly", budget_s)
                break
            if not self._captured:
                self._logits = torch.empty(sizes[0] * max(widths), self._vocab_size, device=self._device)
            static = StaticPlan(
                shape.num_rows, shape.width, table_width, self._block_size, self._vocab_size, self._device
            )
            if not self._add(shape, static):
                break
        log.info("CUDA graphs: %d steps captured in %.1f s", len(self._captured), time.monotonic() - started_s)

    def _add(self, shape: StepShape, static: StaticPlan) -> bool:
        # Captures a step and keeps it if it is right; returns whether it could be captured.
        try:
            captured = self._capture(shape, static)
            if self._is_right(shape, captured):
                self._captured[shape] = captured
        except Exception as error:  # a class that waits for the device, or memory
            log.warning("CUDA graphs: %s cannot be captured and run eagerly: %s", shape, _error_text(error))
            return False
        return True

    def _capture(self, shape: StepShape, static: StaticPlan) -> _CapturedStep:
        static.load([])  # a capture runs the step, which must not write the KV of rows of an earlier replay again
        logits = self._logits[: shape.num_tokens]  # [num_tokens, V]
        features: Tensor | None = None

        def compute() -> None:
            nonlocal features
            found, features = self._run(static.plan)
            logits.copy_(found)

        graph = self._maker.capture(compute)
        return _CapturedStep(static, graph, self.taps, features)

    def forward(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor | None] | None:
        """Replay a captured step over the rows. Return their requested logits [sum(num_logits), V] float32 in the order
        of the rows, and the tapped hidden states [sum(num_new), taps, d] of their new tokens.

        The hidden states are None if there are no taps. Returns None if no captured shape fits the rows.
        """
        shape = best_shape(self._captured, rows)
        if shape is not None and not set(self.taps) <= set(self._captured[shape].taps):
            self._add(shape, self._captured.pop(shape).static)
        if shape is None or shape not in self._captured:
            return None
        captured = self._captured[shape]
        num_logits = captured.static.load(rows)
        captured.graph.replay()
        logits = self._logits.index_select(0, captured.static.logits_at[:num_logits])  # [N, V]
        if captured.features is None or not self.taps:
            return logits, None
        features = captured.features.index_select(0, self._new_tokens(rows, shape))  # [sum(num_new), taps, d]
        if self.taps != captured.taps:
            columns = np.array([captured.taps.index(tap) for tap in self.taps])
            features = features.index_select(1, to_device(columns, self._device))
        return logits, features

    def _new_tokens(self, rows: Sequence[Row], shape: StepShape) -> Tensor:
        # Indices of the new tokens in a padded step, int64. Width 6, num_new 1 and 2: [5, 10, 11]
        indices: list[np.ndarray] = []
        end = 0
        for row in rows:
            end += shape.width
            indices.append(np.arange(end - row.num_new, end))
        return to_device(np.concatenate(indices), self._device)

    def _is_right(self, shape: StepShape, captured: _CapturedStep) -> bool:
        # Whether a replay over other rows than were captured computes what an eager forward does.
        captured.static.load([], made_up_id=self._vocab_size // 2)
        logits, features = self._run(captured.static.plan)
        captured.graph.replay()
        differences = [_difference(self._logits[: shape.num_tokens], logits)]
        if features is not None and captured.features is not None:
            differences.append(_difference(captured.features, features))
        if all(difference <= self._largest_difference for difference in differences):  # NaN is not
            return True
        log.warning("CUDA graphs: %s differ from an eager step by %.1e, the graph is dropped", shape, max(differences))
        return False


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
